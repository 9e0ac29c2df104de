#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest. Then the tests that compile run once more under the
# other NVRTC line (12 or 13), which lives in a small environment of its own that borrows torch from the first.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

"$PYTHON" -m pytest "$@"

[ $# -eq 0 ] || exit 0 # a chosen subset runs under the first line alone

nvrtc_line() { "$1" -c 'from jitgemm.nvrtc import nvrtc_info; print(nvrtc_info().version[0])'; }
line="$(nvrtc_line "$PYTHON")"
other=$((line == 12 ? 13 : 12))
if ! "$PYTHON" -c "import sys, torch; sys.exit((torch.version.cuda or '$other').split('.')[0] != '$other')"; then
    say "torch loads its own NVRTC $line, which cannot be mixed with NVRTC $other: the tests ran under NVRTC $line only"
    exit 0
fi
OTHER_VENV="$ROOT/.venv-cu$other"
requirements() {  # the extra's requirements, from pyproject.toml
    "$PYTHON" - "cu$1" <<'PY'
import pathlib, re, sys
text = pathlib.Path("pyproject.toml").read_text()
print("\n".join(re.findall(r'"([^"]+)"', re.search(rf"^{sys.argv[1]} = \[(.*)\]$", text, re.M)[1])))
PY
}
set_up_other() {  # every step is checked by hand: bash ignores `set -e` inside a condition
    [ -x "$OTHER_VENV/bin/python" ] || "$PYTHON" -m venv "$OTHER_VENV" || return
    local site
    site="$("$OTHER_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return
    # Not while pip runs: it would take the first environment's packages for its own.
    rm -f "$site/first_environment.pth"
    requirements "$other" >"$OTHER_VENV/requirements.txt" || return
    "$OTHER_VENV/bin/python" -m pip --disable-pip-version-check --quiet install --timeout 15 --retries 1 \
        --requirement "$OTHER_VENV/requirements.txt" || return
    "$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)' \
        >"$site/first_environment.pth" || return
    check_python "$OTHER_VENV/bin/python" || return
    [ "$(nvrtc_line "$OTHER_VENV/bin/python")" = "$other" ]
}
if ! set_up_other; then
    say "NVRTC $other is not here and could not be installed (offline?): the tests ran under NVRTC $line only"
    exit 0
fi
say "Once more under NVRTC $other: the tests that compile"
"$OTHER_VENV/bin/python" -m pytest -m "nvrtc and not gpu"
