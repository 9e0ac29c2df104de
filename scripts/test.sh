#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest. `--all-kernels` compiles every kernel that the tests
# know instead of a sample; scripts/test_nvrtc.sh compiles under NVRTC 12 or 13.
#
# The libraries that tests compare with and load models of, such as transformers, are installed too, and a test fails
# without them. `JITGEMM_TEST_LIBRARIES= scripts/test.sh` does without, and such tests skip.
set -euo pipefail
WANT_TESTS=1
export JITGEMM_TEST_LIBRARIES="${JITGEMM_TEST_LIBRARIES-1}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
processes=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then # a process for each CPU, each of which takes whole files
    cpus="$(nproc)"
    processes=(-n "$((cpus < 4 ? cpus : 4))" --dist loadfile)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # else each of them takes all CPUs for its own
fi
unset PYTHONDONTWRITEBYTECODE # each of them, and each child of a test, would compile every module again
exec "$PYTHON" -m pytest "${processes[@]}" "$@"
