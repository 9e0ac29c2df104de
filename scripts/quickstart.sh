#!/usr/bin/env bash
# Sets everything up and runs the main job. With a Hopper GPU: a W4A8 GEMM, checked and timed. Without: the kernels of
# Llama-3-8B's layers are compiled, and the same GEMM runs through the exact reference on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
if [ "$PYTHON" = "$VENV/bin/python" ]; then
    say "The command jitgemm is in $(basename "$VENV"): source $VENV/bin/activate"
fi
