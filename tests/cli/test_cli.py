"""The jitgemm command: what it prints where, its exit codes, and that it agrees with the cache on disk."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tiny_kernel import serialised_kernel, spilling_kernel

from jitgemm import settings
from jitgemm.activations.kernel import quantize_source, quantize_spec
from jitgemm.activations.scheme import GELU_MULS, SILU_MUL
from jitgemm.cli import common
from jitgemm.cli.cache import describe_spec, kind_of
from jitgemm.errors import CacheMissError
from jitgemm.jit.cache import KernelCache, process_cache
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.legend import legend
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.exchange import CollectSpec, dispatch_spec
from jitgemm.moe.kernel import CombineSpec, GatherSpec, RouteSpec, route_quantize_spec, source_of
from jitgemm.select import cost, ranked
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import device_spec

ROOT = Path(__file__).resolve().parents[2]
LAYER = ("--shape", "256,256", "--max-m", "16", "--device", "h200")
FEW = ("--shape", "256,256", "--max-m", "8", "--device", "h200", "--weight", "g128-bf16-any")
"""A GEMM kernel and a quantiser."""


@pytest.fixture
def cache_dir(tmp_path, monkeypatch) -> Path:
    """An empty kernel cache of this test's own."""
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("JITGEMM_JIT", raising=False)
    monkeypatch.setattr(process_cache, "_unwritten", {})
    monkeypatch.setattr(process_cache, "_warned", set())
    return tmp_path / "kernels"


@pytest.fixture
def run(command, cache_dir):
    return command


@pytest.fixture(scope="module")
def warm_dir(tmp_path_factory) -> Path:
    """A cache that `jitgemm warmup` filled with LAYER's kernels; tests may only read it."""
    folder = tmp_path_factory.mktemp("warm")
    environment = os.environ | {"JITGEMM_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    environment.pop("JITGEMM_JIT", None)
    command = [sys.executable, "-m", "jitgemm", "warmup", *LAYER, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["compiled"] == len(report["kernels"]) > 0
    return folder


@pytest.fixture
def warm(warm_dir, cache_dir) -> Path:
    """This test's own copy of a warm cache."""
    cache_dir.mkdir()
    for path in warm_dir.glob("*.jgk"):
        (cache_dir / path.name).write_bytes(path.read_bytes())
    return cache_dir


def in_terminal(*argv: str, columns: int = 80, answer: str = "") -> str:
    """What the command writes to a terminal of so many columns, colours left out."""
    leader, follower = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jitgemm", *argv], env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    os.write(leader, answer.encode())
    text = b""
    with suppress(OSError):  # EIO: the process has ended
        while chunk := os.read(leader, 65536):
            text += chunk
    os.close(leader)
    assert process.wait(timeout=60) in (0, 1), text
    return text.decode().replace("\r\n", "\n")


# warmup


@pytest.mark.nvrtc
def test_warmup_compiles_every_kernel_once_and_the_second_finds_them(run):
    first, second = run("warmup", *LAYER, "--json"), run("warmup", *LAYER, "--json")
    assert first.code == second.code == 0
    kernels = first.json["kernels"]
    assert {kernel["status"] for kernel in kernels} == {"compiled"}
    assert len({kernel["key"] for kernel in kernels}) == len(kernels) > 0
    assert all(kernel["spill_bytes"] == 0 and kernel["registers"] > 0 for kernel in kernels)
    assert {kernel["status"] for kernel in second.json["kernels"]} == {"cached"}
    assert [kernel["key"] for kernel in second.json["kernels"]] == [kernel["key"] for kernel in kernels]
    shown = run("warmup", *LAYER)
    assert "compiling" in first.stderr and re.search(r": \d+ kernels, \d+ cached, ", shown.stderr)
    assert re.search(r"kernel +status +registers.*e4m3-g128-bf16", shown.stdout, re.DOTALL)


@pytest.mark.nvrtc
def test_check_says_by_its_exit_code_whether_all_is_warm(run, warm, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "empty"))
        dry, check = run("warmup", *LAYER, "--dry-run", "--json"), run("warmup", *LAYER, "--check")
        assert (dry.code, check.code) == (0, 1) and not (tmp_path / "empty").exists()
        assert dry.json["summary"]["missing"] == len(dry.json["kernels"]) > 0
    assert run("warmup", *LAYER, "--check").code == 0
    next(warm.glob("*.jgk")).unlink()
    done = run("warmup", *LAYER, "--check", "--json")
    assert done.code == 1
    assert done.json["summary"]["missing"] == 1
    assert run("warmup", *LAYER).code == 0
    assert run("warmup", *LAYER, "--check").code == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize(("slow", "shown", "said"), [
    (spilling_kernel(), r" \d\d+ ", r"\d+ bytes of register spills"),
    (serialised_kernel(), " 0 serialised ", r"\(C75..\) .*(GMMA|wgmma)"),
])  # fmt: skip
def test_a_slow_build_is_noted_and_fails_a_strict_warmup_alone(run, monkeypatch, slow, shown, said):
    monkeypatch.setattr("jitgemm.kernel.render.kernel_source", lambda spec: replace(slow, label=spec.label))
    options = FEW
    done = run("warmup", *options)
    assert done.code == 0 and re.search(shown, done.stdout)
    assert re.search(rf"e4m3-g128-bf16-\S+ is slower than it should be: {said}", done.stderr)
    for more in ((), ("--check",)):
        strict = run("warmup", *options, "--strict", *more)
        assert strict.code == 3 and re.search(rf"failed: e4m3-g128-bf16-\S+ is slower .*{said}", strict.stderr)
    first, *others = run("cache", "ls", "--sort", "spills", "--json").json
    assert others and first["spill_bytes"] or first["serialised"]
    assert not any(entry["spill_bytes"] or entry["serialised"] for entry in others)


@pytest.mark.nvrtc
def test_a_warmup_that_could_not_store_says_so_and_exits_3(run, cache_dir):
    cache_dir.write_text("a file, not a folder")
    done = run("warmup", *FEW)
    assert done.code == 3 and done.stdout.count(" unstored ") == 2
    assert f"2 kernels are not stored: kernel cache {cache_dir} cannot be written" in done.stderr
    again = run("warmup", *FEW, "--json")
    assert again.code == 3 and again.json["summary"] | {"unstored": 0} == dict.fromkeys(again.json["summary"], 0)
    assert [kernel["path"] for kernel in again.json["kernels"]] == [None, None]
    assert run("warmup", *FEW, "--check").code == 3
    cache_dir.unlink()  # with room again, what this process compiled is stored
    assert run("warmup", *FEW, "--json").json["summary"]["cached"] == 2
    assert run("warmup", *FEW, "--check").code == 0 and len(list(cache_dir.glob("*.jgk"))) == 2


@pytest.mark.nvrtc
@pytest.mark.filterwarnings("ignore:.*cannot be written")
def test_a_models_warmup_warns_of_what_it_could_not_store_and_calls_find_it_again(cache_dir):
    import torch

    import jitgemm.nn
    from jitgemm.runtime import loaded

    cache_dir.write_text("a file, not a folder")
    layer = jitgemm.nn.W4A8Linear.from_linear(torch.nn.Linear(256, 264, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match=rf"(\d+) kernels are not stored .*{cache_dir} cannot be written"):
        labels = jitgemm.nn.warmup(layer, 8, device="h200")
    assert len(labels) >= 2 and jitgemm.nn.warmup(layer, 8, device="h200") == []
    assert loaded.cache is process_cache


@pytest.mark.nvrtc
def test_ctrl_c_ends_a_warmup_within_a_second_and_keeps_what_is_compiled(cache_dir):
    command = [sys.executable, "-m", "jitgemm", "warmup", "--shape", "4096,4096", "--device", "h200", "--jobs", "2"]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(cache_dir.glob("*.jgk")) and time.monotonic() < deadline:
        time.sleep(0.02)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert time.monotonic() - pressed < 1.5
    assert re.search(r"interrupted: \d+ of \d\d+ compiled", stderr) and "Traceback" not in stderr and not stdout
    left = {path.suffix for path in cache_dir.iterdir()}
    assert left <= {".jgk", ".lock", ".tmp"} and ".jgk" in left


CHANNEL = "--weight channel-bf16-any"
EXPLAINED = [
    ("", "e4m3-g128-bf16-m", "m = 9..16 share a kernel"), ("--lhs e4m3", "e4m3-g128-bf16-m", ""), ("--lhs int8", "s8-g128-bf16-m", ""),
    ("--weight g128-bf16-e4m3", "e4m3fast-g128-bf16-m", ""), ("--weight g128-bf16-s8 --out fp32", "s8fast-g128-bf16-tofp32-m", ""),
    ("--weight g32-fp16-z", "e4m3-g32z-fp16-m", ""), ("--weight g64-bf16-o-any --out bf16", "e4m3-g64o-bf16-m", ""),
    (CHANNEL, "e4m3-channel-m", ""), ("--weight g128-bf16-z-xfp16", "-xfp16", ""), ("--batch-invariant", "-k1x2s-", ""),
    ("--weight w8-channel-fp32-s8", "s8w8-channel-m", ""), ("--weight w8-g128-fp32-b-e4m3 --block-scales", "e4m3w8-g128-fp32-b128-m", ""),
    ("--block-scales", "e4m3-g128-bf16-b128-m", ""), ("--e8m0", "e4m3-g128-bf16-b128e-m", ""),
    ("--weight mx-channel-bf16-e2m1", "e4m3mx-channel-m", "base for a row;"),
    ("--weight mx-g128-bf16-e2m1", "e4m3mx-g128-bf16-m", "base for a row and 128 k;"),
    ("--weight mx-g32-bf16-e2m1", "e4m3mx-g32-bf16-m", "scale for a row and 32 k;"),
    ("--weight nv-channel-fp32-near", "e4m3nvnear-channel-m", "NVFP4 with 2 e4m3 terms a code;"),
    ("--weight nv-channel-fp32-nvfp4", "e4m3nv", "NVFP4 with 2 e5m2 terms a code;"),
    ("--weight tl-channel-bf16-two_level", "s8tl-channel-m", ", two levels; m = "),
    *((f"--sums f16 --weight {name}", "-f16", "") for name in ("g128-bf16-e4m3", "g128-bf16-z", "mx-g128-bf16-e2m1")),
]  # fmt: skip
"""Options of both commands, a part of the label of the kernel that is chosen for 16 tokens, and of what is said."""


@pytest.mark.parametrize("options, part, said", EXPLAINED, ids=[options for options, *_ in EXPLAINED])
def test_what_explain_chooses_is_what_warmup_compiles_and_the_kernel_s_own_command_too(run, options, part, said):
    options = (*options.split(), "--device", "h200")
    most = "4096" if "--sums" in options else "16"
    explain = ("explain", most, "4096", "4096", *options)
    explained, report = run(*explain), run(*explain, "--json").json
    label = report["chosen"]
    [chosen] = [each for each in report["candidates"] if each["chosen"]]
    assert chosen["label"] == label and chosen["predicted_us"] > 0 and min(chosen["terms"].values()) >= 0
    assert part in label and said in explained.stderr
    spec = KernelSpec.from_label(label)
    named = kernel_source(spec).warmup.replace("N,K", "4096,4096").partition(" [")[0].split()
    named += ["--batch-invariant"] * ("--batch-invariant" in options)  # which the kernel's command has in brackets
    assert (spec.sums == "f16") == ("f16" in named)
    for command in (["warmup", "--shape", "4096,4096", *options], named[1:]):
        kernels = run(*command, "--max-m", most, "--dry-run", "--json").json["kernels"]
        assert label in {kernel["label"] for kernel in kernels}
        assert len({kernel["key"] for kernel in kernels}) == len(kernels)


def test_options_that_come_again_and_names_of_codes_add_up(run):
    def kernels(*options: str) -> set[str]:
        found = run("warmup", *LAYER, "--dry-run", "--json", *options).json["kernels"]
        return {kernel["label"] for kernel in found if kernel["kind"] == "gemm"}

    whole, group = kernels("--weight", "g256-bf16-any"), kernels("--weight", "g128-bf16-any")
    assert whole == kernels(*CHANNEL.split()) != group
    assert kernels() == group | kernels("--weight", "g128-bf16-e4m3")
    assert kernels("--lhs", "int8", "--lhs", "fp8") == kernels("--lhs", "int8") | kernels("--lhs", "e4m3")
    outs = kernels("--out", "fp16", "--out", "bf16", "--out", "fp32")
    assert {label.split("-")[3] for label in outs if "-to" in label} == {"tofp16", "tofp32"} and kernels() < outs
    assert run("warmup", "--shape", "72,48", "--max-m", "8", "--device", "h200", "--dry-run").code == 0


def test_a_rotation_and_exact_sums_are_explained(run):
    shape = "explain", "16", "4096", "4096", "--weight", "tl-channel-bf16-two_level", "--device", "h200"
    turned, plain = run(*shape, "--rotation", "128", "--json").json, run(*shape, "--json").json
    assert turned["problem"].pop("rotation") == 128 and turned == plain
    assert "quantisers rotate activations by blocks of 128" in run(*shape, "--rotation", "128").stderr
    exact = run("explain", "4096", "4096", "4096", "--weight", "g128-bf16-s8", "--sums", "exact", "--json").json
    assert "parts" not in exact["chosen"] and exact["problem"]["sums"] == "exact"


# warmup of quantisers


def quantizers(report) -> list[str]:
    return [kernel["label"] for kernel in report.json["kernels"] if kernel["kind"] == "quantizer"]


def test_by_default_a_linear_layers_quantisers_are_warmed_up_too(run):
    def labels(*options: str) -> list[str]:
        return quantizers(run("warmup", *LAYER, "--dry-run", "--json", *options))

    (label,) = labels()
    assert label.startswith("quantize-bf16-e4m3-v")
    found = labels("--out", "fp16", "--out", "fp32", "--lhs", "int8", "--lhs", "fp8")
    assert [label.rpartition("-")[0] for label in found] == [
        "quantize-fp16-s8", "quantize-fp32-s8", "quantize-fp16-e4m3", "quantize-fp32-e4m3",
    ]  # fmt: skip
    assert labels("--quantizer", "none") == []


# a missing kernel


def spec_of(lhs: str, format, **options):
    return kernels_for(256, 256, lhs, format, device_spec("h200"), 8, **options)[0]


@pytest.mark.parametrize("source", [
    kernel_source(spec_of("e4m3", WeightFormat(128, False, "bf16", "e4m3"))),
    kernel_source(spec_of("e4m3", WeightFormat(64, False, "fp32"), out="fp32")),
    kernel_source(spec_of("e4m3", WeightFormat(128, True, "fp16", offset=True))),
    kernel_source(spec_of("s8", WeightFormat(0, False, "fp16", "s8"), out="fp16")),
    kernel_source(spec_of("s8", WeightFormat(0, True, "bf16"))),
    quantize_source(quantize_spec(256, "bf16", "e4m3")),
    quantize_source(quantize_spec(256, "fp32", "s8", affine=True, static=True, permuted=True)),
    quantize_source(quantize_spec(256, "fp16", "e4m3", rms_norm=True)),
    quantize_source(quantize_spec(256, "bf16", "e4m3", rms_norm=True, residual=True)),
    *(quantize_source(quantize_spec(256, "bf16", "s8", gate=gate)) for gate in (SILU_MUL, *GELU_MULS.values())),
], ids=lambda source: source.label)  # fmt: skip
def test_the_command_that_a_miss_names_compiles_that_kernel_and_no_other_format(run, source):
    with pytest.raises(CacheMissError) as miss:
        KernelCache().get_or_compile(source, allow_compile=False)
    command = str(miss.value).rpartition("compile it ahead: ")[2].partition("[--batch-invariant]")[0].split()
    assert command[:4] == ["jitgemm", "warmup", "--shape", "N,K"]
    command[3] = "256,256"
    done = run(*command[1:], "--device", "h200", "--max-m", "8", "--dry-run", "--json")
    assert done.code == 0, done.stderr
    labels = [kernel["label"] for kernel in done.json["kernels"]]
    assert source.key(nvrtc_info()) in {kernel["key"] for kernel in done.json["kernels"]}
    assert len(labels) <= 3  # the kernel; the layer's quantiser; for a quantiser, two orders of codes


SHAPE = ["warmup", "--shape", "16,64"]
EXPLAIN = ["explain", "1", "64", "128"]
MODEL = ["warmup", "--model", "x"]
WRONG = [
    (["warmup"], "--shape N,K or --model"), (["warmup", "--shape", "4096"], "--shape: expected N,K"),
    (["warmup", "--shape", "12,4096"], "n: expected"), (["warmup", "--shape", "16,40"], "k: expected"),
    ([*SHAPE, "--weight", "g48-bf16-any"], "--weight g48-bf16-any: group_size: expected"),
    (["explain", "1", "64", "64", "--weight", "int4"], "--weight int4 with k = 64: format: expected"),
    ([*SHAPE, "--weight", "nv-channel-fp32-near", "--lhs", "int8"], "--lhs: expected e4m3 with --weight nv-"),
    ([*SHAPE, "--tp", "2"], "--for, --tp, --ep, --activation and --recipe are for a --model"),
    ([*SHAPE, "--for", "compiled"], "--for, --tp, --ep, --activation and --recipe are for a --model"),
    ([*SHAPE, "--for", "nonsense"], "'nonsense' is not one of 'linear', 'compiled', 'vllm'"),
    ([*MODEL, "--lhs", "int8"], "--lhs, --weight, --block-scales, --e8m0 and --quantizer are for a --shape"),
    ([*EXPLAIN, "--device", "clock_mhz=inf"], "'clock_mhz=inf' must be"),
    ([*EXPLAIN, "--device", "sms=nan", "--json"], "'sms=nan' must be"), ([*SHAPE, "--device", "gtx280"], "h100-sxm"),
    (["explain", "2147483648", "8", "32"], "m: expected"), (["explain", "1", "2147483648", "32"], "n: expected"),
    (["explain", "1", "8", "1048576", "--lhs", "int8", *CHANNEL.split()], "k: expected at most 1048560"),
    (["warmup", "--model", "/nonexistent"], "folder: expected a model's folder that is here"),
    ([*MODEL, "--recipe", "bits=8"], "--recipe: expected JSON"), ([*MODEL, "--recipe", "[8]"], "--recipe: expected"),
    ([*MODEL, "--recipe", '{"bits": 5}'], "--recipe: bits: expected"),
    ([*MODEL, "--activation", "int8", "--recipe", '{"activation": "e4m3"}'], "--activation: expected e4m3"),
    ([*SHAPE, "--out", "int8"], "--out"),
    ([*SHAPE, "--weight", "channel-bf16-o-any"], "--weight channel-bf16-o-any: offset: expected"),
    ([*SHAPE, "--quantizer", "int8"], "--quantizer: expected"),
    ([*SHAPE, "--quantizer", "bf16+affin"], "+silu_mul, +gelu_mul=none, +gelu_mul=tanh, +rms_norm, +res"),
    ([*SHAPE, "--quantizer", "none", "--quantizer", "bf16"], "--quantizer: expected none alone"),
    ([*SHAPE, "--quantizer", "bf16+silu_mul+gelu_mul=tanh"], "gelu_mul: expected"),
    ([*SHAPE, "--quantizer", "bf16+affine"], "affine: expected"),
    ([*EXPLAIN, "--weight", "g128-bf16-o-any"], "with k = 128: offset: expected"),
    ([*EXPLAIN, "--weight", "channel-bf16-z-xfp16"], "correction: expected"),
    ([*EXPLAIN, "--weight", "w8-g64-bf16-s8", "--lhs", "fp8"], "format: expected order 'any' or 'e4m3', as lhs is"),
    *(([*EXPLAIN, *wrong.split(), "--sums", "f16"], "sums: expected 'f32' except for e4m3") for wrong in ("--lhs int8", CHANNEL)),
    ([*EXPLAIN, "--sums", "exact"], "sums: expected 'exact' for int8"), ([*EXPLAIN, "--rotation", "64"], "--rotation: expected"),
    (["explain", "1", "64", "192", "--rotation", "128"], "--rotation: expected 128, and K a multiple"),
    ([*EXPLAIN, "--top-k", "2"], "--top-k: expected"), ([*EXPLAIN, "--experts", "4", "--top-k", "5"], "at most --experts"),
    ([*EXPLAIN, "--experts", "1025"], "experts: expected"), (["cache", "ls", "--sort", "colour"], "--sort: expected"),
    (["cache", "prune"], "--older-than AGE or --max-size SIZE"), (["cache", "prune", "--max-size", "much"], "expected a size"),
    (["cache", "prune", "--older-than", "long"], "expected an age"), (["cache", "show", "00", "--source", "--log"], "at most one"),
    (["warmup", "--no-such-option"], "No such option"),
]  # fmt: skip


@pytest.mark.parametrize("argv, message", WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_arguments_exit_2_and_say_what_was_expected(run, argv, message):
    done = run(*argv)
    assert done.code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_a_wrong_jit_mode_is_named_before_anything_is_printed_but_env_shows_it(run, monkeypatch):
    monkeypatch.setenv("JITGEMM_JIT", "bogus")
    done = run("cache", "info")
    assert (done.code, done.stdout) == (2, "") and "JITGEMM_JIT: expected one of" in done.stderr
    assert run("env", "--json").json["settings"]["JITGEMM_JIT"] == "bogus"


# cache


@pytest.mark.nvrtc
def test_ls_shows_what_people_ask(run, warm):
    entries = run("cache", "ls", "--json").json
    assert {entry["kind"] for entry in entries} == {"gemm", "quantizer"}
    assert all(("lhs" in entry["spec"]) == (entry["kind"] == "gemm") for entry in entries)
    done = run("cache", "ls")
    assert done.code == 0
    header, *lines = done.stdout.splitlines()
    assert header.split() == "key kernel tile m x n types scale per registers spills size age last use".split()
    assert len(lines) == len(list(warm.glob("*.jgk")))
    (quantizer,) = [line for line in lines if "quantize-" in line]
    assert "bf16 to e4m3" in quantizer and "token" in quantizer
    lines.remove(quantizer)
    assert all(re.search(r" \d+ x 64 +e4m3 +128 ", line) for line in lines)
    assert "?" not in done.stdout


E4M3_ROWS, S8_GROUPS = WeightFormat(0, False, "bf16", "e4m3"), WeightFormat(128, True, "bf16", offset=True)
DESCRIBED = [
    (kernel_source(spec_of("s8", S8_GROUPS)), "gemm", ("8 x 64", "s8", "128 + zero + offset")),
    (kernel_source(spec_of("e4m3", E4M3_ROWS, out="fp32")), "gemm", ("8 x 64", "e4m3 to fp32", "channel")),
    (quantize_source(quantize_spec(256, "fp16", "s8", affine=True)), "quantizer", ("-", "fp16 to s8", "token + zero")),
    (quantize_source(quantize_spec(256, "fp32", "e4m3", static=True)), "quantizer", ("-", "fp32 to e4m3", "tensor")),
    *((source_of(spec), "routing", ("-", *shown)) for spec, *shown in (
        (RouteSpec(1), "-", "-"), (GatherSpec(), "-", "-"), (CombineSpec("bf16", "fp16"), "bf16 to fp16", "-"),
        (CollectSpec("bf16"), "bf16 to bf16", "-"),
        (route_quantize_spec(8, 256, "bf16", "e4m3", False), "bf16 to e4m3", "token"),
        (route_quantize_spec(8, 256, "bf16", "s8", True), "bf16 to s8", "token + zero"),
        (dispatch_spec(8, 256, "bf16", "s8", affine=True, block=False), "bf16 to s8", "token + zero"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("source, kind, shown", DESCRIBED, ids=[source.label for source, *_ in DESCRIBED])
def test_a_kernel_is_described_by_tile_types_and_scales(source, kind, shown):
    assert (kind_of(source.label), describe_spec(dict(source.spec))) == (kind, shown)


@pytest.mark.nvrtc
@pytest.mark.parametrize("sort", ["used", "age", "size", "registers", "spills", "kernel"])
def test_ls_sorts(run, warm, sort):
    entries = run("cache", "ls", "--sort", sort, "--json").json
    field = {"used": "last_used", "age": "created", "spills": "spill_bytes", "kernel": "label"}.get(sort, sort)
    values = [entry[field] for entry in entries]
    assert values == sorted(values, reverse=sort != "kernel")


@pytest.mark.parametrize("sort", ["used", "age", "size", "registers", "spills", "kernel"])
def test_a_file_that_is_no_entry_is_listed_as_bad(run, tmp_path, monkeypatch, sort):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path))
    (tmp_path / f"{'ab' * 32}.jgk").write_bytes(b"not a kernel")
    done = run("cache", "ls", "--sort", sort)
    assert done.code == 0 and "abababababab (bad: not a kernel cache entry)" in " ".join(done.stdout.split())
    (entry,) = run("cache", "ls", "--sort", sort, "--json").json
    assert (entry["kind"], entry["problem"]) == (None, "not a kernel cache entry")


@pytest.mark.nvrtc
def test_info_counts_each_folder(run, warm, tmp_path, monkeypatch):
    other = tmp_path / "other"
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join([str(other), str(warm)]))
    roots = run("cache", "info", "--json").json["roots"]
    assert [root["path"] for root in roots] == [str(other), str(warm)]
    assert [root["kernels"] for root in roots] == [0, len(list(warm.glob("*.jgk")))]
    assert [root["quantizers"] for root in roots] == [0, 1]
    assert roots[1]["size"] == sum(path.stat().st_size for path in warm.glob("*.jgk"))


@pytest.mark.nvrtc
def test_show_prints_metadata_source_or_log(run, warm):
    key = next(warm.glob("*.jgk")).stem
    shown = run("cache", "show", key[:16], "--json").json
    assert shown["key"] == key
    source = run("cache", "show", key[:16], "--source")
    assert source.stdout.strip() == shown["source"].strip() and "__global__" in source.stdout
    assert "registers" in run("cache", "show", key, "--log").stdout
    assert shown["label"] in run("cache", "show", key).stdout
    done = run("cache", "show", "not-a-key")
    assert (done.code, done.stdout) == (3, "") and "not-a-key" in done.stderr


@pytest.mark.nvrtc
def test_show_takes_a_label_and_says_what_its_parts_mean(run, warm):
    label = next(entry["label"] for entry in run("cache", "ls", "--json").json if entry["kind"] == "gemm")
    assert run("cache", "show", label, "--json").json["label"] == label
    shown = run("cache", "show", label).stdout
    assert all(re.search(rf"^{part} +{re.escape(words)}$", shown, re.MULTILINE) for part, words in legend(label))


@pytest.mark.nvrtc
def test_verify_exits_1_on_a_flipped_bit_and_names_the_file(run, warm):
    assert run("cache", "verify").code == 0
    path = next(warm.glob("*.jgk"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run("cache", "verify")
    assert done.code == 1 and path.name in done.stdout
    problems = {entry["key"]: entry["problem"] for entry in run("cache", "verify", "--json").json}
    assert problems.pop(path.stem)
    assert not any(problems.values())


@pytest.mark.nvrtc
def test_prune_drops_the_unused_and_dry_run_only_says_so(run, warm):
    path = next(warm.glob("*.jgk"))
    os.utime(path, (1, 1))
    would = run("cache", "prune", "--older-than", "30d", "--dry-run", "--json").json
    assert [entry["key"] for entry in would] == [path.stem] and path.exists()
    assert run("cache", "prune", "--older-than", "30d", "--json").json[0]["key"] == path.stem
    assert not path.exists()


@pytest.mark.nvrtc
def test_clear_drops_everything(run, warm):
    count = len(list(warm.glob("*.jgk")))
    assert len(run("cache", "clear", "--dry-run", "--json").json) == count == len(list(warm.glob("*.jgk")))
    assert len(run("cache", "clear", "--yes", "--json").json) == count
    assert not list(warm.glob("*.jgk"))


# explain and env


def test_explain_names_the_winner_and_why(run):
    done = run("explain", "16", "4096", "4096", "--device", "h200")
    assert done.code == 0
    assert re.search("^> +e4m3-", done.stdout, re.MULTILINE) and "predicted us" in done.stdout
    assert "h200 (132 SMs), m = 9..16 share a kernel" in done.stderr
    assert re.search(r"won over|ties with|only one", done.stderr)
    bars = {name: len(re.search(rf"^  {name} +[\d.]+ us  (#*) +{words}$", done.stderr, re.MULTILINE)[1])
            for name, words in ranked.TERMS.items()}  # fmt: skip
    assert max(bars.values()) == bars["issue"] == 16 > bars["tensor"] > 0
    assert cost.Times._fields == tuple(ranked.TERMS)


@pytest.mark.parametrize(("options", "said"), [
    ("--lhs int8", True), ("--lhs int8 --experts 8", True), ("--weight tl-channel-fp16-two_level", False),
    ("--lhs int8 --weight channel-bf16-any", False), ("--weight w8-g128-fp32-s8", False), ("", False),
])  # fmt: skip
def test_explain_says_what_is_faster_than_int8_with_float_scales_in_groups(run, options, said):
    done = run("explain", "512", "4096", "4096", "--device", "h200", *options.split())
    assert done.code == 0 and ("two levels or e4m3 are faster in prefill" in done.stderr) == said


def test_a_warm_up_with_block_scales_is_one_of_block_quantisers(run):
    def kernels(*options: str) -> set[str]:
        return {each["label"] for each in run("warmup", *LAYER, "--dry-run", "--json", *options).json["kernels"]}

    assert kernels("--block-scales") == kernels("--quantizer", "bf16+block")
    assert kernels("--block-scales", "--quantizer", "fp16+silu_mul") == kernels("--quantizer", "fp16+silu_mul+block")
    gemms = kernels("--block-scales", "--quantizer", "none")
    assert gemms == {label for label in kernels("--block-scales") if not label.startswith("quantize")}


def test_explain_json_names_the_whole_problem(run):
    options = ("--weight", "g128-bf16-o-e4m3", "--out", "fp16", "--batch-invariant", "--json")
    problem = run("explain", "9", "256", "512", "--device", "h200", *options).json["problem"]
    assert problem == {
        "m": 9, "n": 256, "k": 512, "lhs": "e4m3", "group_size": 128, "zero_point": False, "scale_type": "bf16",
        "codes": "e4m3", "offset": True, "bits": 4, "uniform_strip_scale": False, "correction": "",
        "out": "fp16", "batch_invariant": True, "experts": 0,
        "lhs_group": 0, "lhs_e8m0": False, "sums": "f32", "rows_vary": False, "in_order": False,
    }  # fmt: skip


def test_explain_counts_the_rows_of_a_grouped_gemm_and_says_what_it_expects_of_a_routing(run):
    argv = ("explain", "32", "1536", "2048", "--experts", "128", "--top-k", "8", "--device", "h200")
    report = run(*argv, "--json").json
    assert (report["problem"]["m"], report["problem"]["experts"]) == (256, 128)
    assert report["band"] == [249, 256] and report["chosen"].endswith("-e256")
    done = run(*argv)
    assert re.search(
        r"256 rows of 128 experts; on average 1\d\d experts have rows, and none has more than \d", done.stderr
    )


def test_env_names_versions_settings_and_folders(run, cache_dir):
    facts = run("env", "--json").json
    assert facts["cache"] == [str(cache_dir)]
    assert set(facts["settings"]) == set(settings.VARIABLES)
    assert facts["packages"]["torch"]
    text = run("env")
    assert text.code == 0 and str(cache_dir) in text.stdout and sys.executable in text.stdout


def test_env_says_which_figures_kernels_are_chosen_for(run, monkeypatch):
    import torch

    from jitgemm.runtime import device

    figures = {"multi_processor_count": 132, "total_memory": 1 << 37, "major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=f"GPU {i}", **figures))
    specs = [device_spec("h200"), replace(device_spec("h200"), name="NVIDIA H300", hbm_bytes_per_us=7e6)]
    monkeypatch.setattr(device, "device_of", specs.__getitem__)
    first, second = run("env", "--json").json["devices"]
    assert "kernels are chosen for h200" in first
    assert "not in jitgemm's table" in second and "(7 TB/s, 1.8 POP/s)" in second


# help and helpers


COMMANDS = [
    "quantize",
    "warmup",
    "explain",
    "env",
    *(f"cache {name}" for name in "ls info show verify prune clear".split()),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_on_two_screens_and_json(run, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = run(*name.split(), "--help")
    assert done.code == 0 and "--json" in done.stdout
    assert name.split()[-1] not in ("warmup", "explain", "show", "verify") or "Exit codes:" in done.stdout
    assert done.stdout.count("\n") <= 75 and max(map(len, done.stdout.splitlines())) <= 80


def shell(line: str, **variables: str) -> subprocess.CompletedProcess:
    """A line for the shell in which $JG is the command."""
    variables = {"PYTHONPATH": str(ROOT), "JG": f"{sys.executable} -m jitgemm", **variables}
    return subprocess.run(["bash", "-c", line], env=os.environ | variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("start, argv", [
    ("-m", "cache ls"), ("-c", "explain 64 256 256 --device h200"), ("-c", "warmup --shape 256,256 --device h200 --check"),
])  # fmt: skip
def test_commands_that_need_no_torch_start_without_it(start, argv, cache_dir):
    """By the installed command, which calls jitgemm_cli.main, and by `python -m jitgemm`."""
    what = "from jitgemm_cli import main; main()" if start == "-c" else "jitgemm"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", start, what, *argv.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "jitgemm.cli.app" in imported and {"torch", "numpy"}.isdisjoint(imported)


@pytest.mark.parametrize("line", ["$JG cache ls >&-", "$JG cache clear --yes <&-", "$JG cache info >&- <&- 2>&-"])
def test_closed_streams_are_no_error(cache_dir, line):
    done = shell(line)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_terminal_of_another_encoding_gets_what_it_can_show(cache_dir):
    done = shell("$JG explain 16 4096 4096 --device h200 --top 2; $JG cache info", PYTHONIOENCODING="ascii",
                 JITGEMM_CACHE_DIR=f"{cache_dir}-é")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search("^> +e4m3-", done.stdout, re.MULTILINE) and f"{cache_dir}-\\xe9" in done.stdout


def test_a_file_and_a_name_too_long_are_no_writable_folders_and_any_name_is_printed(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folders = [tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("x" * 300), tmp_path / "new" / "[red] a[/nope]b"]
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join(map(str, folders)))
    roots = run("cache", "info", "--json").json["roots"]
    assert [root["writable"] for root in roots] == [False, False, False, True]
    assert str(folders[-1]) in run("cache", "info").stdout


# terminals


@pytest.mark.nvrtc
def test_in_40_and_80_columns_keys_status_and_numbers_are_whole(warm):
    keys = {path.stem[:12] for path in warm.glob("*.jgk")}
    for argv in (("cache", "ls"), ("warmup", *LAYER, "--check"), ("explain", "16", "4096", "4096", "--device", "h200"),
                 ("cache", "info"), ("cache", "clear", "--dry-run")):  # fmt: skip
        text = in_terminal(*argv)
        assert "…" not in text
        header, *lines = text.splitlines()
        table = [line for line in lines if re.match(r"[0-9a-f]{12} |(e4m3|quantize)\S+ +cached|> |/", line)]
        assert table and all(len(line.rstrip()) <= 80 for line in (header, *table)), text
        if argv[0] == "warmup":
            assert {line.split()[-1] for line in table} == keys
            assert all(re.search(r" cached +\d+ +\d+ +[0-9a-f]{12}$", line) for line in table)
        if argv == ("cache", "ls"):
            assert {line.split()[0] for line in table} == keys and "spills" in header
            assert re.search(r"left out in 80 columns: .*tile m x n", text)
        if argv[0] == "explain":
            assert re.match(r"> +e4m3\S+ +\d+\.\d\d +[a-z]", table[0])
    narrow = in_terminal("warmup", *LAYER, "--check", columns=40)
    assert all(re.search(rf"^\S+ +cached .*{key}$", narrow, re.MULTILINE) for key in keys), narrow


@pytest.mark.nvrtc
def test_clear_needs_yes_where_nobody_can_be_asked(run, warm):
    done = run("cache", "clear")
    assert (done.code, done.stdout) == (2, "") and "clear: expected --yes" in done.stderr and any(warm.glob("*.jgk"))


@pytest.mark.nvrtc
def test_clear_asks_for_what_it_clears(warm, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(warm, other)
    (other / "thesis.jgk").write_text("mine")
    next(other.glob("[0-9a-f]*.jgk")).unlink()
    monkeypatch.setenv("JITGEMM_CACHE_DIR", os.pathsep.join([str(warm), str(other)]))
    count = len(list(warm.glob("*.jgk")))
    text = " ".join(in_terminal("cache", "clear", answer="n\n", columns=500).split())
    assert f"Drop {count} kernels from {warm}?" in text and len(list(warm.glob("*.jgk"))) == count


# help


def test_a_page_lists_every_environment_variable():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"`{name}`" in page for name in settings.VARIABLES)


def test_ages_and_sizes_are_parsed_and_shown():
    sizes = {"0": 0, "500": 500, "1K": 1024, "1.5M": 3 << 19, "2GiB": 2 << 30, "3mb": 3 << 20}
    assert {text: common.parse_size(text) for text in sizes} == sizes
    ages = {"45s": 45, "90m": 5400, "12h": 43200, "30d": 2592000, "2w": 1209600}
    assert {text: common.parse_age(text) for text in ages} == ages
    shown = [common.show_size(size) for size in (0, 1023, 1536, 200 << 10, 5 << 30)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "200 KiB", "5.0 GiB"]
    assert [common.show_age(1000.0 - age, 1000.0) for age in (5, 119, 120, 600)] == ["5s", "119s", "2m", "10m"]
    assert common.show_age(None) == "-"


@pytest.mark.parametrize("old, new", [
    ("--group-size 64", "--weight g64-bf16-any"),
    ("--group-size=channel --codes tuned --lhs int8", "--weight channel-bf16-s8"),
    ("--zero-point --group-size 32 --scale-dtype fp16", "--weight g32-fp16-z"),
    ("--offset", "--weight g128-bf16-o-any"),
    ("--codes tuned", "--weight g128-bf16-e4m3"),
    ("--bits 8 --scale-dtype fp32 --lhs int8", "--weight w8-g128-fp32-b-s8"),
    ("--bits 8 --group-size -1", "--weight w8-channel-bf16-e4m3"),
    ("--lhs int8 --zero-point --correction fp16", "--weight g128-bf16-z-xfp16"),
    ("--lhs int8 --offset --correction bf16", "--weight g128-bf16-o-xbf16-s8"),
    ("--mxfp4", "--weight mx-channel-bf16-e2m1"),
    ("--mxfp4 --group-size 32", "--weight mx-g32-bf16-e2m1"),
    ("--nvfp4", "--weight nv-channel-fp32-near"),
    ("--nvfp4 --codes any", "--weight nv-channel-fp32-nvfp4"),
    ("--two-level --lhs int8", "--weight tl-channel-bf16-two_level"),
    ("--model x --group-size 64 --zero-point", """--recipe '{"group_size": 64, "symmetric": false}'"""),
    ("--model x --group-size channel --bits 8", """--recipe '{"bits": 8, "group_size": -1}'"""),
    ("--model x --scale-dtype fp16 --codes any", """--recipe '{"scale_dtype": "float16"}'"""),
])  # fmt: skip
def test_what_was_an_option_of_the_weight_names_the_new_spelling(run, old, new):
    commands = [["warmup"]] if "--model" in old else [["warmup", *LAYER], ["explain", "16", "256", "256"]]
    for command in commands:
        done = run(*command, *old.split())
        assert done.code == 2 and done.stderr.strip().endswith(f": expected {new} instead")
        if "--model" not in old:
            assert run(*command, *new.split(), "--json", *["--dry-run"] * (command[0] == "warmup")).code == 0
