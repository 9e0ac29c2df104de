"""W4A8Linear on the CPU: what it computes, that copies, files and compilers keep it, and its warm-up."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from pathlib import Path

import builders
import pytest
import torch
from nn_layers import CODES, K, N, inputs, layer_of, linear, permuted_w8, permuted_weight, scheme_of
from nn_layers import layer as layer
from safetensors.torch import load_file, save_file
from small_models import Model
from torch._dynamo.testing import CompileCounterWithBackend

import jitgemm
import jitgemm.nn
from jitgemm.activations.call import quantize_activations
from jitgemm.activations.kernel import quantize_specs
from jitgemm.errors import CompileError
from jitgemm.nn import PackedLinear, W4A8Linear, W8A8Linear
from jitgemm.nn.warm.warm import warmup
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import device_spec
from jitgemm.weight.quantize import quantize_w4, quantize_w8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same_layer(a: W4A8Linear, b: W4A8Linear) -> bool:
    """The same tensors, bit for bit, and the same results."""
    x, y = a.state_dict(), b.state_dict()
    same = x.keys() == y.keys() and all(builders.same_bits(x[name], y[name]) for name in x)
    m5 = inputs(3, 5, K)
    return same and a.activation == b.activation and builders.same_bits(a(m5), b(m5))


def bound(module: W4A8Linear) -> bool:
    """Whether the weight's tensors are the module's buffers: resident once, and ready."""
    names = ("blocks", "channel_scale", "row_sum", "permutation")
    return module.weight.ready and all(getattr(module.weight, n) is getattr(module, n) for n in names)


# ---- forward ---------------------------------------------------------------------------------------------------------


def by_hand(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """What forward is defined as."""
    lhs = quantize_activations(
        x,
        CODES[layer.activation],
        scheme=scheme_of(layer),
        affine=layer.activation == "int8_affine",
        scale=layer.input_scale,
        permutation=layer.weight.permutation,
        rotation=layer.weight.rotation,
    )
    out = torch.empty(x.shape[0], layer.out_features, dtype=x.dtype)
    gemm = {4: jitgemm.gemm_w4a8_nt, 8: jitgemm.gemm_w8a8_nt}[layer.weight.bits]
    gemm(lhs, layer.weight, out, bias=layer.bias)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_quantiser_and_gemm(layer, dtype):
    x = inputs(1, 7, K, dtype=dtype)
    out = layer(x)
    assert out.dtype == dtype and out.shape == (7, N) and not out.requires_grad
    assert builders.same_bits(out, by_hand(layer, x))


@pytest.mark.parametrize("shape", [(K,), (0, K), (3, 0, K), (2, 3, K), (1, 1, 1, K)])
def test_leading_dimensions_are_kept(shape):
    layer = layer_of("int8")
    x = inputs(4, *shape)
    out = layer(x)
    assert out.shape == (*shape[:-1], N)
    assert builders.same_bits(out.view(-1, N), layer(x.reshape(-1, K)))


def test_strided_inputs():
    layer = layer_of("e4m3")
    x = inputs(5, 4, 6, K)
    expected = layer(x)
    assert builders.same_bits(layer(x.transpose(0, 1)), expected.transpose(0, 1).contiguous())
    assert builders.same_bits(layer(x.transpose(1, 2).contiguous().transpose(1, 2)), expected)
    wide = torch.zeros(24, K + 3, dtype=x.dtype)  # rows that no tensor map can walk
    wide[:, :K] = x.view(24, K)
    assert builders.same_bits(layer(wide[:, :K]), expected.view(24, N))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_converts_the_input_as_for_a_linear(dtype, to):
    layer, x = layer_of("int8"), inputs(9, 3, K, dtype=dtype)
    expected = layer(x.to(to))
    with torch.autocast("cpu", to):
        assert linear()(x).dtype == to
        assert builders.same_bits(layer(x), expected)


def test_a_weight_used_as_a_tensor_is_an_error_that_says_what_to_do():
    layer, x = layer_of("e4m3"), torch.zeros(2, K)
    layer.weight.named("model.reader.proj")
    told = (
        r"model\.reader\.proj: expected a tensor for .*, got a packed 4-bit weight .*leave the layer out with filter="
    )
    for use in (
        lambda w: torch.nn.functional.linear(x, w),
        lambda w: w @ x.T,
        lambda w: x @ w,
        lambda w: w[0],
        lambda w: torch.cat([x, w]),
    ):
        with pytest.raises(TypeError, match=told):
            use(layer.weight)
    with pytest.raises(AttributeError, match=told):
        layer.weight.size()
    with pytest.raises(TypeError, match="model.reader.proj: expected no parameter.* got 'weight'; to tie or resize"):
        layer.weight = torch.nn.Parameter(x)
    assert not hasattr(layer.weight, "no_such_name") and layer.weight.dtype == torch.bfloat16


# ---- what is wrong ---------------------------------------------------------------------------------------------------

PERMUTED, UNFIT = permuted_weight(), quantize_w4(linear().weight, 64, lhs_dtype=torch.int8)
OF_E4M3 = layer_of("e4m3")
WRONG = [
    (OF_E4M3, (torch.zeros(2, K + 32),), {}, "x: expected shape [..., 256], got [2, 288]"),
    (OF_E4M3, (torch.tensor(1.0),), {}, "x: expected shape [..., 256], got []"),
    (OF_E4M3, (torch.zeros(2, K, dtype=torch.float64),), {}, "x: expected bfloat16, float16 or float32, got float64"),
    (OF_E4M3, (torch.zeros(2, K, dtype=torch.int8),), {}, "x: expected bfloat16, float16 or float32, got int8"),
    (OF_E4M3, (torch.zeros(2, K).requires_grad_(),), {}, "x: expected a tensor that does not require grad"),
    (layer_of("int8").type, (torch.float16,), {}, "packed weight: expected a move to another device"),
    (W4A8Linear.from_weight, (linear(),), {}, "weight: expected a W4Weight, got Linear"),
    (W4A8Linear.from_weight, (PERMUTED, torch.zeros(N - 1)), {}, "bias: expected shape [72], got [71]"),
    (W4A8Linear.from_weight, (PERMUTED, torch.zeros(N).double()), {}, "bias: expected bfloat16, float16 or float32"),
    (W4A8Linear.from_weight, (PERMUTED,), {"activation": "fp8"}, "activation: expected one of e4m3, int8, int8"),
    *((W4A8Linear.from_weight, (PERMUTED,), {"input_scale": value, "activation": activation}, f"input_scale: expected {words}")
      for value, activation, words in (
        (0.5, "e4m3", "a torch.Tensor or None"), (torch.ones(2), "e4m3", "float32 of one element, got float32 [2]"),
        (torch.zeros(1), "e4m3", "a positive, finite number, got 0.0"), (torch.ones(1), "int8_affine", "None with int8_affine"))),
    (W4A8Linear.from_weight, (UNFIT,), {"activation": "e4m3"}, "weight: expected activation int8 or int8_affine or int8_block"),
    (W4A8Linear.from_weight, (permuted_w8(),), {"activation": "int8"}, "weight: expected a W4Weight, got W8Weight"),
    (W8A8Linear.from_weight, (permuted_w8(),), {}, "weight: expected activation int8 or int8_affine or int8_block, as it is"),
    (W8A8Linear.from_weight, (PERMUTED,), {}, "weight: expected a W8Weight, got W4Weight"),
    (W4A8Linear.from_linear, (torch.zeros(8, 32),), {}, "linear: expected a torch.nn.Linear, got Tensor"),
    (W4A8Linear.from_linear, (torch.nn.Linear(32, 8, device="meta"),), {}, "linear: expected a weight with data"),
    (W4A8Linear.from_linear, (torch.nn.Linear(32, 10),), {}, "w: expected n, its rows, to be a positive multiple of 8"),
    *((W4A8Linear.from_linear, (linear(),), {name: 8}, name) for name in ("bits", "sums", "ignore", "block", "blok")),
    (warmup, (Model(), 0), {}, "max_m: expected at least 1, got 0"),
    (warmup, (Model(), "many"), {}, "max_m: expected an int, got str"),
    (warmup, (Model(), 1), {"dtype": torch.int8}, "dtype: expected bfloat16, float16 or float32, got int8"),
    (warmup, (torch.nn.Sequential(OF_E4M3), 1), {"device": "z80"}, "device: expected one of h200"),
]  # fmt: skip


@pytest.mark.parametrize("call, arguments, options, text", WRONG, ids=[text for *_, text in WRONG])
def test_wrong_arguments_are_named(call, arguments, options, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        call(*arguments, **options)


# ---- making a layer --------------------------------------------------------------------------------------------------


FROM_LINEAR = [
    (W4A8Linear, {"group_size": 32, "symmetric": False, "scale_dtype": torch.float16, "clip_steps": 3}, "any"),
    (W4A8Linear, {"group_size": 128, "full_range": False}, "e4m3"),
    (W4A8Linear, {"full_range": False, "activation": "int8", "group_size": -1}, "s8"),
    *((W8A8Linear, {"activation": activation, "block": 128 if "block" in activation else None}, None)
      for activation in ("e4m3", "e4m3_block", "int8", "int8_affine")),
]  # fmt: skip


@pytest.mark.parametrize("kind, options, order", FROM_LINEAR, ids=str)
def test_a_linear_is_quantised_for_the_activations_and_its_bias_widened(kind, options, order):
    source = linear(dtype=torch.float16)
    layer, bits = kind.from_linear(source, **options), 4 if kind is W4A8Linear else 8
    activation = options.pop("activation", "e4m3")
    expected = {4: quantize_w4, 8: quantize_w8}[bits](source.weight, lhs_dtype=CODES[activation], **options)
    assert layer.weight.format == expected.format and builders.same_bits(layer.blocks, expected.blocks)
    assert order is None or expected.format.order == order
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, source.bias.float())
    x = inputs(2, 64, K, dtype=torch.float32)
    with torch.no_grad():
        exact = source.float()(x)
    lost = 0.12 if bits == 4 else 0.012 if "int8" in activation else 0.045
    assert float((layer(x) - exact).norm() / exact.norm()) < lost


def test_repr_says_what_the_layer_is():
    text = "in_features=256, out_features=72, bias=False, activation='e4m3', group_size=64, zero points, permutation"
    assert text + ", static input scale" in repr(layer_of("static"))
    assert "per channel" in repr(layer_of("per channel"))
    assert repr(layer_of("fp16 scales")).endswith("scale_dtype=fp16, codes=any)")  # which warm-up asks for


@pytest.mark.parametrize("channel", [-1, "channel"])
def test_minus_one_and_channel_are_a_scale_per_row(channel):
    expected = W4A8Linear.from_linear(linear(), group_size=K)
    empty = W4A8Linear.empty(K, N, group_size=channel, bias=torch.bfloat16)
    assert empty.state_dict().keys() == expected.state_dict().keys()
    assert empty.weight.group_size == K and "per channel" in repr(empty)


# ---- copies, moves, files --------------------------------------------------------------------------------------------


def test_buffers_are_the_weights_tensors(layer):
    assert bound(layer)
    held = {id(tensor) for tensor in layer.buffers()}
    assert {id(tensor) for name, tensor in layer.weight.state_dict().items() if name != "meta"} <= held


def filled(other: PackedLinear, state: dict[str, torch.Tensor], assign: bool = False) -> PackedLinear:
    other.load_state_dict(state, assign=assign)
    return other


def by_file(layer: PackedLinear, path: Path) -> PackedLinear:
    save_file(layer.state_dict(prefix="a.b."), path / "model.safetensors")
    tensors = load_file(path / "model.safetensors")
    third = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": emptied(layer)})})
    third.load_state_dict(tensors)
    assert same_layer(layer, third["a"]["b"])
    return PackedLinear.from_state_dict(tensors, "a.b.")


def misaligned(layer: PackedLinear) -> dict[str, torch.Tensor]:
    """Its tensors as a file may hold them."""
    tensors = {}
    for name, tensor in layer.state_dict().items():
        raw = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)
        tensors[name] = raw[8:].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return tensors


AGAIN = {
    "deepcopy": lambda layer, path: copy.deepcopy(layer),
    "pickle": lambda layer, path: pickle.loads(pickle.dumps(layer)),
    **{name: lambda layer, path, name=name: getattr(copy.deepcopy(layer), name)() for name in ("half", "double")},
    "shared": lambda layer, path: copy.deepcopy(layer).share_memory(),
    "move": lambda layer, path: filled(copy.deepcopy(layer).to("meta").to_empty(device="cpu"), layer.state_dict()),
    "empty": lambda layer, path: filled(emptied(layer), layer.state_dict()),
    "assign": lambda layer, path: filled(emptied(layer), layer.state_dict(), assign=True),
    "assign to none": lambda layer, path: filled(emptied(layer, "meta"), layer.state_dict(), assign=True),
    "misaligned": lambda layer, path: filled(emptied(layer, "meta"), misaligned(layer), assign=True),
    "state dict": lambda layer, path: type(layer).from_state_dict(layer.state_dict()),
    "file": by_file,
}


@pytest.mark.parametrize("way", AGAIN)
def test_a_layer_comes_again_bit_for_bit(layer, way, tmp_path):
    other = AGAIN[way](layer, tmp_path)
    assert type(other) is type(layer) and same_layer(layer, other) and bound(other)
    assert other.weight.format == layer.weight.format  # its order of codes is the values', which an empty one lacks
    assert (other.blocks.data_ptr() == layer.blocks.data_ptr()) == ("assign" in way or way == "state dict")
    assert other.blocks.is_shared() == (way == "shared") and other.blocks.data_ptr() % 16 == 0


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("kind", ["per channel", "w8 block"])
def test_layers_made_in_inference_mode_are_ready_and_tell_when_they_are_written(kind, way, tmp_path):
    layer = layer_of(kind)
    with torch.inference_mode():
        other = AGAIN[way](layer, tmp_path)
    for each in (other, copy.deepcopy(other)):
        assert bound(each)
        with torch.inference_mode():
            each.blocks.zero_()
        assert not each.weight.ready


def test_moving_to_another_device_moves_everything_but_the_description(layer):
    moved = copy.deepcopy(layer).to("meta")
    devices = {name: tensor.device.type for name, tensor in moved.state_dict().items()}
    assert {name for name, device in devices.items() if device == "cpu"} == {"meta", "activation_type"}
    assert moved.weight.device.type == "meta" and moved.weight.blocks is moved.blocks
    dtypes = {name: tensor.dtype for name, tensor in layer.named_buffers()}
    assert dtypes == {name: tensor.dtype for name, tensor in moved.named_buffers()}


def emptied(layer: PackedLinear, device: str | None = None) -> PackedLinear:
    """`empty` of its class for a state dict of this layer."""
    weight = layer.weight
    of_four = {"symmetric": not weight.format.zero_point, "offset": weight.format.offset} if weight.bits == 4 else {}
    return type(layer).empty(
        layer.in_features,
        layer.out_features,
        bias=False if layer.bias is None else layer.bias.dtype,
        activation=layer.activation,
        group_size=weight.group_size,
        scale_dtype=weight.scale_dtype,
        permutation=weight.permutation is not None,
        input_scale=layer.input_scale is not None,
        device=device,
        rotation=weight.rotation,
        **of_four,
    )


@pytest.mark.parametrize(
    "change, text",
    [
        ({"group_size": 64}, "meta: expected W4Weight(n=72, k=256, group_size=64"),
        ({"symmetric": False}, "meta: expected W4Weight(n=72, k=256, group_size=128, unsigned with zero points"),
        ({"scale_dtype": torch.float16}, "meta: expected W4Weight("),
        ({"rotation": 128}, "bf16 scales, rotated, device"),
        ({"activation": "int8"}, "activation_type: expected [1] (int8), got"),
        ({"bias": torch.bfloat16}, "bias: expected bfloat16, got float32"),
        ({"bias": False}, 'Unexpected key(s) in state_dict: "bias"'),
        ({"input_scale": True}, 'Missing key(s) in state_dict: "input_scale"'),
        ({"permutation": True}, 'Missing key(s) in state_dict: "permutation"'),
    ],
)
def test_a_state_dict_of_another_layer_is_refused_and_nothing_is_loaded(change, text):
    layer = layer_of("e4m3")
    arguments = {"bias": torch.float32, "activation": "e4m3", "group_size": 128} | change
    other = W4A8Linear.empty(K, N, **arguments)
    other.blocks.zero_()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        other.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("value", [-1, K, 2**31 - 1, 5])  # 5 comes twice
def test_an_order_of_columns_that_leaves_the_row_or_repeats_one_is_refused_and_nothing_is_loaded(alone, value):
    layer = layer_of("permutation")
    order = torch.arange(K, dtype=torch.int32)
    order[0] = value
    state = {"permutation": order} if alone else layer.state_dict() | {"permutation": order}
    before = layer.weight.permutation.clone()
    with pytest.raises(RuntimeError, match=f"permutation: expected every value of 0..{K - 1} once"):
        layer.load_state_dict(state, strict=not alone)
    assert torch.equal(layer.weight.permutation, before) and bound(layer)
    if not alone:
        with pytest.raises(ValueError, match="permutation: expected every value of"):
            W4A8Linear.from_state_dict(state)


@pytest.mark.parametrize(
    "kind, change, by_load, by_class",
    [
        ("e4m3", {"meta": None}, 'Missing key(s) in state_dict: "meta"', "expected a tensor 'meta', found none"),
        ("e4m3", {"activation_type": None}, 'Missing key(s) in state_dict: "activation_type"',
         "state dict: expected 'activation_type' to hold one of 0..4, got None"),
        ("per channel", {"channel_scale": torch.ones(128).half()},
         "channel_scale: expected float32 [128], got float16 [128]", "channel_scale: expected float32"),
    ],
)  # fmt: skip
def test_missing_tensors_are_reported_as_missing_and_others_not_converted(kind, change, by_load, by_class):
    state = layer_of(kind).state_dict() | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(RuntimeError, match=re.escape(by_load)):
        emptied(layer_of(kind)).load_state_dict(state)
    with pytest.raises(ValueError, match=re.escape(by_class)):
        W4A8Linear.from_state_dict(state)


def test_a_weight_written_in_place_is_used_as_written():
    layer, other = layer_of("int8"), W4A8Linear.from_linear(linear(seed=9), activation="int8")
    layer.blocks.copy_(other.blocks)
    layer.row_sum.copy_(other.row_sum)
    layer.bias.copy_(other.bias)
    x = inputs(8, 3, K)
    assert not layer.weight.ready
    assert builders.same_bits(layer(x), other(x))


def test_buffers_replaced_behind_the_modules_back_are_used():
    layer, other = layer_of("int8"), W4A8Linear.from_linear(linear(seed=9), activation="int8")
    layer._buffers.update(other._buffers)
    x = inputs(9, 3, K)
    assert builders.same_bits(layer(x), other(x)) and bound(layer)


@pytest.mark.parametrize(
    "kind, name, change",
    [
        ("per channel", "channel_scale", lambda scale: scale * 2),
        ("permutation", "permutation", lambda order: order.flip(0)),
    ],
)
def test_a_buffer_that_is_replaced_alone_is_used(kind, name, change):
    layer, x = layer_of(kind), inputs(9, 3, K)
    before, buffer = layer(x), change(getattr(layer, name))
    changed = torch.func.functional_call(layer, {name: buffer}, (x,))
    assert not torch.equal(changed, before) and builders.same_bits(layer(x), before)
    setattr(layer, name, buffer)
    assert builders.same_bits(layer(x), changed) and bound(layer)


# ---- compilers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e4m3_block", "int8_affine", "permutation", "offset", "static", "w8 e4m3", "rotated"])
def test_compiles_as_a_full_graph(fresh_dynamo, kind):
    layer = layer_of(kind)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for m in (5, 6):
        x = inputs(m, 2, m, K)
        assert builders.same_bits(compiled(x), layer(x))


@pytest.mark.parametrize("kind", ["permutation", "w8 e4m3"])
def test_one_graph_serves_every_m(fresh_dynamo, kind):
    """A size of the weight, too: a compiler gives sizes that are equal, and not known to be fixed, one name."""
    layer = layer_of(kind)
    sizes = {size for tensor in layer.buffers() for size in tensor.shape} - {1, K}  # x [K, K] is square itself
    assert len(sizes) > 1
    for m in sizes:
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("eager")
        compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
        for count in (m, m + 1, 5):
            x = inputs(1, count, K)
            assert builders.same_bits(compiled(x), layer(x))
        assert graphs.frame_count == 1, m


def test_a_compiler_sees_the_weight_as_the_modules_own(fresh_dynamo):
    """Inputs of fixed address: a CUDA graph made by the compiler does not copy them at each call."""
    seen = {}

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta["example_value"], torch.Tensor):
                seen[node.name] = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        return graph

    layer = layer_of("permutation")
    torch.compile(layer, backend=backend, fullgraph=True)(inputs(1, 5, K))
    for name in ("blocks", "row_sum", "permutation"):
        assert [kind for node, kind in seen.items() if name in node] == ["unguarded"]


@pytest.mark.parametrize("root, strict", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("kind", ["w8 e4m3", "permutation", "static"])
def test_export(fresh_dynamo, tmp_path, kind, root, strict):
    layer = layer_of(kind)
    model = layer if root else torch.nn.Sequential(layer, torch.nn.ReLU())
    x = inputs(1, 5, K)
    program = torch.export.export(model, (x,), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    for each in (program, torch.export.load(tmp_path / "program.pt2")):
        assert builders.same_bits(each.module()(x), model(x))
    assert bound(layer)


# ---- warmup ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))


def needed(layer: W4A8Linear, max_m: int, x: str, lhs: str) -> set[str]:
    """Labels of the kernels of a layer, from the selectors."""
    weight = layer.weight
    static, permuted = layer.input_scale is not None, weight.permutation is not None
    gemms = kernels_for(weight.n, weight.k, lhs, weight.format, device_spec("h200"), max_m, out=x)
    return {s.label for s in (*gemms, *quantize_specs(weight.k, x, lhs, static=static, permuted=permuted))}


@pytest.mark.nvrtc
def test_warmup_compiles_what_the_layers_need_once(own_cache):
    plain, static = layer_of("e4m3"), layer_of("static")
    other = W4A8Linear.from_linear(linear(), activation=plain.activation, group_size=32)  # of the same sizes
    model = torch.nn.ModuleDict({"a": plain, "b": layer_of("e4m3"), "c": static, "d": other})
    compiled = warmup(model, 8, dtype=torch.bfloat16, device="h200")
    assert len(compiled) == len(set(compiled))
    assert set(compiled) == set().union(*(needed(each, 8, "bf16", "e4m3") for each in (plain, static, other)))
    assert warmup(model, 8, dtype=torch.bfloat16, device="h200") == []


@pytest.mark.nvrtc
def test_warmup_takes_the_models_own_type(own_cache):
    layer = layer_of("int8")
    model = torch.nn.Sequential(torch.nn.LayerNorm(K), layer).half()
    assert set(warmup(model, 1, device="h200")) == needed(layer, 1, "fp16", "s8")
    assert warmup(model, 1, dtype=torch.float16, device="h200") == []


@pytest.mark.nvrtc
def test_what_does_not_compile_is_an_error_after_the_rest(own_cache, monkeypatch):
    from jitgemm.moe.plan import FAMILIES

    model, gemms = torch.nn.Sequential(layer_of("int8")), FAMILIES["gemm"]
    broken = replace(gemms, source=lambda spec: replace(gemms.source(spec), source="#error broken"))
    with monkeypatch.context() as patch:  # the GEMM's source is broken, its quantiser's is not
        patch.setitem(FAMILIES, "gemm", broken)
        with pytest.raises(CompileError, match="(?s)1 of 2 kernels did not compile; the first: .*#error broken"):
            warmup(model, 1, device="h200")
    assert all(not label.startswith("quantize") for label in warmup(model, 1, device="h200"))


def test_warmup_says_that_a_model_without_layers_needs_no_kernels(own_cache):
    with pytest.warns(UserWarning, match="warmup: the model holds no layer of jitgemm.nn"):
        assert warmup(Model(), 16) == []
