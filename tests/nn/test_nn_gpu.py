"""jitgemm.nn on a Hopper GPU: the layer against the exact reference, moves, graphs, compilers, memory, warm-up."""

from __future__ import annotations

import copy

import builders
import pytest
import torch
from nn_layers import ACTIVATIONS, CODES, MAKERS, K, N, inputs, layer_of, linear, requested, scheme_of
from small_models import Block, Model, checkpoint_tensors, opened, same_state

import jitgemm.nn
from jitgemm.activations.call import quantize_activations
from jitgemm.errors import CacheMissError
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.nn import W4A8Linear
from jitgemm.nn.warm.warm import warmup

pytestmark = pytest.mark.gpu


@pytest.fixture(params=MAKERS)
def pair(request) -> tuple[W4A8Linear, W4A8Linear]:
    """The same layer on the CPU and on the GPU."""
    layer = layer_of(request.param)
    return layer, copy.deepcopy(layer).cuda()


def assert_right(out: torch.Tensor, layer: W4A8Linear, x: torch.Tensor) -> None:
    """Within the GEMM's documented error of the layer on the CPU, which is exact."""
    lhs = quantize_activations(
        x.cpu().reshape(-1, layer.in_features),
        CODES[layer.activation],
        scheme=scheme_of(layer),
        affine=layer.activation == "int8_affine",
        scale=layer.input_scale,
        permutation=layer.weight.permutation,
        rotation=layer.weight.rotation,
    )
    ref, bound = gemm_w4a8_bound(lhs, layer.weight, bias=layer.bias, out_dtype=out.dtype)
    error = (out.cpu().double().view_as(ref) - ref).abs()
    assert bool((error <= bound).all()), f"worst error / bound: {float((error / bound).max()):.3f}"


@pytest.mark.parametrize("m, dtype", [(1, torch.bfloat16), (17, torch.float16), (300, torch.float32)], ids=str)
def test_the_layer_on_the_gpu_is_within_the_error_bound(pair, dtype, m):
    on_cpu, on_gpu = pair
    x = inputs(m, m, K, dtype=dtype)
    out = on_gpu(x.cuda())
    assert out.is_cuda and out.dtype == dtype and out.shape == (m, N)
    assert_right(out, on_cpu, x)


def test_moves_and_state_dicts_cross_devices(pair):
    on_cpu, on_gpu = pair
    assert on_gpu.weight.ready and on_gpu.weight.blocks is on_gpu.blocks
    assert all(tensor.is_cuda for tensor in on_gpu.buffers())
    assert same_state(copy.deepcopy(on_gpu).cpu(), on_cpu)
    expected = on_gpu(inputs(1, 5, K).cuda())
    on_gpu.blocks.zero_()
    on_gpu.load_state_dict(on_cpu.state_dict())
    fresh = type(on_cpu).from_state_dict({name: tensor.cuda() for name, tensor in on_cpu.state_dict().items()})
    for layer in (on_gpu, fresh):
        assert layer.weight.ready and builders.same_bits(layer(inputs(1, 5, K).cuda()), expected)


def test_strided_inputs_on_the_gpu():
    layer, x = layer_of("int8").cuda(), inputs(3, 4, 6, K).cuda()
    expected = layer(x)
    assert builders.same_bits(layer(x.transpose(0, 1)), expected.transpose(0, 1).contiguous())
    wide = torch.zeros(24, K + 3, dtype=x.dtype, device="cuda")
    wide[:, :K] = x.view(24, K)
    assert builders.same_bits(layer(wide[:, :K]), expected.view(24, N))


# ---- graphs and compilers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e4m3", "int8_affine", "permutation", "static", "per channel", "rotated"])
def test_a_cuda_graph_right_after_the_warm_up(kind):
    """Nothing was called with these shapes before the capture."""
    layer = layer_of(kind).cuda()
    warmup(torch.nn.Sequential(layer), 64, dtype=torch.bfloat16)
    x = inputs(5, 48, K).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for seed in (6, 7):
        x.copy_(inputs(seed, 48, K))
        graph.replay()
        assert builders.same_bits(out, layer(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(fresh_dynamo, mode):
    torch.manual_seed(1)
    model = Block().cuda().bfloat16()
    jitgemm.nn.quantize_(model, activation="int8", group_size=32)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(4):
            x = inputs(seed, 16, 64).cuda()
            expected = model(x).float()
            assert float((compiled(x).float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("kind", ["e4m3_block", "int8_affine", "permutation", "offset", "static", "w8 e4m3", "rotated"])
def test_the_layer_alone_compiles_to_the_same_bits(fresh_dynamo, kind):
    layer = layer_of(kind).cuda()
    compiled = torch.compile(layer, fullgraph=True)
    x = inputs(8, 24, K).cuda()
    assert builders.same_bits(compiled(x), layer(x))


# ---- quantize_, memory, warmup ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_quantising_on_the_gpu_gives_the_cpus_weight(activation):
    source = linear(k=1024, n=256)
    on_cpu = W4A8Linear.from_linear(source, activation=activation)
    assert same_state(W4A8Linear.from_linear(source, activation=activation, device="cuda").cpu(), on_cpu)
    assert same_state(W4A8Linear.from_linear(source.cuda(), activation=activation).cpu(), on_cpu)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_without_data_is_filled_on_the_gpu_and_filled_again(same):
    tensors, _ = checkpoint_tensors(Model())
    if same:
        tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    expected = Model(tied=True)
    jitgemm.nn.load_(expected, opened(tensors))
    with torch.device("meta"):
        model = Model(tied=True)
    for device in ("cuda", None):
        jitgemm.nn.load_(model, opened(tensors), device=device)
        assert model.embed.weight.is_cuda and model.blocks[0].up.blocks.is_cuda
        assert (model.lm_head.weight is model.embed.weight) == same
        assert same_state(copy.deepcopy(model).cpu(), expected)


def test_autocast_converts_the_input_on_the_gpu():
    layer, x = layer_of("e4m3").cuda(), inputs(3, 9, K, dtype=torch.float32).cuda()
    expected = layer(x.half())
    with torch.autocast("cuda", torch.float16):
        assert builders.same_bits(layer(x), expected)


def test_weights_are_resident_once():
    """After quantising, memory holds the packed weights and nothing else; on the way, little more than the original."""
    n = k = 4096
    torch.cuda.empty_cache()
    before = requested()
    options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    model = torch.nn.Sequential(*(torch.nn.Linear(k, n, **options) for _ in range(4)))
    original = requested() - before
    torch.cuda.reset_peak_memory_stats()
    jitgemm.nn.quantize_(model, group_size=128)
    packed = sum(layer.weight.nbytes for layer in model)
    assert requested() - before <= packed + (1 << 16)
    assert packed < 0.27 * original
    assert requested("peak") - before < original + (512 << 20)
    moved = copy.deepcopy(model).cpu().cuda()
    del model
    assert requested() - before <= packed + (1 << 16)
    del moved


def test_after_the_warm_up_no_m_compiles(monkeypatch, tmp_path):
    layer = W4A8Linear.from_linear(linear(k=512, n=384), activation="int8").cuda()
    model = torch.nn.Sequential(layer)
    warmup(model, 512, dtype=torch.float16)
    monkeypatch.setenv("JITGEMM_JIT", "off")
    for m in (1, 3, 8, 9, 31, 64, 65, 127, 200, 256, 400, 512):
        layer(inputs(m, m, 512, dtype=torch.float16).cuda())
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path))
    other = W4A8Linear.from_linear(linear(k=992, n=384), group_size=32, scale_dtype=torch.float16).cuda()
    with pytest.raises(CacheMissError):
        other(inputs(1, 5, 992).cuda())
