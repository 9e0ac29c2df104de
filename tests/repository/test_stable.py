"""What docs/stability.md promises, against tests/repository/stable.json, which `python tests/repository/test_stable.py`
writes
for a release: a minor version may add to it, and take nothing from it."""

from __future__ import annotations

import hashlib
import inspect
import json
import pydoc
import re
from pathlib import Path

import pytest
import torch
import typer.main

import jitgemm
import jitgemm.nn
from jitgemm.cli.app import app

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = Path(__file__).with_name("stable.json")
OPTIONAL = "jitgemm.hf."
"""Names that need transformers."""


def found(name: str) -> object:
    """What a dotted name of docs/api.rst is."""
    value = pydoc.locate(name)
    assert value is not None, f"{name} is gone"
    return value


def parameters(value: object) -> dict[str, bool] | None:
    """{name: whether it may be left out}; None for what is not called."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
        return None
    empty = inspect.Parameter.empty
    return {
        each.name: each.default is not empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        for each in inspect.signature(value).parameters.values()
    }


def calls() -> dict[str, dict[str, bool] | None]:
    text = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
    names = re.findall(r":: (jitgemm[\w.]*)$", text, re.MULTILINE)
    return {name: parameters(found(name)) for name in names if not inspect.ismodule(found(name))}


def ops() -> dict[str, str]:
    every = torch._C._jit_get_all_schemas()
    return {each.name: str(each) for each in every if each.name.startswith("jitgemm::")}


def options(command=None, name: str = "jitgemm") -> dict[str, list[str]]:
    command = command or typer.main.get_command(app)
    of_this = {name: sorted(text for each in command.params for text in each.opts)}
    for child, each in getattr(command, "commands", {}).items():
        of_this |= options(each, f"{name} {child}")
    return of_this


def saved() -> dict[str, str]:
    """A digest of what `state_dict()` of a weight of each kind holds."""
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (64, 256), generator=draw, dtype=torch.int8)
    group, row = torch.rand(64, 2, generator=draw), torch.rand(64, 1, generator=draw)
    zero = torch.randint(0, 16, (64, 2), generator=draw, dtype=torch.int8)
    powers = torch.randint(120, 130, (64, 8), generator=draw, dtype=torch.uint8)
    order = torch.randperm(256, generator=draw)
    coarse = torch.ones(64, 2, dtype=torch.bfloat16) / 8  # whose corrections 16 bits hold
    floats = codes.to(torch.float8_e4m3fn)
    e2m1, near = (codes + 8).to(torch.uint8), torch.randint(56, 60, (64, 16), generator=draw, dtype=torch.uint8)
    far = torch.randint(8, 120, (64, 16), generator=draw, dtype=torch.uint8)
    pairs = e2m1[:, 0::2] | e2m1[:, 1::2] << 4
    pack, to_int8 = jitgemm.pack_w4, {"lhs_dtype": torch.int8}
    weights = {
        "groups": pack(codes, group.bfloat16(), group_size=128),
        "channel": pack(codes, row, group_size=256, **to_int8),
        "zero points": pack(codes + 8, group.half(), zero, group_size=128),
        "offsets": pack(codes, group, offset=group - 0.5, group_size=128),
        "for e4m3": pack(codes.clamp(min=-7), group.bfloat16(), group_size=128, lhs_dtype=torch.float8_e4m3fn),
        "corrected zero points": pack(codes + 8, coarse, zero, group_size=128, correction=True, **to_int8),
        "corrected offsets": pack(
            codes, coarse.half(), offset=coarse.half() / 3, group_size=128, correction=True, **to_int8
        ),
        "permuted": pack(codes, group.bfloat16(), permutation=order, group_size=128),
        "int8": jitgemm.pack_w8(codes, row),
        "e4m3": jitgemm.pack_w8(floats, row),
        "blocks": jitgemm.pack_w8(floats, group, group_size=128),
        "blocks of rows and columns": jitgemm.pack_w8(floats, group[:1].expand(64, 2), group_size=128),
        "mxfp4": jitgemm.pack_mxfp4(e2m1, powers),
        "mxfp4, a base for 128": jitgemm.pack_mxfp4(e2m1, powers + 16 * (torch.arange(8) // 4).byte()),
        "mxfp4, a scale for 32": jitgemm.pack_mxfp4(e2m1, powers + 16 * (torch.arange(8) % 2).byte()),
        "nvfp4, near": jitgemm.pack_nvfp4(pairs, near.view(torch.float8_e4m3fn), row[:1, 0]),
        "nvfp4, far": jitgemm.pack_nvfp4(pairs, far.view(torch.float8_e4m3fn), row[:1, 0]),
        "two levels": jitgemm.pack_w4_two_level(e2m1, torch.full((64, 2), 5).byte(), zero.byte(), row.half()),
    }
    weights["experts"] = jitgemm.W4Weight.stacked(2, lambda e: weights["groups"])
    digests = {}
    for name, weight in weights.items():
        state = weight.state_dict()
        parts = [(key, str(state[key].dtype), tuple(state[key].shape)) for key in sorted(state)]
        data = b"".join(state[key].contiguous().view(torch.uint8).numpy().tobytes() for key in sorted(state))
        digests[name] = hashlib.sha256(repr(parts).encode() + data).hexdigest()
    return digests


def record() -> dict[str, dict]:
    return {"calls": calls(), "ops": ops(), "options": options(), "saved": saved()}


STABLE = record() if __name__ == "__main__" else json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [each for each in STABLE["calls"] if not each.startswith(OPTIONAL)])
def test_calls_keep_their_names_and_arguments(name):
    before, now = STABLE["calls"][name], parameters(found(name))
    assert set(before or ()) <= set(now or ())
    assert all(optional for each, optional in (now or {}).items() if (before or {}).get(each, True))


def test_ops_keep_the_schemas_that_exported_programs_hold():
    assert {name: ops().get(name) for name in STABLE["ops"]} == STABLE["ops"]


def test_commands_keep_their_options():
    now = options()
    assert {name: sorted(set(each) - set(now.get(name, ()))) for name, each in STABLE["options"].items()} == {
        name: [] for name in STABLE["options"]
    }


def test_saved_weights_keep_their_bytes():
    assert saved() == STABLE["saved"]


if __name__ == "__main__":
    parts = (
        f'"{part}": {{\n' + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in held.items()) + "\n}"
        for part, held in STABLE.items()
    )
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
