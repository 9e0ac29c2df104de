"""tinygemm layers and torchao's tensor subclasses, against PyTorch's own CPU op and torchao's own dequantisation."""

from __future__ import annotations

import warnings

import builders
import checkpoints
import layers
import pytest
import torch
from files_torchao import high_first, tiles

from jitgemm import checkpoint
from jitgemm.checkpoint.torchao import FORMAT, unpack_tiles
from jitgemm.nn import PackedLinear, W4A8Linear, W8A8Linear, load_

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TORCHAO = {"quant_method": "torchao"}


def scales_and_zeros(seed: int, n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[G, n, 2] of values that bf16 holds, whatever the dtype."""
    values = torch.randn((groups, n, 2), generator=builders.generator(seed))
    return values.bfloat16().to(dtype)


def codes(seed: int, n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), generator=builders.generator(seed), dtype=torch.int32)


def tinygemm(q: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """The definition, (q - 8) * scale + zero, fp64 [n, k]."""
    scale, zero = (layers.over_k(parameters[..., i].T.double(), q.shape[1]) for i in (0, 1))
    return (q - 8) * scale + zero


FORMS = {
    "bytes, even k high": high_first,
    "uint8, one code each": lambda q: q.to(torch.uint8),
    "int32, one code each": lambda q: q,
    "tiles of 2": lambda q: tiles(q, 2),
    "tiles of 4": lambda q: tiles(q, 4),
    "tiles of 8": lambda q: tiles(q, 8),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_of_a_tinygemm_weight_reads_as_the_definition(tmp_path, form, dtype):
    q, parameters = codes(1, 16, 256), scales_and_zeros(1, 16, 4, dtype)
    weight = layers.load(tmp_path, {"weight": FORMS[form](q), "scales_and_zeros": parameters})
    layers.assert_exactly(weight, tinygemm(q, parameters))
    assert weight.scale.dtype == weight.offset.dtype == dtype and weight.group_size == 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_groups_of_every_size_equal_pytorchs_cpu_op(group_size, dtype):
    n, k = 64, 512
    q, parameters = codes(2, n, k), scales_and_zeros(2, n, k // group_size, dtype)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    by_op = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(k, dtype=dtype), packed, group_size, parameters)
    weight = layers.read(FORMAT, {"weight": high_first(q), "scales_and_zeros": parameters}, None)
    assert torch.equal(weight.dequantize().to(dtype), by_op.T)  # the op rounds its result to dtype
    assert weight.group_size == group_size


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
def test_tiles_that_the_gpu_packed_unpack(inner_k_tiles):
    q = codes(4, 64, 512)
    packed = torch.ops.aten._convert_weight_to_int4pack(high_first(q).cuda(), inner_k_tiles)
    assert torch.equal(packed.cpu(), tiles(q, inner_k_tiles))
    assert torch.equal(unpack_tiles(packed).cpu(), q.to(torch.uint8))


@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize("group_size", [128, -1, None])
def test_one_group_a_row_leaves_open_what_bytes_are_and_they_or_the_size_decide(group_size, k):
    q, parameters = codes(7, 16, k), scales_and_zeros(7, 16, 1, torch.bfloat16)
    for stored in (q.to(torch.uint8), high_first(q)):
        tensors = {"weight": stored, "scales_and_zeros": parameters}
        layers.assert_exactly(layers.read(FORMAT, tensors, {"group_size": group_size}), tinygemm(q, parameters))


@pytest.mark.parametrize("form", ["bytes, even k high", "uint8, one code each"])
def test_bytes_that_are_all_the_same_need_the_size_that_a_models_layer_has(form):
    q, parameters = torch.zeros((16, 64), dtype=torch.int32), scales_and_zeros(8, 16, 1, torch.bfloat16)
    tensors = {"a.weight": FORMS[form](q), "a.scales_and_zeros": parameters}
    with pytest.raises(ValueError, match=r'weight: expected "shape": \[n, k\] in the config, as uint8 \[16, '):
        checkpoint.read_layer(tensors, "a", device="cpu", config={"group_size": 128})
    told = {"group_size": 128, "shape": [16, 64]}
    layers.assert_exactly(checkpoint.read_layer(tensors, "a", device="cpu", config=told), tinygemm(q, parameters))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 16, bias=False)})
    assert load_(model, tensors, config={"group_size": 128}) == ["a"]
    assert torch.equal(model["a"].weight.dequantize().double(), tinygemm(q, parameters))


# ---- tensor subclasses, flattened as torchao's safetensors code does -------------------------------------------------


Q, PARAMETERS = codes(8, 16, 256), scales_and_zeros(8, 16, 4, torch.bfloat16)
PLAIN, FP32 = layers.layer(10, dtype=torch.bfloat16), layers.layer(11, dtype=torch.float32)
UNPACKED = {"qdata": (FP32.q - 8).to(torch.int8), "scale": FP32.scale, "zero_point": (FP32.zero - 8).to(torch.int8)}
OF_FP32 = (FP32.q - FP32.zero[:, FP32.group]).float() * FP32.scale[:, FP32.group]
FLAT = {
    "tiles": ({"qdata": tiles(Q, 8), "scale_and_zero": PARAMETERS}, tinygemm(Q, PARAMETERS)),
    "Int4Tensor": (
        {
            "qdata": checkpoints.words(Q - 8, 1, torch.int8),
            "scale": PARAMETERS[..., 0],
            "zero_point": PARAMETERS[..., 1],
        },
        tinygemm(Q, PARAMETERS),
    ),
    "plain int32": (
        {"qdata": checkpoints.words(PLAIN.q, 1), "scale": PLAIN.scale.T, "zero_point": PLAIN.zero.T.to(torch.int8)},
        PLAIN.weight,
    ),
    "unpacked": (UNPACKED, OF_FP32),
    "unpacked, zeros in floats": (UNPACKED | {"zero_point": UNPACKED["zero_point"].float()}, OF_FP32),
}


@pytest.mark.parametrize("form", FLAT)
def test_a_flattened_tensor_reads_as_the_definition(tmp_path, form):
    parts, expected = FLAT[form]
    layers.assert_exactly(layers.load(tmp_path, flat(parts)), expected)


def flat(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"_weight_{name}": each for name, each in parts.items()}


UNREADABLE = {
    "qdata": torch.zeros((16, 256), dtype=torch.int8), "scale": torch.ones(16, 4), "zero_point": torch.ones(16, 4),
}  # fmt: skip
FLOATS = {"qdata": torch.zeros(16, 256).to(torch.float8_e4m3fn), "scale": torch.ones(16, 1)}
TINYGEMM = {"weight": torch.zeros((16, 256), dtype=torch.int32), "scales_and_zeros": PARAMETERS}
REFUSED = [
    *((flat(UNREADABLE | change), None, message) for change, message in (
        ({"act_pre_scale": torch.ones(256)}, r"_weight_act_pre_scale: expected none"),
        ({"group_scale": torch.ones(4, 16)}, r"_weight_group_scale: expected a plain packing"),
        ({"zero_point": torch.full((16, 4), 0.5)}, r"zero_point: expected integers, .*got fractions"),
        ({"zero_point": torch.full((16, 4), 9.0)}, r"zero_point \+ 8: expected zero points 0..16 .*, got 17..17"),
        ({"qdata": torch.full((16, 256), 8, dtype=torch.int8)}, r"_weight_qdata: expected 4-bit values -8..7, got"),
        ({"scale_and_zero": torch.ones(4, 16, 2)}, r"_weight_qdata: expected int32 in four dimensions"),
        ({"scale": torch.ones(16, 16), "zero_point": torch.ones(16, 16)}, r"_weight_scale: .*which fits both"),
        ({"qdata": torch.zeros((16, 32), dtype=torch.int32)}, r"_weight_zero_point: expected int8, .*\(NPU's\)"),
    )),
    *((flat(FLOATS | change), None, message) for change, message in (
        ({"qdata": FLOATS["qdata"].to(torch.float8_e5m2)}, "_weight_qdata: expected float8_e4m3fn"),
        ({"scale": torch.ones(16, 3)}, r"_weight_scale: expected floats, one or \[n / rows"),
        ({"more": torch.ones(1)}, "_weight_more: expected only"),
    )),
    (flat(UNREADABLE | {"scale": torch.ones(16, 1), "zero_point": torch.ones((16, 1), dtype=torch.int8)}),
     {"class": "Int8Tensor"}, "_weight_zero_point: expected zeros with 8 bits"),
    ({"weight": torch.zeros(8, 32)}, TORCHAO, r"weight: expected one of torchao's .*, got a plain float32 \[8, 32\]"),
    (TINYGEMM | {"weight": TINYGEMM["weight"] + 16}, None, r"weight: expected 4-bit values 0..15, got 16..16"),
    (TINYGEMM | {"weight": TINYGEMM["weight"].view(2, 2, 256, 4)}, None, r"weight: expected int32 \[n / 8, .*got"),
    (TINYGEMM, {"group_size": 32}, r"scales_and_zeros: expected 8 groups"),
    ({"weight": torch.zeros((16, 32), dtype=torch.uint8), "scales_and_zeros": torch.ones(1, 16, 2)},
     {"shape": [16, 256]}, r"weight: expected codes for k = 256, got uint8 \[16, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize("tensors, config, message", REFUSED, ids=[message for *_, message in REFUSED])
def test_tensors_that_cannot_be_read_are_refused(tensors, config, message):
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, tensors, config)


# ---- torchao itself --------------------------------------------------------------------------------------------------


@pytest.fixture
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao", minversion="0.15")


def high_precision(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((n, k), generator=builders.generator(n + k)).to(dtype)


def flattened(folder, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer's tensors behind its prefix, from the file that torchao's own safetensors code describes."""
    from safetensors.torch import load_file, save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({"layer.weight": weight})
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return {name.removeprefix("layer."): t for name, t in load_file(folder / "model.safetensors").items()}


def in_memory(weight: torch.Tensor):
    """The layer whose weight is a subclass in a state dict."""
    return checkpoint.read_layer({"layer.weight": weight}, "layer", device="cpu", config=TORCHAO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_torchaos_8da4w_tensor_equals_its_own_dequantisation(torchao, tmp_path, mapping, dtype):
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType
    from torchao.quantization.quant_primitives import dequantize_affine

    weight = IntxUnpackedToInt8Tensor.from_hp(
        high_precision(32, 256, dtype), (1, 64), torch.int4, mapping_type=getattr(MappingType, mapping)
    )
    exact = dequantize_affine(weight.qdata, (1, 64), weight.scale, weight.zero_point, torch.int8, -8, 7)
    for read in (layers.read(FORMAT, flattened(tmp_path, weight), None), in_memory(weight)):
        layers.assert_exactly(read, exact)
        assert torch.equal(read.dequantize().to(dtype), weight.dequantize())  # which rounds to dtype, once
        assert (read.zero is None) == (mapping == "SYMMETRIC")


def tile_packed(n: int, k: int, group_size: int):
    """torchao's quantisation to tinygemm's parameters as its Int4TilePackedTo4dTensor, and its own dequantisation.

    Its from_hp asks for a GPU to order the codes; everything else of it runs here, padding included.
    """
    from torchao.quantization import Int4TilePackedTo4dTensor, MappingType
    from torchao.quantization.quant_primitives import (
        _choose_qparams_affine_tinygemm,
        _dequantize_affine_tinygemm,
        _quantize_affine_tinygemm,
    )
    from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

    padded = torch.nn.functional.pad(high_precision(n, k, torch.bfloat16), (0, -k % 1024, 0, -n % 8))
    block, bounds = (1, group_size), {"quant_min": 0, "quant_max": 15}
    scale, zero = _choose_qparams_affine_tinygemm(
        padded, MappingType.ASYMMETRIC, block, torch.int32, 0, 15, None, torch.bfloat16, torch.bfloat16
    )
    q = _quantize_affine_tinygemm(padded, block, scale, zero, torch.int32, **bounds)
    exact = _dequantize_affine_tinygemm(q, block, scale, zero, torch.int32, **bounds, output_dtype=torch.float32)
    scale, zero = (t.reshape(padded.shape[0], -1) for t in (scale, zero))
    parameters = pack_tinygemm_scales_and_zeros(scale, zero, torch.bfloat16)
    tensor = Int4TilePackedTo4dTensor(tiles(q, 8), parameters, list(block), torch.Size((n, k)))
    return tensor, exact


@pytest.mark.parametrize("k", [1024, 320])
def test_torchaos_tile_packed_tensor_equals_its_own_dequantisation_without_padding(torchao, tmp_path, k):
    weight, exact = tile_packed(16, k, 128)
    for read in (
        in_memory(weight),
        layers.read(FORMAT, flattened(tmp_path, weight), TORCHAO | {"shape": [16, k]}),
        checkpoint.read_layer(tmp_path, "layer", device="cpu"),  # the size stands in the file's metadata
    ):
        layers.assert_exactly(read, exact[:, :k])
        assert read.scale.shape == (16, -(-k // 128))


def test_torchaos_int4_tensor_through_a_state_dict(torchao, tmp_path):
    from torchao.quantization import Int4Tensor

    q, parameters = codes(12, 16, 256), scales_and_zeros(12, 16, 4, torch.bfloat16)
    qdata = checkpoints.words(q - 8, 1, torch.int8)
    weight = Int4Tensor(qdata, parameters[..., 0].clone(), parameters[..., 1].clone(), [1, 64], torch.Size((16, 256)))
    torch.save({"weight": weight}, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    loaded = checkpoint.read_layer({"layer.weight": state["weight"]}, "layer", device="cpu", config=TORCHAO)
    for read in (loaded, layers.read(FORMAT, flattened(tmp_path, weight), None)):
        layers.assert_exactly(read, tinygemm(q, parameters))


E4M3 = torch.float8_e4m3fn


def int8_weights() -> dict:
    """As torchao quantises with its configs and with a static scale; the scale of each layer's inputs."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig as Dynamic
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, PerGroup, PerRow, PerTensor, quantize_
    from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

    def quantised(config) -> torch.Tensor:
        net = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
        quantize_(net, config)
        return net[0].weight.detach()

    static = {
        "act_quant_kwargs": QuantizeTensorToInt8Kwargs(granularity=PerTensor()),
        "act_quant_scale": torch.tensor([[0.125]]),
    }
    return {
        "per row, dynamic": (quantised(Dynamic()), None),
        "per tensor": (quantised(Int8WeightOnlyConfig(granularity=PerTensor())), None),
        "in groups": (quantised(Int8WeightOnlyConfig(granularity=PerGroup(64))), None),
        "per tensor, per token": (quantised(Dynamic(granularity=[PerRow(), PerTensor()])), None),
        "static": (Int8Tensor.from_hp(high_precision(64, 256, torch.bfloat16), PerRow(), **static), [0.125]),
    }


def float8(granularity=None, act=None):
    """A Float8Tensor as torchao quantises, whose configs for activations ask for a GPU."""
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    kwargs = None if act is None else QuantizeTensorToFloat8Kwargs(granularity=act)
    weight = high_precision(256, 384, torch.bfloat16)
    return Float8Tensor.from_hp(weight, E4M3, granularity or PerRow(), act_quant_kwargs=kwargs)


def sources(folder, weight: torch.Tensor):
    """The layer "layer" of a state dict, and of the file that torchao writes of it."""
    flattened(folder, weight)
    return {"layer.weight": weight}, folder


@pytest.mark.parametrize("name", ["per row, dynamic", "per tensor", "in groups", "per tensor, per token", "static"])
def test_torchaos_int8_tensor_is_an_int8_layer(torchao, tmp_path, name):
    pytest.importorskip("torchao", minversion="0.18")
    weight, scale = int8_weights()[name]
    for source in sources(tmp_path, weight):
        layer = PackedLinear.from_checkpoint(source, "layer", device="cpu")
        assert type(layer) is W8A8Linear and layer.activation == "int8"
        assert (None if layer.input_scale is None else layer.input_scale.tolist()) == scale
        assert torch.equal(layer.weight.dequantize(), weight.dequantize(torch.float32))


@pytest.mark.parametrize("blocks", ["rows", "tensor", "128 x 128"])
def test_torchaos_float8_tensor_is_an_e4m3_layer(torchao, tmp_path, blocks):
    pytest.importorskip("torchao", minversion="0.18")
    from torchao.quantization import PerBlock, PerRow, PerTensor

    granularity, act, activation = {
        "rows": (PerRow(), PerRow(), "e4m3"),
        "tensor": (PerTensor(), None, "e4m3"),
        "128 x 128": (PerBlock([128, 128]), PerBlock([1, 128]), "e4m3_block"),
    }[blocks]
    weight = float8(granularity, act)
    for source in sources(tmp_path, weight):
        layer = PackedLinear.from_checkpoint(source, "layer", device="cpu")
        assert type(layer) is W8A8Linear and layer.activation == activation
        assert torch.equal(layer.weight.dequantize(), weight.dequantize(torch.float32))


def test_activations_of_one_dynamic_scale_are_named_and_what_the_error_says_works(torchao, tmp_path):
    pytest.importorskip("torchao", minversion="0.18")
    from torchao.quantization import PerTensor

    flattened(tmp_path, float8(PerTensor(), PerTensor()))
    with pytest.raises(ValueError, match="input_activations: expected dynamic scales per token.*got dynamic ones per"):
        PackedLinear.from_checkpoint(tmp_path, "layer", device="cpu")
    assert PackedLinear.from_checkpoint(tmp_path, "layer", device="cpu", activation="e4m3").activation == "e4m3"


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_an_unpacked_tensor_has_the_bits_of_its_target_dtype(torchao, tmp_path, bits):
    from torchao.quantization import IntxUnpackedToInt8Tensor

    target = getattr(torch, f"int{bits}")
    weight = IntxUnpackedToInt8Tensor.from_hp(high_precision(32, 256, torch.bfloat16), (1, 64), target)
    for source in sources(tmp_path, weight):
        layer = PackedLinear.from_checkpoint(source, "layer", device="cpu")
        assert type(layer) is (W4A8Linear if bits <= 4 else W8A8Linear)
        assert torch.equal(layer.weight.dequantize(), (weight.qdata * weight.scale.float().repeat_interleave(64, 1)))


def test_other_classes_of_torchao_are_named_before_the_model_is_changed(torchao, tmp_path):
    from safetensors.torch import save_file
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = {"a.weight": float8(), "b.weight": MXTensor.to_mx(high_precision(64, 64, torch.bfloat16), E4M3)}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    for source in (tmp_path, state):
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(384, 256, bias=False), "b": torch.nn.Linear(64, 64, bias=False)}
        )
        with pytest.raises(ValueError, match="weight: expected one of torchao's .*Float8Tensor, got MXTensor"):
            load_(model, source)
        assert type(model["a"]) is torch.nn.Linear
        kept = model["b"].weight.detach().clone()  # as the error says
        assert load_(model, source, filter=lambda name, _: name != "b", allow_missing=["b.weight"]) == ["a"]
        assert torch.equal(model["b"].weight, kept)


def test_a_class_of_older_releases_is_named():
    """AffineQuantizedTensor and LinearActivationQuantizedTensor of state dicts up to 0.12: no tensors by known
    names."""
    kind = type("AffineQuantizedTensor", (torch.Tensor,), {"__module__": "torchao.dtypes.affine_quantized_tensor"})
    weight = torch.zeros(64, 64).as_subclass(kind)
    with pytest.raises(ValueError, match="weight: expected one of torchao's .*, got AffineQuantizedTensor"):
        in_memory(weight)
