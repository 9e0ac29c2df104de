"""BitBLAS layers, packed from the definition."""

from __future__ import annotations

import builders
import checkpoints
import layers
import pytest
import torch
from files_bitblas import qweight

from jitgemm.checkpoint.bitblas import FORMAT

PLAIN = {"fast_decoding": False}
INTERLEAVED = {"float16": (0, 2, 4, 6, 1, 3, 5, 7), "int8": (0, 4, 1, 5, 2, 6, 3, 7)}
SAVED = {"quant_method": "gptq", "checkpoint_format": "bitblas", "bits": 4}


def packed(layer: layers.Layer, zeros_mode: str, order: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    zeros = {
        "original": layer.zero.to(layer.scale.dtype),
        "rescale": layer.zero.to(layer.scale.dtype) * layer.scale,  # rounds, as BitBLAS's repacker does
        "quantized": checkpoints.words(layer.zero.T, 1, torch.int8),
    }
    return {"qweight": qweight(layer.q, order), "scales": layer.scale, "zeros": zeros[zeros_mode]}


@pytest.mark.parametrize("group_size, dtype", [(32, torch.float16), (64, torch.bfloat16), (256, torch.float16)])
@pytest.mark.parametrize("zeros_mode", ["original", "quantized"])
def test_integer_zeros_read_as_the_definition(tmp_path, zeros_mode, group_size, dtype):
    layer = layers.layer(group_size, k=512, group_size=group_size, dtype=dtype)
    weight = layers.load(tmp_path, packed(layer, zeros_mode), PLAIN | {"zeros_mode": zeros_mode})
    layers.assert_exactly(weight, layer.weight)
    assert builders.same_bits(weight.scale, layer.scale) and weight.offset is None


def test_rescaled_zeros_are_subtracted_as_they_are(tmp_path):
    layer = layers.layer(1)
    tensors = packed(layer, "rescale")
    weight = layers.load(tmp_path, tensors, PLAIN | {"zeros_mode": "rescale"})
    expected = layer.q * layer.scale.double()[:, layer.group] - tensors["zeros"].double()[:, layer.group]
    assert not torch.equal(expected, layer.weight), "no zero was rounded"
    layers.assert_exactly(weight, expected)


def test_rescaled_zeros_that_were_not_rounded_are_integers_again():
    layer = layers.layer(2, zeros=(8, 8))
    weight = layers.read(FORMAT, packed(layer, "rescale"), PLAIN | {"zeros_mode": "rescale"})
    assert weight.zero is None and weight.offset is None
    layers.assert_exactly(weight, layer.weight)


def test_fractional_zeros_of_mode_original_are_exact(tmp_path):
    layer = layers.layer(3)
    zeros = (torch.rand(layer.zero.shape, generator=builders.generator(3)) * 15).half()
    tensors = packed(layer, "original") | {"zeros": zeros}
    weight = layers.load(tmp_path, tensors, PLAIN | {"zeros_mode": "original"})
    # As BitBLAS computes it in fp32: a difference and a product.
    expected = (layer.q.float() - zeros.float()[:, layer.group]) * layer.scale.float()[:, layer.group]
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("activations", INTERLEAVED)
def test_codes_interleaved_for_fast_decoding_are_put_back(tmp_path, activations):
    layer = layers.layer(4)
    tensors = packed(layer, "quantized", INTERLEAVED[activations])
    weight = layers.load(tmp_path, tensors, {"fast_decoding": True, "A_dtype": activations})
    layers.assert_exactly(weight, layer.weight)


@pytest.mark.parametrize(("dtype", "order"), [(torch.float16, INTERLEAVED["float16"]), (torch.bfloat16, None)])
def test_a_saved_bitblas_checkpoint_is_interleaved_for_fp16_only(dtype, order):
    layer = layers.layer(5, dtype=dtype)
    tensors = packed(layer, "quantized", order)
    tensors["qzeros"] = tensors.pop("zeros")
    layers.assert_exactly(layers.read(FORMAT, tensors, SAVED), layer.weight)


@pytest.mark.parametrize(("config", "zero"), [({"W_dtype": "int4"}, 8), ({"sym": True}, 8), ({"W_dtype": "uint4"}, 0)])
def test_without_zeros_the_type_of_the_codes_says_what_they_mean(config, zero):
    layer = layers.layer(6, zeros=(zero, zero))
    tensors = {"qweight": qweight(layer.q), "scales": layer.scale, "qzeros": torch.empty(0, dtype=torch.int8)}
    layers.assert_exactly(layers.read(FORMAT, tensors, PLAIN | config), layer.weight)


@pytest.mark.parametrize(
    ("mode", "change", "config", "message"),
    [
        ("quantized", {}, None, r"fast_decoding: expected true or false in the config"),
        ("quantized", {}, {"fast_decoding": True, "A_dtype": "bfloat16"}, r"A_dtype: expected float16 or int8"),
        ("quantized", {}, PLAIN | {"bits": 2}, r"bits: expected 4, got 2"),
        ("quantized", {}, PLAIN | {"desc_act": True}, r"desc_act: expected False, got True"),
        ("quantized", {}, PLAIN | {"zeros_mode": "original"}, r"zeros: expected floats \[n, G\] for zeros_mode"),
        ("quantized", {"qweight": torch.zeros((2, 8, 16, 8), dtype=torch.int8)}, PLAIN, "qweight: .*propagate_b"),
        ("original", {}, PLAIN, r"zeros_mode: expected original or rescale for float zeros, got None"),
        ("original", {"zeros": None}, PLAIN, r"W_dtype: expected int4 or uint4"),
        (
            "original",
            {"zeros": torch.full((32, 4), 2.0**-24, dtype=torch.float16)},
            PLAIN | {"zeros_mode": "original"},
            r"zeros: expected zeros_mode original to have integers",
        ),
    ],
)
def test_a_layer_that_cannot_be_read_is_refused(mode, change, config, message):
    tensors = packed(layers.layer(0), mode) | change
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, {name: t for name, t in tensors.items() if t is not None}, config)
