"""The rotation of weights, and that one of both sides leaves a product as it is."""

from __future__ import annotations

import builders
import pytest
import torch

from jitgemm.activations.call import quantize_activations
from jitgemm.weight.rotation import butterfly, rotated

HADAMARD = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]).double()


def rotated_fp64(x: torch.Tensor) -> torch.Tensor:
    return (x.double().unflatten(-1, (-1, 128)) @ (HADAMARD * 2**-3.5)).flatten(-2)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, outliers: bool = True) -> torch.Tensor:
    x = torch.randn(shape, generator=builders.generator(seed))
    if outliers:
        x[..., 5::300] *= 100
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(128,), (3, 128), (5, 384), (2, 7, 1152), (2, 3, 2, 256), (0, 128)], ids=str)
def test_every_block_of_128_is_multiplied_by_the_matrix(shape, dtype):
    w = random(1, *shape, dtype=dtype)
    found, expected = rotated(w), rotated_fp64(w)
    assert found.dtype == torch.float32 and found.shape == w.shape
    sizes = w.double().unflatten(-1, (-1, 128)).abs().sum(-1, keepdim=True).expand(*w.shape[:-1], -1, 128).flatten(-2)
    assert bool(((found.double() - expected).abs() <= 2**-20 * 2**-3.5 * sizes).all())


def test_additions_have_the_order_that_is_said():
    columns, distance = list(random(3, 4, 128).T), 1
    expected = butterfly(torch.stack(columns, 1))
    while distance < 128:
        for i in (i for i in range(128) if not i & distance):
            a, b = columns[i], columns[i + distance]
            columns[i], columns[i + distance] = a + b, a - b
        distance *= 2
    assert builders.same_bits(torch.stack(columns, 1), expected)


def test_rotated_codes_and_a_rotated_weight_give_the_product_with_less_error_where_there_are_outliers():
    x, w = random(4, 16, 1024), random(5, 32, 1024, outliers=False)
    product, errors = x.double() @ w.double().T, []
    for rotation, weight in ((0, w), (128, rotated(w))):
        q, scale = quantize_activations(x, torch.int8, rotation=rotation)
        found = q.double() * scale.double()[:, None] @ weight.double().T
        errors.append(float((found - product).norm() / product.norm()))
    assert errors[1] < 0.5 * errors[0] < 0.05


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (TypeError, "w: expected a torch.Tensor, got list", ([1.0],)),
        (TypeError, "w: expected bfloat16, float16 or float32, got int8", (torch.zeros(2, 128, dtype=torch.int8),)),
        (ValueError, r"w: expected shape \[..., k\] with k a multiple of 128, got \[2, 192\]", (torch.zeros(2, 192),)),
        (ValueError, r"w: expected shape \[..., k\] with k a multiple of 128, got \[\]", (torch.zeros(()),)),
        (ValueError, "size: expected 128, got 64", (torch.zeros(2, 128), 64)),
    ],
)
def test_a_wrong_argument_is_named(error, message, arguments):
    with pytest.raises(error, match=message):
        rotated(*arguments)
