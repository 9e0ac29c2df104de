#!/usr/bin/env bash
# Runs the tests marked `gpu` and writes a note on the run, for docs/notes/log/:
#   scripts/gpu_tests.sh NOTE.md [COMMIT] [pytest arguments]
# COMMIT is asked of git when it is not given or is "-". GPU_TESTS_LIMIT_S limits the run (default 540 seconds).
# Exits as pytest does.
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

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
status=0
timeout "${GPU_TESTS_LIMIT_S:-540}" "$PYTHON" -m pytest -m gpu --durations=10 "$@" 2>&1 | tee "$log" || status=$?

mkdir -p "$(dirname "$note")"
"$PYTHON" scripts/gpu_note.py "$log" "$commit" "$status" >"$note"
say "Written to $note"
exit "$status"
