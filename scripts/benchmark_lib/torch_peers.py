"""torch's own GEMMs as contestants: weights of 16 or 8 bits, what a model runs on when it is not 4-bit."""

from __future__ import annotations

from functools import partial

import torch

from .contestant import WIDER, Contestant, Refused, Run, Start
from .data import Source, quantise_blocks, quantise_rows


def torch_peers() -> list[Contestant]:
    table = (
        ("bf16", "torch.mm bf16", _bf16),
        ("fp8row", "torch._scaled_mm e4m3, row-wise scales", partial(_fp8, True)),
        ("fp8ten", "torch._scaled_mm e4m3, per-tensor scales", partial(_fp8, False)),
        ("fp8block", "torch._scaled_mm e4m3, 128 x 128 blocks of weights, 1 x 128 of activations", _fp8_blocks),
        ("int8mm", "torch._int_mm (int32 out, no scales)", _int8),
    )
    return [Contestant(name, label, WIDER, False, "torch", None, load) for name, label, load in table]


def _clones(tensor: torch.Tensor, source: Source) -> list[torch.Tensor]:
    return [tensor] + [tensor.clone() for _ in range(source.copies(tensor.nbytes) - 1)]


def _bf16(source: Source) -> Start:
    weights = [weight.t() for weight in _clones(source.weight, source)]

    def start(m: int) -> Run:
        x, out = source.activations(m), source.out(m)
        calls = [partial(torch.mm, x, weight, out=out) for weight in weights]
        return Run.writing(out, calls, 2.0 * (source.n * source.k + m * source.k + m * source.n))

    return start


def _fp8(by_row: bool, source: Source) -> Start:
    if source.n % 16 or source.k % 16:
        raise Refused("_scaled_mm: n and k must be multiples of 16")

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if by_row:
            codes, scale = quantise_rows(x, torch.float8_e4m3fn)
            return codes, scale.view(-1, 1)
        scale = (x.abs().max().float() / 448.0).reshape(())
        return (x.float() / scale).clamp_(-448, 448).to(torch.float8_e4m3fn), scale

    codes, scale_b = quantise(source.weight)
    weights = [weight.t() for weight in _clones(codes, source)]

    def start(m: int) -> Run:
        (x, scale_a), out = quantise(source.activations(m)), source.out(m)
        # use_fast_accum: sums stay in the tensor cores, the faster setting and the one vLLM's scaled_mm runs with.
        options = {"scale_a": scale_a, "scale_b": scale_b.t(), "out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls = [partial(torch._scaled_mm, x, weight, **options, out=out) for weight in weights]
        return Run.writing(out, calls, source.bytes_of(m, source.n * source.k))

    return start


def _fp8_blocks(source: Source) -> Start:
    """Where torch and its cuBLAS have them; else the call itself refuses."""
    if source.n % 128 or source.k % 128:
        raise Refused("_scaled_mm: n and k must be multiples of 128")
    blocks = source.weight.view(source.n // 128, 128, -1, 128).transpose(1, 2).reshape(-1, 128 * 128)
    codes, scale = quantise_rows(blocks, torch.float8_e4m3fn)
    codes = codes.view(source.n // 128, -1, 128, 128).transpose(1, 2).reshape(source.n, source.k)
    weights = [weight.t() for weight in _clones(codes, source)]
    scale_b = scale.view(source.n // 128, -1).t()

    def start(m: int) -> Run:
        (x, scale_a), out = quantise_blocks(source.activations(m), torch.float8_e4m3fn), source.out(m)
        options = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.bfloat16}
        calls = [partial(torch._scaled_mm, x, weight, **options, out=out) for weight in weights]
        return Run.writing(out, calls, source.bytes_of(m, source.n * source.k))

    return start


def _int8(source: Source) -> Start:
    if source.n % 8 or source.k % 8:
        raise Refused("_int_mm: n and k must be multiples of 8")
    codes, scale_b = quantise_rows(source.weight, torch.int8)
    weights = [weight.t() for weight in _clones(codes, source)]

    def start(m: int) -> Run:
        padded = max(m, 32)  # _int_mm takes more than 16 rows only
        x, scale = quantise_rows(source.activations(m), torch.int8)
        x = torch.nn.functional.pad(x, (0, 0, 0, padded - m))
        out = torch.empty(padded, source.n, dtype=torch.int32, device=source.device)
        return Run(
            calls=[partial(torch._int_mm, x, weight, out=out) for weight in weights],
            rows=lambda rows: out[rows].float() * scale[rows, None] * scale_b,
            bytes=1.0 * source.n * source.k + m * source.k + 4.0 * m * source.n,
            poison=lambda: out.fill_(-(2**31)),
            note=f"run with {padded} rows: _int_mm takes more than 16 only" if padded > m else "",
        )

    return start
