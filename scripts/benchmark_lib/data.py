"""The weights and the activations that everybody in a cell is given, in 16 bits, and how they are quantised.

Normal random numbers by seed: data decides how much power a large GEMM draws, so all contestants get the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitgemm.gemm.problem import pack_e8m0

from .cells import COPY_BYTES, Cell, Experts, GroupedCell

ROWS = 48
"""Rows of a result that are compared."""
DISTINCT = 16
"""Experts that differ; the others' weights are copies of theirs, at addresses of their own."""
GROUPED_BYTES = 100e6
"""Copies of a grouped weight together are at least this large: each routing reads another part of it."""


def some_rows(m: int) -> torch.Tensor:
    """The first row, the last, and some between, `ROWS` at most."""
    if m <= ROWS:
        return torch.arange(m)
    inner = torch.randperm(m - 2, generator=torch.Generator().manual_seed(m))[: ROWS - 2] + 1
    return torch.cat([torch.tensor([0, m - 1]), inner]).sort().values


class Source:
    """One layer's weight [n, k] in bf16, and activations [m, k] for any m, on the current GPU (tests: the CPU)."""

    def __init__(self, n: int, k: int, device: str = "cuda", seed: int = 0):
        self.n, self.k, self.device = n, k, device
        generator = torch.Generator(device).manual_seed(seed)
        self.weight = (
            torch.randn(n, k, generator=generator, device=device, dtype=torch.float32).mul_(k**-0.5).to(torch.bfloat16)
        )
        self._activations: dict[int, torch.Tensor] = {}

    def activations(self, m: int) -> torch.Tensor:
        """bf16 [m, k], mean a little above 0."""
        if m not in self._activations:
            generator = torch.Generator(self.device).manual_seed(1000 + m)
            x = torch.randn(m, self.k, generator=generator, device=self.device) + 0.1
            if len(self._activations) >= 8:
                self._activations.clear()
            self._activations[m] = x.to(torch.bfloat16)
        return self._activations[m]

    def out(self, m: int) -> torch.Tensor:
        return torch.empty(m, self.n, dtype=torch.bfloat16, device=self.device)

    def bytes_of(self, m: int, weight_bytes: float) -> float:
        """`Cell.bytes_of` a call."""
        return Cell(self.n, self.k, m).bytes_of(weight_bytes)

    def checked(self, m: int, calls: int) -> list[int]:
        """Calls whose results are compared, the last at the end."""
        return sorted({0, calls - 1})

    def sample(self, m: int, call: int) -> torch.Tensor:
        """Rows of the result to compare, alike for each of a run's calls."""
        return some_rows(m).to(self.device)

    def plain(self, m: int, rows: torch.Tensor, call: int) -> torch.Tensor:
        """The unquantised product in these rows."""
        return self.activations(m).view(m, -1)[rows].float() @ self.weight.float().T

    def copies(self, weight_bytes: float) -> int:
        """Copies of a weight that together do not stay in the L2; at least 2."""
        return max(2, int(COPY_BYTES / weight_bytes) + 1)


def offsets_of(cell: GroupedCell, device: str) -> list[torch.Tensor]:
    """Where each weight's rows start, and the last one's end: int32 [experts + 1] for each routing."""
    ends = torch.tensor(cell.loads, device=device).cumsum(1)
    return list(torch.nn.functional.pad(ends, (1, 0)).int())


class GroupedSource:
    """The weights of a layer's experts, activations of all of them, and the routings that tell which rows meet which.

    The calls of a contestant's run go through the routings one by one.
    """

    def __init__(self, n: int, k: int, experts: Experts, device: str = "cuda"):
        self.n, self.k, self.experts, self.device = n, k, experts, device
        self.distinct = [Source(n, k, device, seed) for seed in range(min(experts.count, DISTINCT))]

    def expert(self, index: int) -> Source:
        return self.distinct[index % len(self.distinct)]

    def cell(self, tokens: int) -> GroupedCell:
        return GroupedCell(self.n, self.k, tokens, "", self.experts)

    def activations(self, tokens: int) -> torch.Tensor:
        """bf16 [rows, k], rows for the routing that has the most of them."""
        return self.expert(0).activations(self.cell(tokens).most_rows)

    def offsets(self, tokens: int) -> list[torch.Tensor]:
        """int32 [experts + 1] for each routing."""
        return offsets_of(self.cell(tokens), self.device)

    def by_expert(self, tokens: int, rows: torch.Tensor, call: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Experts, and which of the rows are theirs."""
        owner = torch.searchsorted(self.offsets(tokens)[call], rows.to(torch.int32), right=True) - 1
        for index in owner.unique().tolist():
            yield index, owner == index

    def checked(self, tokens: int, calls: int) -> list[int]:
        """That of the routing that has the most rows, and the last."""
        rows = [sum(load) for load in self.cell(tokens).loads]
        return sorted({rows.index(max(rows)), calls - 1})

    def sample(self, tokens: int, call: int) -> torch.Tensor:
        """Rows of the expert that has the most of them in this call's routing, and of the last that has some."""
        load = self.cell(tokens).loads[call]
        having = [index for index, count in enumerate(load) if count] or [0]
        picked = {max(having, key=load.__getitem__), having[-1]}
        return torch.cat([sum(load[:index]) + some_rows(load[index]) for index in sorted(picked)]).to(self.device)

    def plain(self, tokens: int, rows: torch.Tensor, call: int) -> torch.Tensor:
        x = self.activations(tokens)[rows].float()
        found = x.new_empty(len(rows), self.n)
        for index, mine in self.by_expert(tokens, rows, call):
            found[mine] = x[mine] @ self.expert(index).weight.float().T
        return found

    def out(self, tokens: int) -> torch.Tensor:
        return self.expert(0).out(self.cell(tokens).most_rows)

    def bytes_of(self, tokens: int, weight_bytes: float) -> float:
        return self.cell(tokens).bytes_of(weight_bytes)

    def copies(self, weight_bytes: float) -> int:
        return int(GROUPED_BYTES / weight_bytes) + 1


def source_of(cell: Cell) -> Source | GroupedSource:
    """The data of all cells that share this one's weight."""
    return GroupedSource(cell.n, cell.k, cell.experts) if isinstance(cell, GroupedCell) else Source(cell.n, cell.k)


def quantise_rows(x: torch.Tensor, dtype: torch.dtype, powers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row, with `powers` the next power of two: x / scale in e4m3 or int8, and scale fp32 [rows]."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (x.abs().amax(1).float() / largest).clamp_(min=1e-12)
    scale = scale.log2().ceil().exp2() if powers else scale
    y = x.float() / scale[:, None]
    return (y.round_().clamp_(-127, 127) if dtype == torch.int8 else y.clamp_(-448, 448)).to(dtype), scale


def quantise_blocks(x: torch.Tensor, dtype: torch.dtype, powers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row and 128 columns: x / scale, and scale fp32 [rows, ceil(columns / 128)], column-major."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % 128)).reshape(-1, 128)
    y, scale = quantise_rows(padded, dtype, powers)
    return y.view(rows, -1)[:, :columns].contiguous(), scale.view(rows, -1).T.contiguous().T


def quantise_e8m0(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with powers of two as DeepGEMM packs them: int32 [rows, ceil(columns / 512)], column-major, a column
    rounded up to 4 rows."""
    y, scale = quantise_blocks(x, dtype, powers=True)
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    packed = pack_e8m0(exponents.view(torch.float8_e8m0fnu))
    rows = len(packed)
    columns = torch.nn.functional.pad(packed, (0, 0, 0, -rows % 4)).T.contiguous()
    return y, columns.T[:rows]


def quantise_groups(
    weight: torch.Tensor, group_size: int, zero_point: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """4-bit codes [n, k], bf16 scales and zero points or None [n, groups]; group_size 0 is one group a row."""
    n, k = weight.shape
    group_size = group_size or k
    grouped = torch.nn.functional.pad(weight.float(), (0, -k % group_size)).view(n, -1, group_size)
    if zero_point:
        low, high = grouped.amin(2), grouped.amax(2)
        scale = ((high - low) / 15).clamp_(min=1e-12).to(torch.bfloat16)
        zero = (-low / scale.float()).round_().clamp_(0, 15)
        q = (grouped / scale.float()[:, :, None]).add_(zero[:, :, None]).round_().clamp_(0, 15)
        return q.to(torch.uint8).view(n, -1)[:, :k].contiguous(), scale, zero.to(torch.uint8)
    scale = (grouped.abs().amax(2) / 7).clamp_(min=1e-12).to(torch.bfloat16)
    q = (grouped / scale.float()[:, :, None]).round_().clamp_(-8, 7)
    return q.to(torch.int8).view(n, -1)[:, :k].contiguous(), scale, None


def quantise_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4's codes, two a byte, scales and the tensor's scale: the nearest codes beside max |w| / 6 of each 16."""
    grouped = weight.float().unflatten(1, (-1, 16))
    largest = grouped.abs().amax(-1)
    whole = (largest.max() / (6 * 448)).clamp(min=1e-12).view(1)
    scales = (largest / (6 * whole)).clamp(max=448).to(torch.float8_e4m3fn)
    steps = grouped / (scales.float() * whole).clamp(min=1e-30)[..., None]
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = (torch.bucketize(steps.abs().contiguous(), halfway) + 8 * steps.signbit()).to(torch.uint8).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, whole
