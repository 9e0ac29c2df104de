#!/usr/bin/env bash
# Runs jitgemm.sglang's tests on the real SGLang, without a GPU and without its kernels: config, parameters, loaders, layers
# and whole models; no engine, no attention.
#   scripts/sglang_contract.sh [VERSION] [pytest arguments]      VERSION: of the wheel, default 0.5.23
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"
version="${1:-0.5.23}"
shift || true
# Of the last argument: pinned to what this Python may not have, and only imported.
contract sglang "$version" "
aiohttp cachetools compressed-tensors dill distro easydict einops fastapi gguf interegular ipython kernels llguidance
modelscope msgspec numba openai openai-harmony orjson partial-json-parser prometheus-client pybase64 python-multipart pyzmq
scipy sentencepiece setproctitle soundfile tiktoken transformers uvicorn uvloop watchfiles xgrammar xxhash zstandard
" "kernels numba soundfile"
if [ "$fresh" ]; then
    torch="$("$venv/bin/python" -c 'import torch; print(torch.__version__.split(".")[1])')"
    "${pip[@]}" install --no-deps "torchvision==0.$((torch + 15)).*" # whose operators are not called
    : >"$site/torchvision/_meta_registrations.py"
fi
kept "SGLang $version"
"$venv/bin/python" -m pytest tests/serving/test_{served{,_experts,_saved,_invariant,_eplb},loaded_again,models_by_name,recipes,sglang{,_models}}.py "$@"
