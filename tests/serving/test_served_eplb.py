"""Experts that engines copy and move between ranks (EPLB): vLLM names copies' own numbers to loaders, SGLang the model's."""

from __future__ import annotations

import os

import pytest
import sglang_layers
import torch
from engines import ENGINES, EXPERTS, SPLITS, each_engine, load_experts, process, sglang
from served_layers import BF16, CONFIGS, SHARDS, dense_of, expert_tensors, mixture, packed_module, routed, without_least

SIZES = 4, 64, 64
FIRST, THEN = [0, 1, 2, 3, 0, 1], [2, 3, 1, 0, 3, 2]
"""Of physical experts, three on each of two ranks: which of the model's each is."""
LAST = torch.tensor([[5 - physical[::-1].index(e) for e in range(4)] for physical in (FIRST, THEN)])
"""At either time: each expert's last copy."""


def files_of(name, inter=64):
    tensors, dense = expert_tensors(CONFIGS[name], 4, 64, inter)
    for key in tensors if name == "packed" else ():
        if key[0] != 2:  # the second rank's
            tensors[key], dense[key] = without_least(tensors[key])
    return tensors, dense


def ranks_of(engine, config, tensors, sizes=SIZES, **more):
    return [engine.moving(config, sizes, tensors, at, FIRST, **more) for at in SPLITS["ep"]]


def assert_experts(layers, physical, dense):
    for number, logical in enumerate(physical):
        module = layers[number // 3].jitgemm
        gate, up, down = (dense[logical, proj] for proj in SHARDS)
        assert torch.equal(module.w13.weight[number % 3].dequantize().double(), torch.cat([gate, up]))
        assert torch.equal(module.w2.weight[number % 3].dequantize().double(), down)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("name", ["packed", "packed-channel", "packed-int8", "mxfp4", "gptq", "fp8", "fp8-blocks"])
def test_copies_are_loaded_and_rows_are_experts(engine, name):
    inter = 256 if name == "fp8-blocks" else 64
    tensors, dense = files_of(name, inter)
    layers = ranks_of(engine, CONFIGS[name], tensors, (4, 64, inter))
    assert_experts(layers, FIRST, dense)
    mine, others = map(engine.rows, layers)
    assert mine and [(each.shape, each.dtype) for each in mine] == [(each.shape, each.dtype) for each in others]
    (x, ids, weights), addresses = routed(4, tokens=5), [[each.data_ptr() for each in mine + others]]
    sums = [sum(engine.run_experts(layer, x, LAST[0][ids.long()].int(), weights).double() for layer in layers)]
    for first, second in zip(mine, others):
        moved = torch.cat([first, second])[[FIRST.index(logical) for logical in THEN]]
        first.copy_(moved[:3]), second.copy_(moved[3:])
    assert_experts(layers, THEN, dense)
    sums += [sum(engine.run_experts(layer, x, LAST[1][ids.long()].int(), weights).double() for layer in layers)]
    expected = mixture(x, ids, weights, dense)
    assert (sums[0] - expected).norm() < 0.08 * expected.norm()
    assert (sums[1] - sums[0]).norm() < 0.01 * sums[0].norm()  # ranks' sums are rounded in other places
    if engine is sglang:  # a trainer's next ones come to where experts are now
        other, dense = ({(3 - e, proj): each for (e, proj), each in found.items()} for found in (tensors, dense))
        for (_, *place), layer in zip(SPLITS["ep"], layers):
            with sglang_layers.running(*place, True, location=sglang_layers.Location(THEN), enable_eplb=True):
                layer.quant_method.restore_weights_before_loading(layer)
                load_experts(layer, EXPERTS, other)
                process(layer)
        assert_experts(layers, THEN, dense)
    addresses.append([each.data_ptr() for layer in layers for each in engine.rows(layer)])
    assert addresses[0] == addresses[1]


@each_engine
def test_the_last_copys_tensor_packs_a_layer(engine):
    """Headers say how many tensors there are; copies have as many again."""
    tensors, dense = files_of("packed")
    config = engine.told(CONFIGS["packed"], {f"{EXPERTS}.{e}.{proj}": each for (e, proj), each in tensors.items()})
    for number, at in enumerate(SPLITS["ep"]):

        def fill(layer, number=number):
            every, last = engine.numbered(tensors, FIRST), ((1, 3)[number], "down_proj")
            load_experts(layer, EXPERTS, {key: found for key, found in every.items() if key != last})
            assert "jitgemm" not in layer._modules
            load_experts(layer, EXPERTS, {last: every[last]})

        found = engine.moving(config, SIZES, fill, at, FIRST, packed=False).jitgemm.w2.weight.dequantize().double()
        assert torch.equal(found, torch.stack([dense[e, "down_proj"] for e in FIRST[3 * number : 3 * number + 3]]))


@each_engine
def test_experts_in_floats_and_saved_ones_have_copies(tmp_path, engine):
    tensors = {(e, proj): {"weight": torch.randn(64, 64, dtype=BF16) / 8} for e in range(4) for proj in SHARDS}
    layers = ranks_of(engine, engine.config(None, scheme="int4", group_size=32), tensors)
    found = [dense_of(layer.jitgemm.w2) for layer in layers]
    assert torch.equal(found[0][0], found[1][1]) and torch.equal(found[0][1], found[1][2])
    whole = packed_module()
    layers = ranks_of(engine, engine.of_folder(tmp_path, {EXPERTS: whole}), {}, (4, 128, 384), **engine.biased)
    assert torch.equal(torch.cat([dense_of(layer.jitgemm.w2) for layer in layers]), dense_of(whole.w2)[FIRST])


@each_engine
def test_experts_that_move_are_added_up_in_fp32(engine):
    tensors, _ = files_of("packed")
    assert all(
        each.jitgemm.sums == "f32" for each in ranks_of(engine, engine.config(CONFIGS["packed"], sums="f16"), tensors)
    )
    if engine is sglang:
        assert not engine.rows(engine.experts(CONFIGS["packed"], SIZES, tensors), 4)  # without EPLB
    else:
        assert engine.experts(CONFIGS["packed"], SIZES, tensors).quant_method.supports_eplb


def rank_that_moves(rank, folder):
    """In a process of its own: what a rank holds once SGLang's own function has moved experts."""
    from sglang.srt.eplb import expert_location_updater

    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    layer = ranks_of(sglang, CONFIGS["packed"], files_of("packed")[0])[rank]
    rows = sglang.rows(layer)
    expert_location_updater.update_expert_weights_single_layer(
        rows, expert_location_updater.create_temp_buffers(rows), FIRST, THEN, 3, 2, rank, 2
    )
    torch.save(layer.jitgemm.w2.weight.dequantize(), folder / f"moved{rank}")
    os._exit(0)


@pytest.mark.skipif(not sglang_layers.REAL, reason="needs SGLang: scripts/sglang_contract.sh runs it")
def test_experts_that_sglang_moves_between_ranks_stay_whole(tmp_path):
    torch.multiprocessing.spawn(rank_that_moves, (tmp_path,), 2)
    found = torch.cat([torch.load(tmp_path / f"moved{rank}") for rank in range(2)]).double()
    assert torch.equal(found, torch.stack([files_of("packed")[1][e, "down_proj"] for e in THEN]))
