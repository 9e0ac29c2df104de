#!/usr/bin/env bash
# Runs jitgemm.sglang's tests on the real SGLang, without a GPU and without its kernels: config, parameters, loaders, layers
# and whole models; no engine, no attention.
#   scripts/sglang_contract.sh [VERSION] [pytest arguments]
# VERSION: of the wheel, whose Python files alone are unpacked (default 0.5.23). The environment .venv-sglang-VERSION is
# kept; it borrows torch and the like from that of the tests.
set -euo pipefail
WANT_TESTS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
version="${1:-0.5.23}"
shift || true
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
venv="$ROOT/.venv-sglang-$version"
if [ ! -f "$venv/made" ]; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" download --no-deps --dest "$venv/wheel" --only-binary=:all: "sglang==$version"
    unzip -q "$venv"/wheel/sglang-*.whl -d "$site" -x '*.so'
    rm -r "$venv/wheel"
    # What its modules import, besides torch; versions as it pins them where it does.
    "$venv/bin/python" - "$site" >"$venv/requirements.txt" <<'END'
import re
import sys
from pathlib import Path

NAMES = """
aiohttp cachetools compressed-tensors dill distro easydict einops fastapi gguf interegular ipython kernels llguidance
modelscope msgspec numba openai openai-harmony orjson partial-json-parser prometheus-client pybase64 python-multipart pyzmq
scipy sentencepiece setproctitle soundfile tiktoken transformers uvicorn uvloop watchfiles xgrammar xxhash zstandard
""".split()
[metadata] = Path(sys.argv[1]).glob("sglang-*.dist-info/METADATA")
pinned = {}
for line in re.findall(r"^Requires-Dist: ([^\n;]+)$", metadata.read_text(), re.M):
    name = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
    pinned[name] = re.sub(r"\[.*?\]", "", line.strip())
free = {"kernels", "numba", "soundfile"}  # pinned to what this Python may not have; only imported
print("\n".join(name if name in free else pinned.get(name, name) for name in NAMES))
END
    "${pip[@]}" install -r "$venv/requirements.txt"
    torch="$("$venv/bin/python" -c 'import torch; print(torch.__version__.split(".")[1])')"
    "${pip[@]}" install --no-deps "torchvision==0.$((torch + 15)).*" # whose operators are not called
    : >"$site/torchvision/_meta_registrations.py"
    touch "$venv/made"
fi
say "SGLang $version, $("$venv/bin/python" --version)"
"$venv/bin/python" -m pytest tests/serving/test_{served{,_experts,_saved,_invariant,_eplb},loaded_again,models_by_name,recipes,sglang{,_models}}.py "$@"
