"""Activations to quantise, and how results are compared: for the CPU and GPU tests of the quantiser."""

from __future__ import annotations

import builders
import torch

X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = {"e4m3": (torch.float8_e4m3fn, False), "s8": (torch.int8, False), "s8z": (torch.int8, True)}
"""Name -> (dtype, affine)."""


def activations(seed: int, m: int, k: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    """[m, k] with what matters to a quantiser: outliers, rows of one sign, rows of zeros, tiny and huge rows."""
    g = builders.generator(seed)
    x = torch.randn((m, k), generator=g)
    x[:, torch.randperm(k, generator=g)[: max(1, k // 512)]] *= 50
    small, huge = (2.0**-20, 200.0) if dtype == torch.float16 else (2.0**-133, 2.0**110)
    changes = {
        1: lambda row: row.abs(),
        2: lambda row: -row.abs() - 0.5,
        3: lambda row: row * 0,
        4: lambda row: row * small,
        5: lambda row: row * huge,
        6: lambda row: -row.abs() * 0,
    }
    for i in range(m):
        if i % 8 in changes:
            x[i] = changes[i % 8](x[i])
    return x.to(dtype).to(device)


def parameters(seed: int, k: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A weight for RMSNorm and a permutation."""
    g = builders.generator(seed)
    return {
        "rms_norm": (torch.rand(k, generator=g) + 0.5).to(dtype).to(device),
        "permutation": torch.randperm(k, generator=g).to(torch.int32).to(device),
    }


def given(mode: str, scale: float, zero: int = -3, device: str = "cpu") -> dict[str, object]:
    """Arguments of a static scheme."""
    arguments: dict[str, object] = {"scheme": "tensor", "scale": torch.tensor([scale], device=device)}
    if MODES[mode][1]:
        arguments["zero"] = torch.tensor([zero], dtype=torch.int32, device=device)
    return arguments


def assert_same_bits(results: tuple, expected: tuple) -> None:
    """Codes and zero points bit by bit; scales too, any NaN being any other."""
    assert len(results) == len(expected)
    q, scale = results[0].cpu(), results[1].cpu()
    wanted_q, wanted_scale = expected[0].cpu(), expected[1].cpu()
    assert torch.equal(scale.isnan(), wanted_scale.isnan())
    assert builders.same_bits(scale.nan_to_num(7.0), wanted_scale.nan_to_num(7.0))
    if len(results) == 3:
        assert builders.same_bits(results[2].cpu(), expected[2].cpu())
    if not builders.same_bits(q, wanted_q):
        q, wanted_q = q.contiguous().view(torch.uint8), wanted_q.contiguous().view(torch.uint8)
        assert q.shape == wanted_q.shape
        wrong = (q != wanted_q).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {q.numel()} codes differ, first at {first}: {q[first]:#x}, expected "
            f"{wanted_q[first]:#x}; rows {sorted(set(wrong[:, 0].tolist()))[:20]}"
        )


def code_steps(q: torch.Tensor) -> torch.Tensor:
    """Codes as integers in the order of their values, one apart where values are neighbours."""
    if q.dtype == torch.int8:
        return q.cpu().int()
    bits = q.cpu().view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_close(results: tuple, expected: tuple, *, rare: float = 2e-3) -> None:
    """For SiLU and RMSNorm: scales within 2^-16, zero points and codes off by one at most, and codes rarely."""
    scale, wanted = results[1].cpu(), expected[1].cpu()
    assert torch.equal(scale.isnan(), wanted.isnan())
    assert bool(((scale - wanted).abs() <= wanted.abs() * 2.0**-16)[~wanted.isnan()].all())
    moved = torch.zeros_like(scale, dtype=torch.bool)
    if len(results) == 3:
        step = (results[2].cpu() - expected[2].cpu()).abs()
        assert int(step.max()) <= 1
        moved = step > 0
        assert float(moved.float().mean()) <= 0.05 or int(moved.sum()) <= 1
    steps = (code_steps(results[0]) - code_steps(expected[0])).abs()
    if scale.dim() == 2:  # by block
        moved = moved.repeat_interleave(128, 1)[:, : steps.shape[1]]
    assert int(steps[~moved].max()) <= 1 and int(steps.max()) <= 2
    assert int((steps[~moved] > 0).sum()) <= max(2, rare * steps.numel())
