"""BitBLAS layers, packed from the definition."""

from __future__ import annotations

import builders
import checkpoints
import layers
import pytest
import torch

from jitgemm.checkpoint.bitblas import FORMAT

PLAIN = {"fast_decoding": False}


def qweight(q: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
    if order is None:
        return checkpoints.words(q, 1, torch.int8)
    return checkpoints.words(q, 1, torch.int32, order).view(torch.int8)


def packed(layer: layers.Layer, zeros_mode: str, order: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    zeros = {
        "original": layer.zero.to(layer.scale.dtype),
        "rescale": layer.zero.to(layer.scale.dtype) * layer.scale,  # rounds, as BitBLAS's repacker does
        "quantized": checkpoints.words(layer.zero.T, 1, torch.int8),
    }
    return {"qweight": qweight(layer.q, order), "scales": layer.scale, "zeros": zeros[zeros_mode]}


FP16, INT8 = (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)
SAVED = {"quant_method": "gptq", "checkpoint_format": "bitblas", "bits": 4}
READ = [
    ("original", None, PLAIN | {"zeros_mode": "original"}, {"group_size": 256}),
    ("quantized", None, PLAIN | {"zeros_mode": "quantized"}, {"group_size": 32, "dtype": torch.bfloat16}),
    ("rescale", None, PLAIN | {"zeros_mode": "rescale"}, {"zeros": (8, 8)}),  # not rounded: integers again
    ("quantized", FP16, {"fast_decoding": True, "A_dtype": "float16"}, {}),
    ("quantized", INT8, {"fast_decoding": True, "A_dtype": "int8"}, {}),
    ("quantized", FP16, SAVED, {}), ("quantized", None, SAVED, {"dtype": torch.bfloat16}),  # interleaved for fp16 only
]  # fmt: skip


@pytest.mark.parametrize("mode, order, config, sizes", READ)
def test_integer_zeros_and_interleaved_codes_read_as_the_definition(tmp_path, mode, order, config, sizes):
    layer = layers.layer(1, **sizes)
    tensors = packed(layer, mode, order)
    if config == SAVED:
        tensors["qzeros"] = tensors.pop("zeros")
    weight = layers.load(tmp_path, tensors, config)
    layers.assert_exactly(weight, layer.weight)
    assert builders.same_bits(weight.scale, layer.scale) and weight.offset is None
    assert (weight.zero is None) == (mode == "rescale")


def test_rescaled_zeros_are_subtracted_as_they_are(tmp_path):
    layer = layers.layer(1)
    tensors = packed(layer, "rescale")
    weight = layers.load(tmp_path, tensors, PLAIN | {"zeros_mode": "rescale"})
    expected = layer.q * layer.scale.double()[:, layer.group] - tensors["zeros"].double()[:, layer.group]
    assert not torch.equal(expected, layer.weight), "no zero was rounded"
    layers.assert_exactly(weight, expected)


def test_fractional_zeros_of_mode_original_are_exact(tmp_path):
    layer = layers.layer(3)
    zeros = (torch.rand(layer.zero.shape, generator=builders.generator(3)) * 15).half()
    tensors = packed(layer, "original") | {"zeros": zeros}
    weight = layers.load(tmp_path, tensors, PLAIN | {"zeros_mode": "original"})
    # As BitBLAS computes it in fp32: a difference and a product.
    expected = (layer.q.float() - zeros.float()[:, layer.group]) * layer.scale.float()[:, layer.group]
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize(("config", "zero"), [({"W_dtype": "int4"}, 8), ({"sym": True}, 8), ({"W_dtype": "uint4"}, 0)])
def test_without_zeros_the_type_of_the_codes_says_what_they_mean(config, zero):
    layer = layers.layer(6, zeros=(zero, zero))
    tensors = {"qweight": qweight(layer.q), "scales": layer.scale, "qzeros": torch.empty(0, dtype=torch.int8)}
    layers.assert_exactly(layers.read(FORMAT, tensors, PLAIN | config), layer.weight)


@pytest.mark.parametrize(("mode", "change", "config", "message"), [
    ("quantized", {}, None, r"fast_decoding: expected true or false in the config"),
    ("quantized", {}, {"fast_decoding": True, "A_dtype": "bfloat16"}, r"A_dtype: expected float16 or int8"),
    ("quantized", {}, PLAIN | {"bits": 2}, r"bits: expected 4, got 2"),
    ("quantized", {}, PLAIN | {"desc_act": True}, r"desc_act: expected False, got True"),
    ("quantized", {}, PLAIN | {"zeros_mode": "original"}, r"zeros: expected floats \[n, G\] for zeros_mode"),
    ("quantized", {"qweight": torch.zeros((2, 8, 16, 8), dtype=torch.int8)}, PLAIN, "qweight: .*propagate_b"),
    ("original", {}, PLAIN, r"zeros_mode: expected original or rescale for float zeros, got None"),
    ("original", {"zeros": None}, PLAIN, r"W_dtype: expected int4 or uint4"),
    ("original", {"zeros": torch.full((32, 4), 2.0**-24).half()}, PLAIN | {"zeros_mode": "original"},
     r"zeros: expected zeros_mode original to have integers"),
])  # fmt: skip
def test_a_layer_that_cannot_be_read_is_refused(mode, change, config, message):
    tensors = packed(layers.layer(0), mode) | change
    with pytest.raises(ValueError, match=message):
        layers.read(FORMAT, {name: t for name, t in tensors.items() if t is not None}, config)
