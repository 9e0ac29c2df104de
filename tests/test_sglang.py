"""The sample of docs/sglang.md: on SGLang's own Python where it can be imported, else on stand-ins of what it calls."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from checkpoints import dequantized, words

REAL = importlib.util.find_spec("sglang") is not None
PAGE = Path(__file__).resolve().parent.parent / "docs" / "sglang.md"
BF16 = torch.bfloat16


class Parameter(torch.nn.Parameter):
    """As vLLM's and SGLang's parameter classes: cut by rank, and joined, along output_dim or input_dim."""

    def __new__(cls, data, **_):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, weight_loader, output_dim=None, input_dim=None, packed_dim=None, packed_factor=1):
        self.weight_loader, self.output_dim, self.input_dim = weight_loader, output_dim, input_dim


def standins() -> dict[str, ModuleType]:
    hooks, choices = [], []
    linear = SimpleNamespace(LinearBase=type("LinearBase", (torch.nn.Module,), {}), WEIGHT_LOADER_V2_SUPPORTED=[])
    kinds = ("PackedvLLMParameter", "GroupQuantScaleParameter", "ChannelQuantScaleParameter", "BasevLLMParameter")
    modules = {
        "arg_groups.choices": {"add_quantization_method_choices": choices.extend, "QUANTIZATION_CHOICES": choices},
        "layers": {"linear": linear, "parameter": SimpleNamespace(**{kind: Parameter for kind in kinds})},
        "layers.quantization": {"QUANTIZATION_METHODS": {}},
        "layers.quantization.base_config": {
            "LinearMethodBase": object, "QuantizationConfig": type("QuantizationConfig", (), {}),
        },
        "layers.quantization.unquant": {"UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {})},
        "plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda *given: hooks.append(given), _hooks=hooks),
            "HookType": SimpleNamespace(AFTER="after"),
        },
    }  # fmt: skip
    made = {}
    for name, members in ({"": {}} | modules).items():
        path = "sglang.srt" + ("." + name if name else "")
        for depth in range(1, path.count(".") + 2):
            made.setdefault(".".join(path.split(".")[:depth]), ModuleType(path))
        vars(made[path]).update(members)
    for module in made.values():
        module.__path__ = []
    return made


@pytest.fixture
def sample(monkeypatch):
    """The names of the sample, registered."""
    if not REAL:
        for name, module in standins().items():
            monkeypatch.setitem(sys.modules, name, module)
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    names = {"__name__": "jitgemm_sglang"}
    exec(compile(text, str(PAGE), "exec"), names)
    names["register"]()
    return SimpleNamespace(**names)


def checkpoint(size):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group" if size else "channel"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": size}, "input_activations": None}
    found = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return found | {"ignore": ["lm_head"], "packed_modules_mapping": {"gate_up_proj": ["gate_proj", "up_proj"]}}


def stored(n, k, size):
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, k // (size or k)) + 0.5).to(BF16) / 64
    tensors = {"weight_packed": words(q.long() + 8, 1), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return tensors, dequantized(q, scale, None)


def linear_of(sample, config, prefix, k, width, rank):
    """gate and up joined, of a rank of two, or one row-parallel layer (width a number): made and loaded."""
    base = sample.linear.LinearBase
    layer = base.__new__(base)
    torch.nn.Module.__init__(layer)
    method = config.get_quant_method(layer, prefix)
    joined = prefix.endswith("gate_up_proj")
    widths, mine = ([width // 2] * 2, k) if joined else ([width], k // 2)
    method.create_weights(layer, mine, widths, k, width * (1 + joined), BF16, weight_loader=None)
    dense = []
    for part in range(len(widths)):
        tensors, whole = stored(width, k, method.size)
        for suffix, param in dict(layer.named_parameters()).items():
            out, into, tensor = getattr(param, "output_dim", None), getattr(param, "input_dim", None), tensors[suffix]
            target, dim = param.data, out if joined else into
            if joined and out is not None:
                target = target.narrow(0, part * widths[part], widths[part])
            if dim is not None:
                tensor = tensor.chunk(2, dim)[rank]
            target.copy_(tensor)
        dense.append(whole.chunk(2, 0 if joined else 1)[rank])
    method.process_weights_after_loading(layer)
    return layer, method, torch.cat(dense)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [32, None])
@pytest.mark.parametrize("prefix", ["m.gate_up_proj", "m.down_proj"])
def test_a_rank_s_linear_holds_its_part_and_multiplies_by_it(sample, prefix, size, rank):
    torch.manual_seed(1)
    config = sample.JitGemmConfig.from_config(checkpoint(size))
    layer, method, dense = linear_of(sample, config, prefix, 128, 64, rank)
    assert torch.equal(layer.jitgemm.weight.dequantize().double(), dense) and not list(layer.parameters())
    x, bias = torch.randn(3, dense.shape[1], dtype=BF16), torch.randn(dense.shape[0], dtype=BF16)
    wanted = x.double() @ dense.T + bias.double()
    assert (method.apply(layer, x, bias).double() - wanted).norm() < 0.05 * wanted.norm()


def test_the_sample_is_registered_and_leaves_out_what_the_checkpoint_does(sample):
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES

    assert sample.QUANTIZATION_METHODS["jitgemm"] is sample.JitGemmConfig and "jitgemm" in QUANTIZATION_CHOICES
    take = sample.JitGemmConfig.override_quantization_method
    assert [take({}, user) for user in ("jitgemm", "fp8", None)] == ["jitgemm", None, None]
    config = sample.JitGemmConfig.from_config(checkpoint(32))
    layer = sample.linear.LinearBase.__new__(sample.linear.LinearBase)
    assert isinstance(config.get_quant_method(layer, "lm_head"), sample.UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Module(), "m.experts") is None
    assert any("load_model" in str(hook) for hook in sample.HookRegistry._hooks)
