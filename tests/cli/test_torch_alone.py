"""What README promises without a GPU, where nothing is installed but torch and what jitgemm itself requires."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BINDINGS = "cuda-"
"""How distributions begin that newer builds of torch for CUDA bring along."""


def required(*more: str) -> list[metadata.Distribution]:
    """The distributions of the package's dependencies, of more, and theirs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo, found = [*project["dependencies"], "numpy", *more], {}
    while todo:
        name = re.match(r"[\w.-]+", todo.pop())[0].lower()
        if name not in found and not name.startswith(BINDINGS):
            try:
                found[name] = metadata.distribution(name)
            except metadata.PackageNotFoundError:  # of other systems or versions of Python
                continue
            todo += [each for each in found[name].requires or () if "extra ==" not in each]
    return list(found.values())


def environment(place: Path, *more: str):
    """run(script): what the script prints in an environment of these alone, without a GPU."""
    for distribution in required(*more):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (place / name).exists():
                (place / name).symlink_to(distribution.locate_file(name))

    def run(script: str) -> str:
        paths = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{place}", "CUDA_VISIBLE_DEVICES": ""}
        variables = {"JITGEMM_CACHE_DIR": str(place / "cache"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
        done = subprocess.run(
            [sys.executable, "-S", "-c", script], cwd="/", env={**os.environ, **paths, **variables},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    said = run("""
import importlib.util
print(*(name for name in ("torch", "cuda", "transformers", "torchao") if importlib.util.find_spec(name)))""")
    assert said.split() == ["torch", *more]
    return run


LAYERS = """
expected = (lhs[0].double() * lhs[1].double()[:, None]) @ weight.dequantize().double().T
print("close", bool((out.double() - expected).abs().max() <= 2**-8 * expected.abs().max()))
import torch, jitgemm.nn
model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 32))
jitgemm.nn.quantize_(model, device="cpu")
print(model, model(torch.ones(3, 128)).shape)
from jitgemm.errors import DriverError
from jitgemm.runtime import driver
for use in (driver.driver_version, lambda: driver.bind(0), lambda: driver.load_kernel(b"", "", device=0, smem_bytes=0)):
    try:
        use()
    except DriverError as error:
        print(error)
"""
COMMANDS = """
print("COMMANDS", flush=True)
import json, tempfile
from pathlib import Path
import torch
from safetensors.torch import save_file
from jitgemm.cli import main
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
save_file({"model.embed_tokens.weight": torch.ones(8, 8)}, folder / "model.safetensors")
for argv in ("explain 16 4096 4096", "env", f"quantize {folder} {folder}/out --data none --device cpu",
             f"warmup --check --model {folder}", "warmup --shape 64,64 --max-m 1", "cache ls"):
    try:
        main(argv.split())
    except SystemExit as exit:
        print(argv.split()[0], "exits", exit.code or 0, flush=True)
"""


def test_readmes_layers_run_by_the_reference_and_commands_run_or_say_what_to_install(tmp_path):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "gemm_w4a8_bf16_nt" in each)
    assert "n, k, m = 4096, 14336, 16\n" in block
    said = environment(tmp_path)(block.replace("4096, 14336, 16", "256, 1024, 16") + LAYERS + COMMANDS)
    assert "close True" in said and "on the CPU the exact reference runs, and no kernel; on a GPU it would be:" in said
    assert said.count("W4A8Linear") == 2 and "torch.Size([3, 32])" in said
    for extra in (".[cu12]", ".[cu13]", "pip install 'cuda-bindings>=13,<14'"):
        assert said.partition("COMMANDS")[0].count(extra) == 3
    codes = re.findall(r"^(\w+) exits (\d)", said, re.MULTILINE)
    assert codes == list(zip("explain env quantize warmup warmup cache".split(), "002230"))
    assert "no Hopper GPU is at hand: this is what an h200 would run" in said
    assert said.count("pip install -e '.[hf]'") == 2
    assert "pip install 'cuda-python==12.9.*' 'nvidia-cuda-nvrtc-cu12" in said


def test_with_transformers_a_model_is_quantised(tmp_path):
    pytest.importorskip("transformers")
    said = environment(tmp_path, "transformers")(f"""
import transformers
from jitgemm.cli import main
sizes = {{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 32, "num_hidden_layers": 1}}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained("{tmp_path}/model")
try:
    main(["quantize", "{tmp_path}/model", "{tmp_path}/out", "--data", "none"])
except SystemExit as exit:
    print("exits", exit.code or 0)""")
    assert "exits 0" in said and "7 layers of 4 bits" in said and (tmp_path / "out" / "config.json").is_file()
