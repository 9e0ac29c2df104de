#!/usr/bin/env bash
# Runs jitgemm.vllm's tests on the real vLLM, without a GPU and without its libraries: config, registry, parameters,
# loaders, layers and whole models of its CPU platform; no engine, no attention.
#   scripts/vllm_contract.sh [VERSION] [pytest arguments]      VERSION: of the wheel, default 0.24.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"
version="${1:-0.24.0}"
shift || true
export VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1
contract vllm "$version" "
aiohttp anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors depyf diskcache einops fastapi gguf ijson
jsonschema lark llguidance lm-format-enforcer mcp mistral-common model-hosting-container-standards msgspec openai
openai-harmony outlines-core partial-json-parser prometheus-client prometheus-fastapi-instrumentator psutil py-cpuinfo pybase64
python-json-logger pyzmq regex setproctitle six tiktoken transformers uvloop watchfiles
xgrammar
"
[ ! "$fresh" ] || sed -i 's/^Version: .*/&+cpu/' "$site"/vllm-*.dist-info/METADATA # by which it knows its platform
kept "vLLM $version"
status=0
"$venv/bin/python" -m pytest tests/serving/test_{served{,_experts,_saved,_invariant,_eplb},loaded_again,models_by_name,recipes,vllm{,_exchange}}.py "$@" || status=$?
"$venv/bin/python" -m pytest tests/serving/test_vllm_models.py "$@" || status=$?
"$venv/bin/python" -m pytest tests/serving/test_vllm_graphs.py "$@" || status=$?
exit "$status"
