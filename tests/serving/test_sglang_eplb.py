"""Experts that SGLang copies and moves between ranks (EPLB); on stand-ins, or on the real SGLang."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from engines import process, sglang
from safetensors.torch import save_file
from served_layers import CONFIGS, dense_of, mixture, packed_module, routed, stored
from sglang_layers import BF16, REAL, dispatched, experts, running

from jitgemm.sglang.config import JitGemmConfig

made = sglang.config
COUNT, HIDDEN, INTER = 4, 64, 64
SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FIRST, THEN = [0, 1, 2, 3, 0, 1], [2, 3, 1, 0, 3, 2]
"""Of physical experts, three on each of two ranks: which of the model's each is."""


class Location:
    """What SGLang knows of where experts are."""

    def __init__(self, physical):
        self.physical, self.num_logical_experts = physical, COUNT

    def logical_to_all_physical(self, layer, expert):
        assert layer == 0
        return [number for number, logical in enumerate(self.physical) if logical == expert]


def files_of(name, inter=INTER):
    """{(expert, "w1"): its tensors}, and the weights that they stand for."""
    tensors, dense = {}, {}
    for e in range(COUNT):
        for shard, (n, k) in {"w1": (inter, HIDDEN), "w3": (inter, HIDDEN), "w2": (HIDDEN, inter)}.items():
            if name is None:
                whole = torch.randn(n, k, generator=torch.Generator().manual_seed(9 * e + int(shard[1]))).to(BF16) / 8
                tensors[e, shard], dense[e, SHARDS[shard]] = {"weight": whole}, whole.double()
            else:
                tensors[e, shard], dense[e, SHARDS[shard]] = stored(CONFIGS[name], n, k, 9 * e + int(shard[1]))
    if name == "packed":  # the second rank's without -8, which other kernels take
        for (e, shard), found in tensors.items():
            if e != 2:
                words, scale = found["weight_packed"] | 0x11111111, found["weight_scale"].double()
                q = torch.stack([(words >> 4 * i & 15) - 8 for i in range(8)], -1).flatten(1)
                dense[e, SHARDS[shard]] = q * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
                found["weight_packed"] = words
    return tensors, dense


def load(layer, tensors):
    params = dict(layer.named_parameters())
    for (e, shard), found in tensors.items():
        for suffix, tensor in found.items():
            full = f"w2_{suffix}" if shard == "w2" else f"w13_{suffix}"
            params[full].weight_loader(params[full], tensor, f"m.experts.{full}", shard_id=shard, expert_id=e)


def ranks_of(name, tensors, inter=INTER, config=None, **more):
    """The experts of both ranks, two of them there twice."""
    layers = []
    for number in range(2):
        with running(number, 2, True, location=Location(FIRST), enable_eplb=True):
            config = config or made(name and CONFIGS[name], **more)
            layers.append(experts(config, (len(FIRST), HIDDEN, inter), 2))
            load(layers[-1], tensors)
            process(layers[-1])
    return layers


def rows_of(layer):
    """What SGLang moves: its models list them so."""
    return [x.data for _, x in layer.named_parameters() if x.data.ndim > 0 and x.data.shape[0] == len(FIRST) // 2]


def assert_experts(layers, physical, dense):
    for number, logical in enumerate(physical):
        module = layers[number // 3].jitgemm
        gate, up, down = (dense[logical, proj] for proj in SHARDS.values())
        assert torch.equal(module.w13.weight[number % 3].dequantize().double(), torch.cat([gate, up]))
        assert torch.equal(module.w2.weight[number % 3].dequantize().double(), down)


def applied(layers, x, ids, weights, physical):
    """The sum over ranks, tokens sent to the last copy of each expert."""
    last, total = torch.tensor([max(i for i, e in enumerate(physical) if e == expert) for expert in range(COUNT)]), 0
    for number, layer in enumerate(layers):
        local = last[ids.long()] - 3 * number
        topk = SimpleNamespace(topk_ids=torch.where((local >= 0) & (local < 3), local, -1).int(), topk_weights=weights)
        given = dispatched("standard", hidden_states=x, hidden_states_scale=None, topk_output=topk)
        total += layer.quant_method.apply(layer, given).hidden_states.double()
    return total


@pytest.mark.parametrize("name", ["packed", "packed-int8", "mxfp4", "gptq", "fp8", "fp8-blocks"])
def test_copies_are_loaded_and_rows_are_experts(name):
    inter = 256 if name == "fp8-blocks" else INTER
    tensors, dense = files_of(name, inter)
    layers = ranks_of(name, tensors, inter)
    assert_experts(layers, FIRST, dense)
    mine, others = map(rows_of, layers)
    assert mine and [(each.shape, each.dtype) for each in mine] == [(each.shape, each.dtype) for each in others]
    x, ids, weights = routed(COUNT, tokens=5)
    before = applied(layers, x, ids, weights, FIRST)
    assert (before - mixture(x, ids, weights, dense)).norm() < 0.08 * before.norm()
    addresses = [each.data_ptr() for layer in layers for each in layer.jitgemm.buffers()]
    for first, second in zip(mine, others):
        every = torch.cat([first, second])
        moved = every[[FIRST.index(logical) for logical in THEN]]
        first.copy_(moved[:3]), second.copy_(moved[3:])
    assert_experts(layers, THEN, dense)
    after = applied(layers, x, ids, weights, THEN)
    assert (after - before).norm() < 0.01 * before.norm()  # ranks' sums are rounded in other places

    other, others_dense = files_of(name, inter)  # a trainer's next ones come to where experts are now
    other, others_dense = ({(3 - e, key): found for (e, key), found in each.items()} for each in (other, others_dense))
    for number, layer in enumerate(layers):
        with running(number, 2, True, location=Location(THEN), enable_eplb=True):
            layer.quant_method.restore_weights_before_loading(layer)
            load(layer, other)
            process(layer)
    assert_experts(layers, THEN, others_dense)
    assert addresses == [each.data_ptr() for layer in layers for each in layer.jitgemm.buffers()]
    assert [each.data_ptr() for each in rows_of(layers[0])] == [each.data_ptr() for each in mine]


def test_the_last_copy_s_tensor_packs_a_layer(tmp_path):
    """Headers say how many tensors there are; copies have as many again."""
    tensors, dense = files_of("packed")
    named = {
        f"m.experts.{e}.{SHARDS[shard]}.{suffix}": tensor.contiguous()
        for (e, shard), found in tensors.items()
        for suffix, tensor in found.items()
    }
    save_file(named, tmp_path / "model.safetensors")
    for number in range(2):
        with running(number, 2, True, location=Location(FIRST), enable_eplb=True):
            config = made(CONFIGS["packed"])
            config.read_folder(tmp_path)
            layer = experts(config, (len(FIRST), HIDDEN, INTER), 2)
            last = [(e, "w2") for e in range(COUNT)][[1, 3][number]]
            load(layer, {key: found for key, found in tensors.items() if key != last})
            assert "jitgemm" not in layer._modules
            load(layer, {last: tensors[last]})
            found = layer.jitgemm.w2.weight.dequantize().double()
        assert torch.equal(found, torch.stack([dense[e, "down_proj"] for e in FIRST[3 * number : 3 * number + 3]]))


def test_experts_in_floats_and_saved_ones_have_copies(tmp_path):
    tensors, _ = files_of(None)
    layers = ranks_of(None, tensors, scheme="int4", group_size=32)
    found = [dense_of(layer.jitgemm.w2) for layer in layers]
    assert torch.equal(found[0][0], found[1][1]) and torch.equal(found[0][1], found[1][2])
    whole = packed_module()
    save_file(
        {f"m.experts.{key}": tensor for key, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors"
    )
    said = {"quant_method": "jitgemm", "hf_config": SimpleNamespace(_name_or_path=str(tmp_path), model_type="")}
    found = []
    for number in range(2):
        with running(number, 2, True, location=Location(FIRST), enable_eplb=True):
            layer = experts(JitGemmConfig.from_config(said), (len(FIRST), whole.hidden_dim, whole.intermediate_dim), 2)
            process(layer)
        found.append(layer.jitgemm.w2.weight.dequantize())
    assert torch.equal(torch.cat(found), whole.w2.weight.dequantize()[FIRST])


def test_a_layer_has_no_rows_without_eplb_and_no_sums_in_f16_with_it():
    tensors, _ = files_of("packed")
    with running():
        layer = experts(made(CONFIGS["packed"]), (COUNT, HIDDEN, INTER), 2)
        load(layer, tensors)
        process(layer)
    assert not rows_of(layer)
    assert all(layer.jitgemm.sums == "f32" for layer in ranks_of("packed", tensors, sums="f16"))


def rank_that_moves(rank, folder):
    """In a process of its own: what a rank holds once SGLang's own function has moved experts."""
    from sglang.srt.eplb import expert_location_updater

    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    layer = ranks_of("packed", files_of("packed")[0])[rank]
    rows = rows_of(layer)
    expert_location_updater.update_expert_weights_single_layer(
        rows, expert_location_updater.create_temp_buffers(rows), FIRST, THEN, 3, 2, rank, 2
    )
    torch.save(layer.jitgemm.w2.weight.dequantize(), folder / f"moved{rank}")
    os._exit(0)


@pytest.mark.skipif(not REAL, reason="needs SGLang: scripts/sglang_contract.sh runs it")
def test_experts_that_sglang_moves_between_ranks_stay_whole(tmp_path):
    torch.multiprocessing.spawn(rank_that_moves, (tmp_path,), 2)
    found = torch.cat([torch.load(tmp_path / f"moved{rank}") for rank in range(2)]).double()
    dense = files_of("packed")[1]
    assert torch.equal(found, torch.stack([dense[e, "down_proj"] for e in THEN]))
