#!/usr/bin/env bash
# Runs the tests marked `gpu` and writes a note on the run, for docs/notes/log/:
#   scripts/gpu_tests.sh NOTE.md [COMMIT] [pytest arguments]
# COMMIT is asked of git when it is not given or is "-". GPU_TESTS_LIMIT_S limits the run (default 540 seconds).
# GPU_TESTS_SHARDS processes run a part of the tests each at the same time (default 4): most of a test is the host's
# work. Exits as the pytest that did worst does.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ $# -lt 1 ]; then
    say "usage: scripts/gpu_tests.sh NOTE.md [COMMIT] [pytest arguments]"
    exit 2
fi
note="$(realpath -m "$1")"
commit="${2:--}"
shift $(($# < 2 ? $# : 2))
cd "$ROOT"
if [ "$commit" = - ]; then
    commit="$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)"
fi

logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
shards="${GPU_TESTS_SHARDS:-4}"
processes=()
for shard in $(seq "$shards"); do
    timeout "${GPU_TESTS_LIMIT_S:-540}" "$PYTHON" -m pytest -m gpu --durations=10 --shard "$shard/$shards" "$@" \
        >"$logs/$shard" 2>&1 &
    processes+=($!)
done
status=0
for process in "${processes[@]}"; do
    wait "$process" || { code=$?; status=$((code > status ? code : status)); }
done
cat "$logs"/*

mkdir -p "$(dirname "$note")"
"$PYTHON" scripts/gpu_note.py "$commit" "$status" "$logs"/* >"$note"
say "Written to $note"
exit "$status"
