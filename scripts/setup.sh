# Sourced by the scripts of this folder: sets PYTHON to a Python that can run jitgemm, and its tests if the caller set
# WANT_TESTS=1, those too that need other libraries if JITGEMM_TEST_LIBRARIES is set, and makes `import jitgemm` find
# this checkout.
#
# What is there already is used where it suffices: $JITGEMM_PYTHON, the checkout's .venv, then python3. Otherwise .venv
# is made and filled from the network, with the versions of constraints.txt. JITGEMM_TORCH chooses another torch, and then the
# newest of all else; JITGEMM_TORCH_INDEX is an index to install torch from, such as https://download.pytorch.org/whl/cpu.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

check_python() {  # $1: a Python; 0 if it has what is needed
    "$1" "$ROOT/scripts/check_environment.py" ${WANT_TESTS:+--tests} ${JITGEMM_TEST_LIBRARIES:+--libraries}
}

without_libraries() {  # where a Python lacks what is needed
    if [ -n "${JITGEMM_TEST_LIBRARIES:-}" ]; then
        say "A library for the tests is missing. 'JITGEMM_TEST_LIBRARIES= scripts/test.sh' skips tests that need one"
    fi
    return 1
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

fill_venv() {  # $@: more requirements. torch first: what it brings decides whether an extra is needed
    local base torch="${JITGEMM_TORCH:-$(grep '^torch==' "$ROOT/constraints.txt")}" extras="test,docs${JITGEMM_TEST_LIBRARIES:+,libraries}"
    base="$(base_python)"
    [ -x "$VENV/bin/python" ] || "$base" -m venv "$VENV"
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
    local versions=(--constraint "$ROOT/constraints.txt")
    [ -z "${JITGEMM_TORCH:-}" ] || versions=()
    say "Installing $torch into $(basename "$VENV"): 0.2 GB for the CPU, several with CUDA (JITGEMM_TORCH chooses another)"
    "${pip[@]}" install ${JITGEMM_TORCH_INDEX:+--index-url "$JITGEMM_TORCH_INDEX"} "$torch"
    say "Installing $extras"
    # With torch's requirement again, which a library may else replace by another version
    "${pip[@]}" install "${versions[@]}" --editable "$ROOT[$extras]" "$torch" "$@" || without_libraries
    if ! "$VENV/bin/python" "$ROOT/scripts/check_environment.py" 2>/dev/null; then
        say "torch brought no CUDA bindings or no NVRTC: installing the cu12 extra"
        "${pip[@]}" install "${versions[@]}" --editable "$ROOT[cu12]"
    fi
    check_python "$VENV/bin/python" || without_libraries
}

if [ -n "${JITGEMM_PYTHON:-}" ]; then
    PYTHON="$JITGEMM_PYTHON"
    check_python "$PYTHON" || without_libraries
elif [ -x "$VENV/bin/python" ] && check_python "$VENV/bin/python"; then
    PYTHON="$VENV/bin/python"
elif command -v python3 >/dev/null && check_python python3 2>/dev/null; then
    PYTHON="$(command -v python3)"
    say "Using $PYTHON, which has all that is needed"
else
    fill_venv
    PYTHON="$VENV/bin/python"
fi
