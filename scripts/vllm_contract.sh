#!/usr/bin/env bash
# Runs jitgemm.vllm's tests on the real vLLM, without a GPU and without its libraries: config, registry, parameters,
# loaders, layers and whole models of its CPU platform; no engine, no attention.
#   scripts/vllm_contract.sh [VERSION | FOLDER] [pytest arguments]
# VERSION: of the wheel, whose Python files alone are unpacked (default 0.24.0); FOLDER: where vllm lies unpacked, with
# its dist-info. The environment .venv-vllm-VERSION is kept; it borrows torch and the like from that of the tests.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
source="${1:-0.24.0}"
shift || true
export VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ -d "$source" ]; then
    version="$(basename "$source"/vllm-*.dist-info)"
    version="${version#vllm-}"
    version="${version%.dist-info}"
else
    version="$source"
fi
venv="$ROOT/.venv-vllm-$version"
if [ ! -f "$venv/made" ]; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
    if [ -d "$source" ]; then
        cp -r "$source/vllm" "$source/vllm-$version.dist-info" "$site/"
        find "$site/vllm" -name '*.so' -delete
    else
        "${pip[@]}" download --no-deps --dest "$venv/wheel" --only-binary=:all: "vllm==$version"
        unzip -q "$venv"/wheel/vllm-*.whl -d "$site" -x '*.so'
        rm -r "$venv/wheel"
    fi
    sed -i 's/^Version: .*/&+cpu/' "$site"/vllm-*.dist-info/METADATA # by which it knows its platform
    # What its modules import, beside torch; versions as it pins them where it does.
    "$venv/bin/python" - "$site" >"$venv/requirements.txt" <<'END'
import re
import sys
from pathlib import Path

NAMES = """
aiohttp anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors depyf diskcache einops fastapi gguf ijson
jsonschema lark llguidance lm-format-enforcer mcp mistral-common model-hosting-container-standards msgspec openai
openai-harmony outlines-core partial-json-parser prometheus-client prometheus-fastapi-instrumentator psutil py-cpuinfo pybase64
python-json-logger pyzmq regex setproctitle six tiktoken transformers uvloop watchfiles
xgrammar
""".split()
[metadata] = Path(sys.argv[1]).glob("vllm-*.dist-info/METADATA")
pinned = {}
for line in re.findall(r"^Requires-Dist: ([^\n;]+)(?:;(?! extra).*)?$", metadata.read_text(), re.M):
    name = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
    pinned[name] = re.sub(r"\[.*?\]", "", line.strip())
print("\n".join(pinned.get(name, name) for name in NAMES))
END
    "${pip[@]}" install -r "$venv/requirements.txt"
    touch "$venv/made"
fi
say "vLLM $version, $("$venv/bin/python" --version)"
status=0
"$venv/bin/python" -m pytest tests/serving/test_{served{,_experts,_saved,_invariant,_eplb},loaded_again,models_by_name,recipes,vllm{,_exchange}}.py "$@" || status=$?
"$venv/bin/python" -m pytest tests/serving/test_vllm_models.py "$@" || status=$?
"$venv/bin/python" -m pytest tests/serving/test_vllm_graphs.py "$@" || status=$?
exit "$status"
