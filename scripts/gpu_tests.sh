#!/usr/bin/env bash
# Runs the tests marked `gpu` and appends a row on the run to a table, docs/notes/log/gpu-tests.md or another file:
#   scripts/gpu_tests.sh TABLE.md [COMMIT] [pytest arguments]
# COMMIT is asked of git when it is not given or is "-".
#
# Without arguments for pytest the files that have such tests are collected.
#
# Most of a test is the host's work, so GPU_TESTS_SHARDS processes (default: one for two CPUs, at most 8 a GPU) run a part
# of the tests each at the same time, with their share of the CPUs as threads. Of several GPUs each takes another first.
# They share a kernel cache, empty at first (GPU_TESTS_CACHE names another), and compile no kernel twice. One more runs
# the tests that are of several processes, which wait for one another most of the time.
#
# GPU_TESTS_LIMIT_S limits the run (default 540 seconds): processes then end as by Ctrl-C, with a summary of what ran.
# A failure is printed when it happens. Exits as the pytest that did worst does; 124: the limit.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ $# -lt 1 ]; then
    say "usage: scripts/gpu_tests.sh TABLE.md [COMMIT] [pytest arguments]"
    exit 2
fi
table="$(realpath -m "$1")"
commit="${2:--}"
shift $(($# < 2 ? $# : 2))
cd "$ROOT"
[ $# -gt 0 ] || set -- $(grep -l 'mark\.gpu' tests/*/test_*.py) # others take seconds to import
if [ "$commit" = - ]; then
    commit="$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)"
fi

logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
cpus="$("$PYTHON" -c 'from jitgemm.jit.compile_many import default_threads; print(default_threads())')"
gpus="$("$PYTHON" -c 'import torch; print(max(torch.cuda.device_count(), 1))')"
shards=$((cpus < 4 ? 1 : cpus < 16 * gpus ? cpus / 2 : 8 * gpus))
shards="${GPU_TESTS_SHARDS:-$shards}"
threads=$((cpus > shards ? cpus / shards : 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}" # else each process takes all CPUs for its own
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$threads}"
export GPU_TESTS_CACHE="${GPU_TESTS_CACHE:-$logs/kernels}"
export JITGEMM_CACHE_DIR="$GPU_TESTS_CACHE"
export GPU_TESTS_FAILURES="$logs/failures"
export PYTHONUNBUFFERED=1 # a process that is killed has written what it did
touch "$GPU_TESTS_FAILURES"
tail -n +1 -f --pid=$$ "$GPU_TESTS_FAILURES" &
watch=$!

processes=()
for shard in 0 $(seq "$shards"); do
    part=(-m "gpu and not ranks" --shard "$shard/$shards")
    [ "$shard" -gt 0 ] || part=(-m "gpu and ranks")
    if [ "$gpus" -gt 1 ]; then # device 0 of a process is another GPU in turn, and tests that need two see all
        order="$(for i in $(seq "$gpus"); do echo $(((shard + i) % gpus)); done | paste -sd,)"
        export CUDA_VISIBLE_DEVICES="$order"
    fi
    timeout --kill-after=20 "${GPU_TESTS_LIMIT_S:-540}" "$PYTHON" -m pytest "${part[@]}" --tb=short --durations=10 \
        "$@" >"$logs/shard-$shard" 2>&1 &
    processes+=($!)
done
status=5 # no tests
for process in "${processes[@]}"; do
    code=0
    wait "$process" || code=$?
    [ "$code" = 5 ] || status=$((status == 5 || code > status ? code : status))
done
kill "$watch" 2>/dev/null || true
cat "$logs"/shard-*

mkdir -p "$(dirname "$table")"
[ -s "$table" ] || "$PYTHON" scripts/gpu_note.py --header >"$table"
"$PYTHON" scripts/gpu_note.py "$commit" "$status" "$GPU_TESTS_FAILURES" "$logs"/shard-* | tee -a "$table"
say "Appended to $table"
exit "$status"
