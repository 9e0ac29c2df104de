"""Checkpoints that other libraries read: bitsandbytes, HQQ, GGUF. Each raises by its name, before data is read."""

from __future__ import annotations

import checkpoints
import pytest
import torch

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn import load_


def four_bits(n: int, k: int) -> dict[str, torch.Tensor]:
    state = torch.zeros(80, dtype=torch.uint8)
    return {
        "weight": torch.zeros(n * k // 2, 1, dtype=torch.uint8), "weight.absmax": torch.rand(n * k // 64),
        "weight.quant_map": torch.rand(16), "weight.quant_state.bitsandbytes__nf4": state,
    }  # fmt: skip


def eight_bits(n: int, k: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(n, k, dtype=torch.int8), "SCB": torch.rand(n)}


def hqq(n: int, k: int) -> dict[str, torch.Tensor]:
    return {"W_q": torch.zeros(n, k // 2, dtype=torch.uint8), "scale": torch.rand(n, 1), "zero": torch.rand(n, 1)}


FILES = {
    "bitsandbytes, 4 bits": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "is bitsandbytes'"),
    "bitsandbytes, 8 bits": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "is bitsandbytes'"),
    "bitsandbytes without a config": (eight_bits, None, "is bitsandbytes'"),
    "HQQ": (hqq, {"quant_method": "hqq"}, "is HQQ's"),
    "GGUF, as transformers calls it": (four_bits, {"quant_method": "gguf"}, "is GGUF's"),
}


@pytest.mark.parametrize("file", FILES)
def test_what_is_not_read_raises_by_name_before_its_data_are_read(tmp_path, monkeypatch, file):
    make, config, message = FILES[file]
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    before = model[0].weight.detach().clone()
    folder = checkpoints.save(tmp_path, {f"0.{name}": tensor for name, tensor in make(32, 64).items()}, config)

    def read(*_, **__):
        raise AssertionError("data were read")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(ValueError, match=message):
        load_(model, folder)
    assert torch.equal(model[0].weight, before)
