#!/usr/bin/env bash
# Runs the tests that compile under a line of NVRTC:
#   scripts/test_nvrtc.sh 12|13 [pytest arguments]
# The line that the tests' environment lacks gets a small environment of its own, which borrows torch from that. Exits 1 if
# the line cannot be had.
set -euo pipefail
other="${1:-}"
if [ "$other" != 12 ] && [ "$other" != 13 ]; then
    echo "usage: scripts/test_nvrtc.sh 12|13 [pytest arguments]" >&2
    exit 2
fi
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

nvrtc_line() { "$1" -c 'from jitgemm.jit.nvrtc import nvrtc_info; print(nvrtc_info().version[0])'; }
shift
line="$(nvrtc_line "$PYTHON")"
if [ "$other" = "$line" ]; then
    exec "$PYTHON" -m pytest -m "nvrtc and not gpu" "$@"
fi
if ! "$PYTHON" -c "import sys, torch; sys.exit((torch.version.cuda or '$other').split('.')[0] != '$other')"; then
    say "torch loads its own NVRTC $line, which cannot be mixed with NVRTC $other; a CPU build of torch can"
    exit 1
fi
OTHER_VENV="$ROOT/.venv-cu$other"
[ -x "$OTHER_VENV/bin/python" ] || "$PYTHON" -m venv "$OTHER_VENV"
site="$("$OTHER_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
rm -f "$site/first_environment.pth" # pip would take the first environment's packages for its own
"$PYTHON" - "cu$other" >"$OTHER_VENV/requirements.txt" <<'PY'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
print("\n".join(project["optional-dependencies"][sys.argv[1]]))
PY
"$OTHER_VENV/bin/python" -m pip --disable-pip-version-check --quiet install --requirement "$OTHER_VENV/requirements.txt"
"$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)' >"$site/first_environment.pth"
check_python "$OTHER_VENV/bin/python"
[ "$(nvrtc_line "$OTHER_VENV/bin/python")" = "$other" ]
exec "$OTHER_VENV/bin/python" -m pytest -m "nvrtc and not gpu" "$@"
