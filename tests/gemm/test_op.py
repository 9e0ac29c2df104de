"""The call as PyTorch sees it: a `torch.library` op that checks, fakes and traces, and a light import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import builders
import pytest
import torch
import torch._dynamo.testing
from fresh_python import fresh_python
from torch._subclasses.fake_tensor import FakeTensorMode

import jitgemm
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.runtime import dispatch
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES

REPOSITORY = Path(__file__).resolve().parents[2]
OP = torch.ops.jitgemm.gemm_w4a8_nt.default
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
N, K = 72, 96


def weight(format=(32, False, "bf16"), **more) -> jitgemm.W4Weight:
    group_size, zero_point, scale_type = format
    return builders.weight_parts(2, N, K, group_size, zero_point=zero_point, scale_type=scale_type, **more).packed


FORMATS = [(32, False, "bf16"), (builders.PER_CHANNEL, False, "fp32")]


def op_arguments(lhs, rhs, out, bias=None, batch_invariant=False) -> tuple:
    x, x_scale, x_zero = (*lhs, None)[:3]
    return (
        x, x_scale, x_zero, rhs.blocks, rhs.channel_scale, rhs.row_sum, out, bias, rhs.n, rhs.k, rhs.format.name,
        batch_invariant,
    )  # fmt: skip


def empty(m: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(m, N, dtype=dtype)


def reference(lhs, rhs, bias=None, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return jitgemm.gemm_w4a8_reference(lhs, rhs, bias=bias, out_dtype=out_dtype)


# ---- the op -------------------------------------------------------------------------------------------------------


FORMS = {
    "affine": ("affine", {}, torch.bfloat16),
    "zero points": ("e4m3", {"format": (64, True, "fp16")}, torch.bfloat16),
    "per channel": ("s8", {"format": FORMATS[1]}, torch.bfloat16),
    "affine, offset, fp32": ("affine", {"offset": True}, torch.float32),
    "e4m3 codes, fp16": ("e4m3", {"codes": "e4m3"}, torch.float16),
    "s8 codes": ("s8", {"codes": "s8", "offset": True}, torch.bfloat16),
}
"""Activations, weight and output."""


@pytest.mark.parametrize("form, m", [*((form, 5) for form in FORMS), ("per channel", 0), ("affine", 1)])
def test_opcheck_passes_for_every_form(form, m):
    kind, options, out = FORMS[form]
    bias = builders.bias(3, N, torch.float32) if m > 1 else None
    tests = [name for name in OPCHECKS if kind != "e4m3" or name != "test_schema"]
    lhs = (
        builders.affine_lhs(1, m, K) if kind == "affine" and m else builders.lhs(1, m, K, kind.replace("affine", "s8"))
    )
    arguments = op_arguments(lhs, weight(**options), empty(m, out), bias, form == "per channel")
    assert set(torch.library.opcheck(OP, arguments, test_utils=tests).values()) == {"SUCCESS"}


def test_the_op_says_that_it_writes_out_and_nothing_else():
    written = [a.name for a in OP._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out"]


def test_the_op_refuses_what_the_call_refuses():
    lhs, rhs = builders.lhs(1, 5, K, "s8"), weight()
    with pytest.raises(ValueError, match=r"out: expected shape \[5, 72\], got \[6, 72\]"):
        OP(*op_arguments(lhs, rhs, empty(6)))
    with pytest.raises(TypeError, match="out: expected bfloat16, float16 or float32, got float64"):
        OP(*op_arguments(lhs, rhs, empty(5).double()))
    without_sums = rhs.with_tensors(rhs.blocks, None, None, None)
    with pytest.raises(ValueError, match="rhs: expected a weight with row_sum"):
        OP(*op_arguments(builders.affine_lhs(1, 5, K), without_sums, empty(5)))
    with pytest.raises(TypeError, match="expected int8, for which rhs was packed .*, got float8_e4m3fn"):
        OP(*op_arguments(builders.lhs(1, 5, K, "e4m3"), weight(codes="s8"), empty(5)))


# ---- torch.compile ------------------------------------------------------------------------------------------------


def layer(x, x_scale, rhs, bias):
    """A call amid other operations: activations are made before it, the output is used after it."""
    out = x.new_empty((x.shape[0], rhs.n), dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale * 2), rhs, out, bias=bias)
    return out + 1


def test_compiles_with_the_weight_as_an_argument(fresh_dynamo):
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    lhs = builders.lhs(1, 5, K, "s8")
    for rhs in (weight(), builders.weight_parts(9, N, K, 32).packed):
        assert builders.same_bits(compiled(*lhs, rhs, None), layer(*lhs, rhs, None))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_out_given_from_outside_is_written(fresh_dynamo, backend):
    rhs, lhs = weight(), builders.lhs(1, 5, K, "s8")
    whole = torch.full((5, N + 16), -7.0, dtype=torch.bfloat16)

    def write(x, x_scale, whole):
        jitgemm.gemm_w4a8_bf16_nt((x, x_scale), rhs, whole[:, 8 : 8 + N])
        return whole.sum()

    torch.compile(write, backend=backend, fullgraph=True)(*lhs, whole)
    assert builders.same_bits(whole[:, 8 : 8 + N].contiguous(), reference(lhs, rhs))
    assert bool((whole[:, :8] == -7).all()) and bool((whole[:, 8 + N :] == -7).all())


def test_a_wrong_call_is_named_while_tracing(fresh_dynamo):
    rhs, lhs = weight(), builders.lhs(1, 5, K, "s8")

    def wrong(x, x_scale):
        out = x.new_empty((4, N), dtype=torch.bfloat16)
        jitgemm.gemm_w4a8_bf16_nt((x, x_scale), rhs, out)
        return out

    with pytest.raises(Exception, match=r"out: expected shape \[5, 72\], got \[4, 72\]"):
        torch.compile(wrong, backend="eager", fullgraph=True)(*lhs)


# ---- JITGEMM_JIT=off ----------------------------------------------------------------------------------------------


def test_a_missing_kernel_with_the_jit_off_names_itself_and_the_command(monkeypatch, tmp_path):
    from jitgemm.jit.cache import KernelCache

    monkeypatch.setenv("JITGEMM_JIT", "off")
    spec = choose(Problem(16, 4096, 4096, "s8", WeightFormat(128, True, "bf16")), DEVICES["h200"])
    with pytest.raises(jitgemm.CacheMissError) as caught:
        KernelCache([tmp_path]).get_or_compile(kernel_source(spec))
    message = str(caught.value)
    assert spec.label in message and "JITGEMM_JIT=off" in message
    assert "jitgemm warmup" in message and "--weight g128-bf16-z --lhs int8" in message
    assert list(tmp_path.iterdir()) == []


# ---- import -------------------------------------------------------------------------------------------------------

IMPORT = """
import json, sys, torch; sys.dont_write_bytecode = True
before = set(sys.modules)
touched = []
def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, str) and not path.endswith((".py", ".pyc")):
            touched.append([event, path])
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.utime", "subprocess.Popen", "ctypes.dlopen"):
        touched.append([event, str(arguments)])
sys.addaudithook(hook)
import jitgemm
touched = list(touched)
modules = sorted(set(sys.modules) - before)
print(json.dumps({"modules": modules, "touched": touched, "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict:
    """What `import jitgemm` did in a new process that had torch already."""
    cache = tmp_path_factory.mktemp("import") / "cache"
    mode = "no such mode"  # read when used, not at import
    done = fresh_python(IMPORT, {"JITGEMM_CACHE_DIR": str(cache), "JITGEMM_JIT": mode})
    assert done.returncode == 0, done.stderr
    assert not cache.exists()
    return json.loads(done.stdout)


def test_import_loads_no_more_than_what_a_call_checks_and_describes(imported):
    """No other package, none that launches, compiles, chooses or reads files: 50 ms are all it may take after torch."""
    whole = {"jitgemm", *(f"jitgemm.{name}" for name in ("dtypes", "errors", "graph", "tensors"))}
    parts = {
        "activations": "arguments call kernel run scheme",
        "gemm": "call exact explain int8_out problem reference run",
        "kernel": "codes formats",
        "moe": "arguments call kernel masked route",
        "runtime": "dispatch launch torch_private",
        "weight": "codes correction f16_sums given gptq layout mxfp4 nvfp4 pack packed parts quantize quantize_mxfp4 "
        "no_tensor quantize_two_level ready rotation search stack state two_level",
    }
    allowed = {
        f"jitgemm.{package}{name and '.' + name}" for package, names in parts.items() for name in ("", *names.split())
    }
    assert set(imported["modules"]) <= whole | allowed


def test_import_takes_50_ms_after_torch():
    """Of one CPU, with its bytecode there."""
    code = """
import sys, time
sys.dont_write_bytecode = False
begun = time.process_time()
import jitgemm
print(time.process_time() - begun)
"""
    assert min(float(in_new_python(code)) for _ in range(4)) <= 0.05


def test_subscribers_hear_of_ops_that_are_traced_and_of_no_eager_call(monkeypatch):
    heard = []
    monkeypatch.setattr(dispatch, "_subscribers", [lambda: heard.append("traced")])
    jitgemm.quantize_activations(torch.ones(2, 64), torch.int8)
    assert heard == []
    with FakeTensorMode():
        jitgemm.quantize_activations(torch.ones(2, 64), torch.int8)
    assert heard == ["traced"]


def test_import_touches_neither_the_disk_nor_the_driver(imported):
    assert imported["touched"] == []
    assert not imported["cuda"]


# ---- the op's weight, checked like a W4Weight -----------------------------------------------------------------------


def changed(rhs, **parts):
    return rhs.packed._replace(**parts)


PER_CHANNEL = FORMATS[1]
WRONG_WEIGHTS = {
    "16 bytes": (FORMATS[0], dict(blocks=torch.zeros(16, dtype=torch.uint8)), r"uint8 \[2, 1, 4608\], got .* \[16\]"),
    "a strip too few": (FORMATS[0], dict(n=200), r"rhs.blocks: expected uint8 \[4, 1, 4608\], got .* \[2, 1, 4608\]"),
    "a block of k too few": (FORMATS[0], dict(k=160), r"rhs.blocks: expected uint8 \[2, 2, 4608\]"),
    "rows that n cannot have": (FORMATS[0], dict(n=4), "rhs.blocks: expected n, its rows, to be a positive"),
    "no k": (FORMATS[0], dict(k=0), "rhs.blocks: expected k to be a positive multiple of 16, got 0"),
    "another dtype": (FORMATS[0], dict(blocks=torch.zeros(2, 1, 4608, dtype=torch.int8)), "got int8"),
    "strides": (FORMATS[0], dict(blocks=torch.zeros(4608, 2, 1, dtype=torch.uint8).permute(1, 2, 0)), "contiguous"),
    "powers for int8": (FORMATS[0], dict(channel_scale=torch.ones(128)), "sums: expected 'f32' except for e4m3"),
    "powers of another type": (FORMATS[0], dict(channel_scale=torch.ones(128).half()), "scale: expected float32"),
    "no scale": (PER_CHANNEL, dict(channel_scale=None), "rhs.channel_scale: expected a tensor for a per-channel"),
    "a short scale": (PER_CHANNEL, dict(channel_scale=torch.ones(72)), r"rhs.channel_scale: expected float32 \[128\]"),
    "a scale of another type": (PER_CHANNEL, dict(channel_scale=torch.ones(128).half()), "got float16"),
    "a scale elsewhere": (PER_CHANNEL, dict(channel_scale=torch.ones(128, device="meta")), "expected cpu, got meta"),
    "short sums": (FORMATS[0], dict(row_sum=torch.ones(1)), r"rhs.row_sum: expected float32 \[128\], got .* \[1\]"),
    "sums of another type": (FORMATS[0], dict(row_sum=torch.ones(128).double()), "rhs.row_sum: expected float32"),
    "sums elsewhere": (FORMATS[0], dict(row_sum=torch.ones(128, device="meta")), "rhs.row_sum: expected cpu, got meta"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize(("format", "parts", "message"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_the_op_checks_every_tensor_of_its_weight(format, parts, message, fake):
    out = empty(5)
    arguments = op_arguments(builders.affine_lhs(1, 5, K), changed(weight(format), **parts), out)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if fake:
        arguments = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    with pytest.raises(ValueError, match=message), mode if fake else torch.no_grad():
        OP(*arguments)


def test_names_that_exported_programs_hold_stay():
    names = {
        "g128-bf16-any": WeightFormat(128, False, "bf16"),
        "channel-fp32-z": WeightFormat(0, True, "fp32"),
        "g32-fp16-o-e4m3": WeightFormat(32, False, "fp16", "e4m3", True),
        "g256-bf16-z-o": WeightFormat(256, True, "bf16", offset=True),
        "channel-bf16-s8": WeightFormat(0, False, "bf16", "s8"),
    }
    assert {format.name: format for format in names.values()} == names


WRONG_NAMES = ["", "g128", "g100-bf16-any", "g128-int8-any", "g128-bf16-o-z", "g128-bf16-x", "128-bf16-any"]


# The last but one is that of a layout whose signs lay elsewhere.
@pytest.mark.parametrize("name", [*WRONG_NAMES, "g128-bf16", "g128-bf16-z-any"])
def test_a_name_of_no_format_is_refused(name):
    lhs, rhs = builders.lhs(1, 5, K, "s8"), weight()
    arguments = list(op_arguments(lhs, rhs, empty(5)))
    arguments[-2] = name
    with pytest.raises(ValueError, match="format: |group_size: |scale_type: "):
        OP(*arguments)


# ---- whichever of torch and jitgemm is imported first -------------------------------------------------------------

NAMES = (
    "gemm_w4a8_nt", "quantize_activations", "add_quantize_activations", "m_grouped_gemm_w4a8_nt", "fused_experts",
    "fused_experts_masked",
)  # fmt: skip
OPS = ", ".join(f"torch.ops.jitgemm.{name}.default" for name in NAMES)


def test_every_op_that_is_defined_is_looked_for_below():
    texts = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "jitgemm").rglob("*.py"))
    named = [
        *NAMES,
        "exchange_experts",
        "invariant_linear",
        "invariant_experts",
    ]  # of layers: they come with jitgemm.nn
    assert sorted(named) == sorted(name for text in texts for name in re.findall(r'define_op\(\s*f?"(\w+)[({]', text))


@pytest.mark.parametrize(
    "code",
    [
        f"import jitgemm, torch; {OPS}",
        f"import jitgemm.tensors, torch; {OPS}",
        f"from jitgemm import load; import torch; {OPS}",
    ],
)
def test_the_ops_are_there_whichever_is_imported_first(code):
    in_new_python(code)


def test_a_failed_import_of_torch_may_be_repeated(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('a broken one')")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import jitgemm
except ImportError as error:
    assert str(error) == "a broken one"
else:
    raise AssertionError
sys.path.pop(0)
import jitgemm, torch
{OPS}
"""
    in_new_python(code, torch_first=False)


def in_new_python(code: str, torch_first: bool = True) -> str:
    if torch_first:
        done = fresh_python(code)
    else:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_packages_of_jitgemm_are_attributes_after_its_import_and_load_no_sooner():
    names = ("checkpoint", "deep_gemm", "hf", "nn", "sglang", "vllm")
    code = f"""
import sys, jitgemm
loaded = [name for name in {names} if "jitgemm." + name in sys.modules]
assert loaded == [] and "transformers" not in sys.modules, loaded
assert "load" in jitgemm.__all__ and jitgemm.load.__module__ == "jitgemm.checkpoint.load"
for name in {names}:
    if name != "hf":
        assert getattr(jitgemm, name) is sys.modules["jitgemm." + name]
"""
    in_new_python(code)


def test_dir_lists_every_public_name_and_package():
    wanted = {*jitgemm.__all__, "checkpoint", "deep_gemm", "hf", "nn", "sglang", "vllm", "__version__"}
    assert wanted <= set(dir(jitgemm))
    assert [name for name in jitgemm.__all__ if not hasattr(jitgemm, name)] == []


def test_a_package_whose_library_is_missing_is_an_attribute_error_with_the_remedy():
    code = """
import sys
sys.modules["transformers"] = None
import jitgemm
try:
    jitgemm.hf
except AttributeError as error:
    print(error)
"""
    assert in_new_python(code).startswith("jitgemm.hf needs transformers 4.57 or newer: pip install transformers (")


def test_public_names_are_those_of_the_plain_import_where_the_command_runs_code_that_calls_them():
    code = """
import jitgemm_cli, sys, jitgemm, jitgemm.errors
assert "torch" not in sys.modules
from jitgemm import CacheMissError, gemm_w4a8_nt
import jitgemm.gemm
assert gemm_w4a8_nt.__name__ == "gemm_w4a8_nt" and "gemm_w8a8_nt" in vars(jitgemm)
assert CacheMissError is jitgemm.CacheMissError is jitgemm.errors.CacheMissError
assert {*jitgemm.__all__} - {*vars(jitgemm)} <= {"load"}
import torch
"""
    in_new_python(code + OPS, torch_first=False)


def test_without_pytorch_s_private_functions_every_call_goes_through_its_op():
    """A PyTorch that has neither counts of modes nor a comparison of tensors: slower, and right."""
    code = """
import torch
del torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
import torch._C._dynamo.guards
del torch._C._dynamo.guards.TensorGuards
import jitgemm
from jitgemm.runtime import dispatch, launch
assert launch.TensorGuards is None and dispatch.needs_dispatcher(torch.ones(1), torch.ones(1))
q, scale = torch.ones(64, 128, dtype=torch.int8), torch.ones(64, 1)
rhs, out = jitgemm.pack_w4(q, scale, group_size=128), torch.empty(4, 64, dtype=torch.bfloat16)
for m in (4, 4):
    lhs = jitgemm.quantize_activations(torch.randn(m, 128), torch.int8)
    jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
    assert torch.equal(out, jitgemm.gemm_w4a8_reference(lhs, rhs))
"""
    in_new_python(code)
