import sys
from pathlib import Path

import builders
import pytest
import torch
from emulator import launch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import chain_lib
import jitgemm
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.spec import KernelSpec

F = "e4m3fast-g128-bf16-"


def problem(m, n, k):
    parts = builders.weight_parts(1, n, k, 128, codes="e4m3")
    rows = chain_lib.interleaved(n)
    woven = builders.WeightParts(parts.q[rows], parts.scale[rows], None, 128, lhs_dtype=torch.float8_e4m3fn)
    return builders.lhs(1, m, k, "e4m3"), parts.packed, woven.packed


@pytest.mark.parametrize(
    ("label", "m", "n", "k"),
    [("m8n256-s12", 5, 512, 256), ("m16n256-s11", 16, 768, 256), ("m16n256-s11", 11, 288, 256),
     ("m192n128-s5", 200, 256, 256), ("m176n128-s5", 150, 160, 256), ("m16n64-k2x2s-s8-c2", 16, 128, 512), ("m8n64-k2x2-s10-c2", 5, 128, 512)],
)
def test_gate(monkeypatch, label, m, n, k):
    emulator = launch.emulate(monkeypatch)
    real = emulator.launch
    extras = []

    def spy(*args):
        emulator.memory = emulator.memory + [launch.extent(each) for each in extras]
        return real(*args)

    monkeypatch.setattr(launch.driver.cu, "cuLaunchKernelEx", spy)
    lhs, plain, woven = problem(m, n, k)
    spec = KernelSpec.from_label(F + label)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    g = Gemm(*lhs, None, plain, out)
    GemmLaunch(g, spec).launch(g)
    y = torch.full((m, n // 2), 7.0, dtype=torch.bfloat16)
    chain_lib.swiglu(lhs, woven, y, spec)()
    gate, up = out.float().chunk(2, 1)
    assert torch.allclose(y.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-3)
    # Bit for bit: the quantiser's kernel with a scale of 1 has y's codes to within rounding to bf16, e4m3 being coarser.
    a, sa = jitgemm.quantize_activations(out, dtype=torch.float8_e4m3fn, silu_mul=True)
    b, sb = jitgemm.quantize_activations(y, dtype=torch.float8_e4m3fn)
    assert torch.equal(sa.bfloat16().float() / 1, sb.bfloat16().float()) or (sa / sb - 1).abs().max() < 2**-8
    assert (a.float() - b.float()).abs().max() <= 32 and (a.float() != b.float()).float().mean() < 0.1
    if "n256" in label and n % 256 == 0:
        q, s = jitgemm.quantize_activations(out, dtype=torch.float8_e4m3fn, silu_mul=True, scheme="block")
        q2, s2 = torch.zeros_like(q), torch.zeros(m, n // 256)
        extras += [q2, s2]
        chain_lib.swiglu_block(lhs, woven, q2, s2, spec)()
        assert torch.equal(s, s2)
        assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8))
