# Sourced by the scripts beside it: sets PYTHON to a Python that can run jitgemm, and its tests if the caller set
# WANT_TESTS=1, and makes `import jitgemm` find this checkout.
#
# What is there already is used where it suffices: $JITGEMM_PYTHON, the checkout's .venv, then python3. Otherwise .venv
# is made and filled from the network. JITGEMM_TORCH chooses torch's requirement (default torch==2.13.0) and
# JITGEMM_TORCH_INDEX an index to install it from, such as https://download.pytorch.org/whl/cpu.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

check_python() {  # $1: a Python; 0 if it has what is needed
    "$1" "$ROOT/scripts/check_environment.py" ${WANT_TESTS:+--tests}
}

base_python() {  # a Python 3.11 or later on the path
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$candidate"
            return
        fi
    done
    say "No Python 3.11 or newer found (apt install python3 python3-venv)"
    return 1
}

fill_venv() {  # torch first: what it brings decides whether an extra is needed
    local base
    base="$(base_python)"
    [ -x "$VENV/bin/python" ] || "$base" -m venv "$VENV"
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
    say "Installing ${JITGEMM_TORCH:-torch==2.13.0} into .venv (JITGEMM_TORCH chooses another)"
    "${pip[@]}" install ${JITGEMM_TORCH_INDEX:+--index-url "$JITGEMM_TORCH_INDEX"} "${JITGEMM_TORCH:-torch==2.13.0}"
    "${pip[@]}" install --editable "$ROOT[test,docs]"
    if ! check_python "$VENV/bin/python" 2>/dev/null; then
        say "torch brought no CUDA bindings or no NVRTC: installing the cu12 extra"
        "${pip[@]}" install --editable "$ROOT[cu12,test,docs]"
    fi
    check_python "$VENV/bin/python"
}

if [ -n "${JITGEMM_PYTHON:-}" ]; then
    PYTHON="$JITGEMM_PYTHON"
    check_python "$PYTHON"
elif [ -x "$VENV/bin/python" ] && check_python "$VENV/bin/python"; then
    PYTHON="$VENV/bin/python"
elif command -v python3 >/dev/null && check_python python3 2>/dev/null; then
    PYTHON="$(command -v python3)"
    say "Using $PYTHON, which has all that is needed"
else
    fill_venv
    PYTHON="$VENV/bin/python"
fi
