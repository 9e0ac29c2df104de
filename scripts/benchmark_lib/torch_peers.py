"""torch's own GEMMs as contestants: weights of 16 or 8 bits, what a model runs on when it is not 4-bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .contestant import WIDER, Contestant, Refused, Run
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


def _clones(tensor: torch.Tensor, source: Source, copies: int | None) -> list[torch.Tensor]:
    return [tensor] + [tensor.clone() for _ in range(source.copies(tensor.nbytes, copies) - 1)]


def _bf16(source: Source, copies: int | None) -> Callable[[int, int], Run]:
    weights = [weight.t() for weight in _clones(source.weight, source, copies)]

    def start(m: int, buffers: int) -> Run:
        xs = [source.activations(m, i) for i in range(buffers)]
        outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
        return Run(
            calls=[
                partial(torch.mm, xs[i % buffers], weight, out=outs[i % buffers]) for i, weight in enumerate(weights)
            ],
            rows=lambda rows: outs[0][rows].float(),
            bytes=2.0 * (source.n * source.k + m * source.k + m * source.n),
            poison=lambda: [out.fill_(torch.nan) for out in outs],
        )

    return start


def _fp8(by_row: bool, source: Source, copies: int | None) -> Callable[[int, int], Run]:
    if source.n % 16 or source.k % 16:
        raise Refused("_scaled_mm: n and k must be multiples of 16")
    if by_row:
        codes, scale = quantise_rows(source.weight, torch.float8_e4m3fn)
        scale_b = scale.view(1, -1)
    else:
        scale_b = (source.weight.abs().max().float() / 448.0).reshape(())
        codes = (source.weight.float() / scale_b).clamp_(-448, 448).to(torch.float8_e4m3fn)
    weights = [weight.t() for weight in _clones(codes, source, copies)]

    def start(m: int, buffers: int) -> Run:
        pairs = []
        for i in range(buffers):
            x = source.activations(m, i)
            if by_row:
                y, scale_a = quantise_rows(x, torch.float8_e4m3fn)
                pairs.append((y, scale_a.view(-1, 1)))
            else:
                scale_a = (x.abs().max().float() / 448.0).reshape(())
                pairs.append(((x.float() / scale_a).clamp_(-448, 448).to(torch.float8_e4m3fn), scale_a))
        outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
        # use_fast_accum: sums stay in the tensor cores, the faster setting and the one vLLM's scaled_mm runs with.
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls = [
            partial(
                torch._scaled_mm,
                pairs[i % buffers][0],
                weight,
                scale_a=pairs[i % buffers][1],
                scale_b=scale_b,
                **options,
                out=outs[i % buffers],
            )
            for i, weight in enumerate(weights)
        ]
        return Run(
            calls=calls,
            rows=lambda rows: outs[0][rows].float(),
            bytes=1.0 * source.n * source.k + m * source.k + 2.0 * m * source.n,
            poison=lambda: [out.fill_(torch.nan) for out in outs],
        )

    return start


def _fp8_blocks(source: Source, copies: int | None) -> Callable[[int, int], Run]:
    """Where torch and its cuBLAS have them; else the call itself refuses."""
    if source.n % 128 or source.k % 128:
        raise Refused("_scaled_mm: n and k must be multiples of 128")
    blocks = source.weight.view(source.n // 128, 128, -1, 128).transpose(1, 2).reshape(-1, 128 * 128)
    codes, scale = quantise_rows(blocks, torch.float8_e4m3fn)
    codes = codes.view(source.n // 128, -1, 128, 128).transpose(1, 2).reshape(source.n, source.k)
    weights = [weight.t() for weight in _clones(codes, source, copies)]
    scale_b = scale.view(source.n // 128, -1).t()

    def start(m: int, buffers: int) -> Run:
        pairs = [quantise_blocks(source.activations(m, i), torch.float8_e4m3fn) for i in range(buffers)]
        outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
        calls = [
            partial(
                torch._scaled_mm, pairs[i % buffers][0], weight, scale_a=pairs[i % buffers][1], scale_b=scale_b,
                out_dtype=torch.bfloat16, out=outs[i % buffers],
            )
            for i, weight in enumerate(weights)
        ]  # fmt: skip
        return Run(
            calls=calls,
            rows=lambda rows: outs[0][rows].float(),
            bytes=1.0 * source.n * source.k + m * source.k + 2.0 * m * source.n,
            poison=lambda: [out.fill_(torch.nan) for out in outs],
        )

    return start


def _int8(source: Source, copies: int | None) -> Callable[[int, int], Run]:
    if source.n % 8 or source.k % 8:
        raise Refused("_int_mm: n and k must be multiples of 8")
    codes, scale_b = quantise_rows(source.weight, torch.int8)
    weights = [weight.t() for weight in _clones(codes, source, copies)]

    def start(m: int, buffers: int) -> Run:
        padded = max(m, 32)  # _int_mm takes more than 16 rows only
        pairs = []
        for i in range(buffers):
            x, scale = quantise_rows(source.activations(m, i), torch.int8)
            pairs.append((torch.nn.functional.pad(x, (0, 0, 0, padded - m)), scale))
        outs = [torch.empty(padded, source.n, dtype=torch.int32, device=source.device) for _ in range(buffers)]
        return Run(
            calls=[
                partial(torch._int_mm, pairs[i % buffers][0], weight, out=outs[i % buffers])
                for i, weight in enumerate(weights)
            ],
            rows=lambda rows: outs[0][rows].float() * pairs[0][1][rows, None] * scale_b,
            bytes=1.0 * source.n * source.k + m * source.k + 4.0 * m * source.n,
            poison=lambda: [out.fill_(-(2**31)) for out in outs],
            note=f"run with {padded} rows: _int_mm takes more than 16 only" if padded > m else "",
        )

    return start
