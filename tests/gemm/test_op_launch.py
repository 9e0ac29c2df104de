"""Which calls through the `torch.library` ops start before the kernel before them ends: those behind a ready weight.

The rule itself, on tensors: tests/runtime/test_driver.py. Here it meets compilers, which decide what tensors an op is
given.
"""

from __future__ import annotations

import shutil

import builders
import pytest
import torch

import jitgemm
from jitgemm.gemm import run as gemm_run
from jitgemm.nn import W4A8Linear, mark_ready
from jitgemm.weight.packed import W4Weight

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N, K = 128, 256
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture
def ready(monkeypatch) -> list[bool]:
    """Of each call on the CPU, whether its plan would have been launched dependently, see `Plan.launch`."""
    found: list[bool] = []
    run = gemm_run._run

    def look(x, x_scale, x_zero, weight, out, bias, *rest):
        at = weight.ready_at
        found.append(at is not None and at == (weight.blocks.data_ptr(), weight.blocks._version))
        run(x, x_scale, x_zero, weight, out, bias, *rest)

    monkeypatch.setattr(gemm_run, "_run", look)
    return found


def weight(seed: int, n: int = N, k: int = K, group_size: int = 32) -> W4Weight:
    return builders.weight_parts(seed, n, k, group_size).packed


def multiply(lhs, rhs) -> torch.Tensor:
    out = lhs[0].new_empty((lhs[0].shape[0], rhs.n), dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
    return out


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_s_weight_is_ready(ready, backend, inference):
    layer = W4A8Linear(weight(1), activation="int8")
    compiled, x = torch.compile(layer, backend=backend, fullgraph=True), torch.randn(5, K, dtype=torch.bfloat16)
    expected = layer(x)
    ready.clear()
    with torch.inference_mode() if inference else torch.no_grad():
        assert all(builders.same_bits(compiled(x), expected) for _ in range(2))
    assert ready == [True, True]
    layer.load_state_dict(W4A8Linear(weight(2), activation="int8").state_dict())
    expected = layer(x)
    ready.clear()
    assert builders.same_bits(compiled(x), expected)
    assert ready == [True]
    layer.blocks.add_(0)
    compiled(x)
    assert ready == [True, False]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    "backend, first",
    [("aot_eager", "write"), ("aot_eager", "multiply"), pytest.param("inductor", "write", marks=needs_compiler)],
)
def test_a_graph_that_writes_its_weight_waits_for_it(ready, backend, first, inference):
    rhs, others, lhs = weight(1), [weight(2), weight(3)], builders.lhs(4, 5, K, "s8")
    expected = [multiply(lhs, each) for each in (rhs, *others)]
    ready.clear()

    def function(x, x_scale, new):
        if first == "write":
            rhs.blocks.copy_(new)
        out = multiply((x, x_scale), rhs)
        if first == "multiply":
            rhs.blocks.copy_(new)
        return out

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.inference_mode() if inference else torch.no_grad():
        outs = [compiled(*lhs, each.blocks.clone()) for each in others]  # which no weight marked ready
    for out, wanted in zip(outs, expected[1:] if first == "write" else expected):
        assert builders.same_bits(out, wanted)
    # Only what was read before anything wrote it may have been.
    assert len(ready) == 2 and not ready[1] and not (first == "write" and ready[0])


def test_a_weight_that_is_given_to_the_graph_is_ready_too(ready):
    compiled = torch.compile(lambda x, x_scale, rhs: multiply((x, x_scale), rhs), backend="aot_eager", fullgraph=True)
    lhs = builders.lhs(1, 5, K, "s8")
    for rhs in (weight(2), weight(3)):
        assert builders.same_bits(compiled(*lhs, rhs), jitgemm.gemm_w4a8_reference(lhs, rhs))
    assert ready == [True, True]


def test_a_loaded_program_s_weight_is_ready_by_request(ready, tmp_path):
    layer, x = W4A8Linear(weight(1), activation="int8"), torch.randn(5, K, dtype=torch.bfloat16)
    expected = layer(x)
    for model, name in ((layer, "blocks"), (torch.nn.Sequential(layer), "0.blocks")):
        torch.export.save(torch.export.export(model, (x,), strict=False), tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        ready.clear()
        assert builders.same_bits(loaded(x), expected)
        assert mark_ready(loaded) == [name]
        assert builders.same_bits(loaded(x), expected)
        loaded.get_buffer(name).add_(0)
        loaded(x)
        assert ready == [False, True, False]


def test_an_inference_tensor_is_not_ready():
    model = torch.nn.Module()
    with torch.inference_mode():
        model.register_buffer("records", torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="records: expected a tensor that tells when it is written, got an inference"):
        mark_ready(model)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch) -> list[bool]:
    """Of each launch of ours, whether it is a programmatic dependent one."""
    from jitgemm.runtime import driver

    found: list[bool] = []
    real = driver.cu.cuLaunchKernelEx

    def launch(config, *arguments):
        found.append(config.numAttrs == 1)
        return real(config, *arguments)

    monkeypatch.setattr(driver.cu, "cuLaunchKernelEx", launch)
    return found


@pytest.mark.gpu
def test_quantiser_and_gemm_of_a_compiled_layer_launch_dependently(launches):
    layer = W4A8Linear(weight(1, 4096, 4096, 128), activation="e4m3").cuda()
    x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(layer, fullgraph=True)
        compiled(x)
        launches.clear()
        outs = [compiled(x).clone() for _ in range(4)]
    assert launches and all(launches) and all(builders.same_bits(out, expected) for out in outs)
    layer.blocks.add_(0)
    launches.clear()
    with torch.no_grad():
        assert builders.same_bits(compiled(x), expected)
    assert launches == [True, False]


@pytest.mark.gpu
def test_marking_a_model_ready_waits_for_every_stream():
    model, side = torch.nn.Module(), torch.cuda.Stream()
    model.register_buffer("records", weight(1).blocks.cuda())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        model.records.add_(0)
    assert not side.query() and mark_ready(model) == ["records"] and side.query()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match="mark_ready: expected no CUDA graph to be captured"):
            mark_ready(model)
        model.records.add_(0)


@pytest.mark.gpu
def test_an_op_never_reads_a_weight_that_is_still_written():
    """The weight's writer is a quantiser: it lets the kernel behind it start at once, and writes afterwards."""
    n = k = 4096
    rhs = weight(1, n, k, builders.PER_CHANNEL).to("cuda")  # whose records are codes, all bytes of which are right
    lhs = jitgemm.quantize_activations(torch.randn(1, k, dtype=torch.bfloat16, device="cuda"), torch.int8)
    codes = rhs.blocks.view(torch.int8).view(-1, 2048)
    scale = torch.empty(len(codes), device="cuda")
    sources = [torch.randn(codes.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    compiled = torch.compile(lambda x, x_scale: multiply((x, x_scale), rhs), fullgraph=True)

    def write(source):
        jitgemm.quantize_activations(source, torch.int8, out=(codes, scale))
        torch.autograd.graph.increment_version(rhs.blocks)  # which no launch of ours does

    expected = []
    for source in sources:
        write(source)
        assert rhs.mark_ready()
        expected.append(compiled(*lhs))
    assert not builders.same_bits(*expected)
    outs = []
    torch.cuda._sleep(20_000_000)  # what follows is queued before any of it runs
    for i in range(200):
        write(sources[i % 2])
        assert not rhs.ready
        outs.append(compiled(*lhs))
    wrong = [i for i, out in enumerate(outs) if not builders.same_bits(out, expected[i % 2])]
    assert not wrong


@pytest.mark.gpu
def test_a_weight_written_before_a_graph_is_replayed_is_read_as_written():
    """A graph's first kernel waits for all before the graph; inside, the weight counts as ready."""
    rhs, others = weight(1, 4096, 4096, 128).to("cuda"), [weight(s, 4096, 4096, 128).to("cuda") for s in (2, 3)]
    lhs = tuple(each.cuda() for each in builders.lhs(4, 1, 4096, "s8"))
    expected = [multiply(lhs, each) for each in others]
    compiled = torch.compile(lambda x, x_scale: multiply((x, x_scale), rhs), fullgraph=True)
    compiled(*lhs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(*lhs)
    outs = []
    for i in range(200):
        rhs.blocks.copy_(others[i % 2].blocks)
        graph.replay()
        outs.append(out.clone())
    assert [i for i, each in enumerate(outs) if not builders.same_bits(each, expected[i % 2])] == []
