#!/usr/bin/env bash
# Runs what scripts/sanitize.py has, or what has one of the WORDs in its name, under compute-sanitizer: memcheck, then
# synccheck.
#   scripts/sanitize.sh [WORD ...]
# Needs a Hopper GPU and
# compute-sanitizer (CUDA toolkit); COMPUTE_SANITIZER says where, SANITIZE_LIMIT_S limits each tool (default 240).
# Exits 0 when neither tool found anything.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

find_sanitizer() {
    local candidate
    for candidate in "${COMPUTE_SANITIZER:-}" compute-sanitizer /usr/local/cuda/bin/compute-sanitizer \
        /usr/local/cuda/compute-sanitizer/compute-sanitizer /usr/local/cuda-*/bin/compute-sanitizer; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "compute-sanitizer not found; COMPUTE_SANITIZER=/path/to/compute-sanitizer says where it is"
    return 1
}

sanitizer="$(find_sanitizer)"
# Every tensor an allocation of its own: inside PyTorch's cached blocks an access out of bounds would look legal.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

say "The same without a tool, which also fills the kernel cache"
timeout "${SANITIZE_LIMIT_S:-240}" "$PYTHON" scripts/sanitize.py "$@"
for tool in memcheck synccheck; do
    say "compute-sanitizer --tool $tool"
    timeout "${SANITIZE_LIMIT_S:-240}" "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 9 \
        --print-limit 20 "$PYTHON" scripts/sanitize.py "$@"
done
