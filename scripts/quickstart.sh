#!/usr/bin/env bash
# Sets everything up and runs the main job. With a Hopper GPU: a W4A8 GEMM, checked and timed. Without: the kernels of
# Llama-3-8B's layers are compiled and listed, and the same GEMM runs through the exact reference on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
