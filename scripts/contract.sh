# Sourced by the contracts of engines, after setup.sh's variables: `contract NAME VERSION NAMES [FREE]` sets `venv` and
# `site`, an environment .venv-NAME-VERSION that is kept. It has the Python files alone of the wheel, NAMES, which are what
# its modules import except torch, in the versions that it pins, where it does, except FREE's, and borrows torch and
# the like from the environment of the tests. `fresh` is set until `kept` says that all is in it.
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

contract() {
    venv="$ROOT/.venv-$1-$2"
    fresh=
    [ ! -f "$venv/made" ] || return 0
    fresh=1
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" download --no-deps --dest "$venv/wheel" --only-binary=:all: "$1==$2"
    unzip -q "$venv/wheel/$1"-*.whl -d "$site" -x '*.so'
    rm -r "$venv/wheel"
    "$venv/bin/python" - "$site" "$1" "$3" "${4:-}" >"$venv/requirements.txt" <<'END'
import re
import sys
from pathlib import Path

site, package, names, free = sys.argv[1:]
[metadata] = Path(site).glob(f"{package}-*.dist-info/METADATA")
pinned = {}
for line in re.findall(r"^Requires-Dist: ([^\n;]+)(?:;(?! extra).*)?$", metadata.read_text(), re.M):
    name = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
    pinned[name] = re.sub(r"\[.*?\]", "", line.strip())
print("\n".join(name if name in free.split() else pinned.get(name, name) for name in names.split()))
END
    "${pip[@]}" install -r "$venv/requirements.txt"
}

kept() {
    touch "$venv/made"
    say "$1, $("$venv/bin/python" --version)"
}
