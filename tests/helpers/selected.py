"""Problems that the selector is asked about, and what a legal choice is."""

from __future__ import annotations

from dataclasses import replace

import builders
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import Problem, WeightFormat, ceil_div
from jitgemm.kernel.spec import PRODUCER_REGISTERS, REGISTERS_PER_SM, KernelSpec, smem_bytes, wgmma_shapes
from jitgemm.select.devices import DEVICES, DeviceSpec, device_spec

SMALLER = [
    device_spec("h200,sms=66"),  # half a GPU
    device_spec("h200,sms=1"),
    device_spec("h20,sms=77"),
    device_spec("h100-pcie,sms=113"),
    device_spec("h100-sxm,sms=16"),
    device_spec("h200,smem=166912,smem_per_sm=167936"),
]
ALL_DEVICES = [*DEVICES.values(), *SMALLER]
FORMATS = [WeightFormat(*format) for format in builders.ALL_FORMATS]


def formats_of(lhs: str) -> list[WeightFormat]:
    """Every weight format that meets this type of activations: offsets and orders of codes too."""
    found = list(FORMATS)
    for format in FORMATS:
        if format.group_size:
            found.append(replace(format, offset=True))
        if not format.zero_point:
            found.append(replace(format, order=lhs))
            if format.group_size:
                found.append(replace(format, order=lhs, offset=True))
    return found


FORMATS_OF = {lhs: formats_of(lhs) for lhs in LHS_TYPES}
lhs_and_format = st.sampled_from(LHS_TYPES).flatmap(
    lambda lhs: st.sampled_from(FORMATS_OF[lhs]).map(lambda format: {"lhs": lhs, "format": format})
)
relaxed = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
devices = st.sampled_from(ALL_DEVICES)
tokens = st.one_of(st.integers(1, 300), st.integers(1, 20000), st.integers(1, 1 << 20))
experts = st.one_of(st.integers(1, 1024), st.sampled_from([1, 2, 8, 64, 65, 128, 256, 257, 512, 1024]))
rows = st.one_of(st.integers(1, 300), st.integers(1, 1 << 17))
"""Of all experts."""


def _problems(m: st.SearchStrategy, **of_experts: st.SearchStrategy) -> st.SearchStrategy[Problem]:
    return st.builds(
        lambda m, n, k, formats, options: Problem(m=m, n=n, k=k, **formats, **options),
        m=m,
        n=st.one_of(st.integers(1, 64), st.integers(1, 20000)).map(lambda i: 8 * i),
        k=st.one_of(st.integers(1, 32), st.integers(1, 2000)).map(lambda i: 32 * i),
        formats=lhs_and_format,
        options=st.fixed_dictionaries(
            {"out": st.sampled_from(REAL_TYPES), "batch_invariant": st.booleans(), **of_experts}
        ),
    )


problems = _problems(tokens)
grouped = _problems(rows, experts=experts, rows_vary=st.booleans())
either = st.one_of(problems, grouped)


def assert_legal(spec: KernelSpec, device: DeviceSpec) -> None:
    """The limits of the hardware, written out apart from the selector's own rules."""
    # Tile and wgmma shape.
    assert spec.block_n % 64 == 0 and 1 <= spec.warpgroups <= 4 and spec.threads <= 1024
    assert spec.token_halves in (1, 2) and spec.block_m // spec.token_halves in wgmma_shapes(spec.lhs)
    # Shared memory: of one CTA, and of all that are to share an SM (each costs 1 KiB of the system's).
    assert spec.stages >= 2
    assert smem_bytes(spec) <= device.smem_per_block
    assert spec.ctas_per_sm * (smem_bytes(spec) + 1024) <= device.smem_per_sm
    # Registers: what launch bounds leave at entry, and what setmaxnreg makes of them.
    allocated = ceil_div(spec.entry_registers, 8) * 8
    assert spec.entry_registers <= 255 and spec.ctas_per_sm * spec.threads * allocated <= REGISTERS_PER_SM
    if spec.warpgroups > 1:
        assert spec.entry_registers % 8 == 0 == spec.consumer_registers % 8 and 24 <= spec.consumer_registers <= 256
        left = spec.threads * spec.entry_registers - 128 * spec.warpgroups * spec.consumer_registers
        assert PRODUCER_REGISTERS * 128 <= left
    assert spec.block_m // 2 < spec.consumer_registers  # the accumulators alone
    # Clusters.
    assert spec.cluster_size in (1, 2, 3, 4, 5, 6) and (spec.multicast_lhs == 1 or spec.split_k == 1)


def order_of(spec: KernelSpec) -> tuple[int, int, str]:
    """What of a kernel decides in which order k is summed."""
    return spec.split_k, spec.warpgroups_k, spec.sums
