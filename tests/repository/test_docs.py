"""The documentation: every sample of Python runs, every command in it exists, every public name has its place.

A sample runs as it stands, but for the stand-ins below: tiny sizes, and the CPU for the GPU.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import pydoc
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import files_awq
import layers
import mxfp4
import pytest
import small_models
import torch
from safetensors.torch import save_file
from typer.main import get_command

import jitgemm
from jitgemm import deep_gemm
from jitgemm.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = {page: page.read_text(encoding="utf-8") for page in (*PAGES, *sorted((ROOT / "docs").rglob("*.md")))}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(*languages: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block in one of the languages."""
    blocks = ((page.relative_to(ROOT).as_posix(), *block) for page in PAGES for block in FENCE.findall(PAGES[page]))
    return [(page, text) for page, language, text in blocks if language.strip() in languages]


# Stand-ins: what a sample takes for granted is made here, as small as it works.


def small_model(kind: str, **more):
    transformers = pytest.importorskip("transformers", "5" if kind == "GptOss" else None)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def saved(name: str, model: torch.nn.Module, tensors: dict[str, torch.Tensor], quantization: dict) -> None:
    Path(name).mkdir()
    save_file({key: each.contiguous() for key, each in tensors.items()}, f"{name}/model.safetensors", {"format": "pt"})
    model.config.architectures, model.config.quantization_config = [type(model).__name__], quantization
    model.config.save_pretrained(name)


def model_folder(name: str) -> None:
    """A Llama with one layer of 64 × 64 Linears, in compressed-tensors with e4m3 activations."""
    model = small_model("Llama")
    layers = [key.removesuffix(".weight") for key in model.state_dict() if key.endswith("_proj.weight")]
    saved(name, model, small_models.checkpoint_tensors(model, *layers)[0], small_models.config())


def awq_folder(name: str) -> None:
    """The same in AWQ's gemm files."""
    model = small_model("Llama")
    tensors = dict(model.state_dict())
    for seed, key in enumerate([key for key in tensors if key.endswith("_proj.weight")]):
        prefix = key.removesuffix("weight")
        packed = files_awq.gemm(layers.layer(seed, *tensors.pop(key).shape))
        tensors |= {prefix + suffix: tensor for suffix, tensor in packed.items()}
    saved(name, model, tensors, files_awq.GEMM | {"group_size": 64})


def floats_folder(name: str) -> None:
    small_model("Llama").save_pretrained(name)


def gpt_oss_folder(name: str) -> None:
    """A gpt-oss with one layer, whose experts are in MXFP4."""
    model = small_model("GptOss", num_local_experts=2, num_experts_per_tok=1, pad_token_id=0)
    tensors = dict(model.state_dict())
    for seed, (part, n) in enumerate({"gate_up_proj": 128, "down_proj": 64}.items()):
        layer = f"model.layers.0.mlp.experts.{part}"
        parts = mxfp4.parts(seed, n, 64, experts=2, shift=-12)
        del tensors[layer]
        tensors |= {f"{layer}_blocks": parts.canonical.unflatten(2, (-1, 16)), f"{layer}_scales": parts.scales}
    saved(name, model, tensors, {"quant_method": "mxfp4"})


def group_of_one(monkeypatch) -> None:
    """What torchrun sets up, for one process."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


REPLACED = {
    'init_device_mesh("cuda"': 'init_device_mesh("cpu"',
    "DistributedConfig(tp_size=2)": "DistributedConfig(tp_size=1)",
    'device="cuda"': 'device="cpu"',
    'device_map="cuda"': 'device_map="cpu"',
    "n, k, m = 4096, 14336, 16": "n, k, m = 72, 256, 3",
    "max_m=4096": "max_m=1",
    "model.compile(": 'model.compile(backend="aot_eager", ',
}
"""In every sample."""

NAMED = {
    "Meta-Llama-3-8B-Instruct-W4AFP8": model_folder,
    "Llama-3-8B-bf16": floats_folder,
    "Qwen3-8B-AWQ": awq_folder,
    "gpt-oss-20b": gpt_oss_folder,
}
"""What makes the folder that a sample names."""

CANNOT_RUN = {"from vllm import LLM": "needs vLLM, a GPU and a trainer"}
"""The reason why a sample, named by its first line, cannot run here."""

SAMPLES = {text: page for page, text in reversed(fences("python", "py"))}
"""Page by text: a sample that stands on two pages runs once."""


@pytest.mark.parametrize("text", SAMPLES, ids=[f"{page}-{n}" for n, page in enumerate(SAMPLES.values())])
def test_every_sample_runs(text, tmp_path, monkeypatch):
    if reason := CANNOT_RUN.get(text.splitlines()[0]):
        pytest.skip(reason)
    if "transformers" in text:
        pytest.importorskip("transformers", "5" if "DistributedConfig" in text else None)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    for name, make in NAMED.items():
        if name in text:
            make(name)
    if "torchrun" in text:
        group_of_one(monkeypatch)
    names: dict[str, object] = {}
    for long, short in REPLACED.items():
        text = text.replace(long, short)
    exec(compile(text, "sample", "exec"), names)
    results = [names[name] for name in ("out", "logits") if name in names]
    assert all(result.isfinite().all() and result.abs().max() > 0 for result in results)
    assert results or isinstance(names["weight"], jitgemm.W4Weight)


def test_no_stand_in_is_left_over():
    text = "".join(SAMPLES)
    assert [name for name in (*REPLACED, *NAMED, *CANNOT_RUN) if name not in text] == []


# Commands: `jitgemm …` is parsed by the command itself, `… scripts/x` needs options and words that the script knows.


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) of every line in a block without a language that starts like a command; "" ends a block."""
    found = []
    for page, text in fences("", "sh", "bash", "shell"):
        for line in text.replace("\\\n", " ").splitlines():
            if re.match(r"(python|scripts/|pip|jitgemm|git) ?", line):
                found.append((page, line.split("#")[0].strip()))
        found.append((page, ""))
    return found


def jitgemm_commands() -> list[tuple[str, str]]:
    """(page, command) in blocks, and of `jitgemm …` in running text."""
    found = [(page, line) for page, line in shell_lines() if line.startswith("jitgemm ")]
    for page, text in PAGES.items():
        spans = re.findall(r"`(jitgemm [^`]+)`", FENCE.sub("", text))
        found += [(page.relative_to(ROOT).as_posix(), " ".join(span.split())) for span in spans]
    return sorted(set(found))


PLACEHOLDERS = {"N,K": "256,256", "M": "3", "N": "256", "K": "256", "KEY": "0", "LABEL": "0"}


@pytest.mark.parametrize(("page", "command"), jitgemm_commands())
def test_every_jitgemm_command_is_one(page, command):
    """Parsed, not run: tests/cli/test_cli.py runs them."""
    found = get_command(app)
    tokens = [PLACEHOLDERS.get(token, token) for token in shlex.split(command)[1:] if token not in ("…", "...")]
    while tokens and hasattr(found, "commands"):
        assert tokens[0] in found.commands, f"{command}: no command {tokens[0]}"
        found = found.commands[tokens.pop(0)]
    if tokens:  # else only its name is mentioned
        found.make_context("jitgemm", tokens)


def script_lines() -> list[tuple[str, str]]:
    lines, past = [], False
    for page, line in shell_lines():
        past = bool(line) and (past or line.startswith("git checkout"))
        if not past and "scripts/" in line:  # what a block runs behind a checkout cannot be looked at here
            lines.append((page, line))
    return lines


@pytest.mark.parametrize(("page", "line"), script_lines())
def test_scripts_have_the_options_that_the_docs_give_them(page, line):
    tokens = shlex.split(line.partition(" > ")[0])
    tokens = tokens[1:] if tokens[0] == "python" else tokens
    script = ROOT / tokens[0]
    assert script.is_file()
    sources = [script] if script.suffix == ".sh" else [script, *(ROOT / "scripts" / "benchmark_lib").glob("*.py")]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    unknown = [token for token in tokens[1:] if token.startswith("--") and not re.search(rf'["/]{token}"', text)]
    assert unknown == []
    if len(tokens) > 1 and re.fullmatch(r"[a-z]+", tokens[1]):
        assert re.search(rf"\b{tokens[1]}\b", text), f"{tokens[1]}: not in {script.name}"


def test_extras_in_the_docs_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page, text in PAGES.items():
        for names in re.findall(r"(?:\.|jitgemm)\[([\w,]+)\]", text):
            assert set(names.split(",")) <= set(extras), page


# Links and the site.


def anchors(page: Path) -> set[str]:
    """What a forge and MyST call the page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower()).replace(" ", "-") for title in titles
    }


def test_links_lead_somewhere():
    bad = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            if re.match(r"https?:|mailto:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                bad.append(f"{page.relative_to(ROOT)}: {target}")
    assert bad == []


def named_functions() -> list[tuple[str, str]]:
    """(file of the package, function) of every `file.py:function` on the architecture page, and of its pictures'
    lines."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"((?:\w+/)*\w+\.py):(\w+(?:\.\w+)*)", text)
    return sorted({*found, *((file, name) for name, file in re.findall(r"(\w+(?:\.\w+)*)  +((?:\w+/)*\w+\.py)", text))})


@pytest.mark.parametrize(("file", "name"), named_functions())
def test_functions_on_the_architecture_page_are_where_it_says(file, name):
    scope: ast.AST = ast.parse((ROOT / "jitgemm" / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = [each for each in ast.iter_child_nodes(scope) if getattr(each, "name", "") == part]
        assert inside, f"{file} has no {name}"
        scope = inside[0]


def test_files_in_pictures_are_there():
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        for file in re.findall(r"[\w/]+\.(?:py|cuh)\b", picture.read_text(encoding="utf-8")):
            assert (ROOT / "jitgemm" / file).exists() or (ROOT / "include" / "jitgemm" / file).exists(), file


def in_all() -> set[str]:
    """The names in every `__all__` of the package, and the functions that its entry points name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {entry.replace(":", ".") for group in project["entry-points"].values() for entry in group.values()}
    for path in (ROOT / "jitgemm").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    return found


@functools.cache
def resolved(name: str) -> object:
    """The function or class of that dotted name, or that a method's name begins with; None for anything else."""
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        try:
            found = pydoc.locate(".".join(parts[:end]))
        except pydoc.ErrorDuringImport:
            return None
        if inspect.isfunction(found) or inspect.isclass(found):
            return found
    return None


def test_the_api_page_has_every_public_name():
    """Those that a module offers with `__all__`, and the functions and classes that the pages for users name."""
    names = re.findall(r":: (jitgemm[\w.]*)$", (ROOT / "docs" / "api.rst").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(in_all() - set(names)) == []
    shown = [resolved(name) for name in names]
    missing = set()
    for text in (text for page, text in PAGES.items() if "notes" not in page.parts):
        named = re.findall(r"(?<![\w/.:])jitgemm(?:\.\w+)+", text)
        for module, imported in re.findall(r"^ *from (jitgemm[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            named += [f"{module}.{name.strip()}" for name in imported.split(",")]
        missing |= {name for name in named if (found := resolved(name)) is not None and found not in shown}
    assert sorted(missing - {f"jitgemm.deep_gemm.{name}" for name in vars(deep_gemm)}) == []  # by `automodule`


def test_the_site_builds_without_warnings(tmp_path):
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert 'id="jitgemm.gemm_w4a8_nt"' in page and "float8_e4m3fn" in page  # with its docstring
    assert 'id="jitgemm.hf.JitGemmConfig"' in page and "modules_to_not_convert" in page  # without transformers
