"""The same bits on 1, 2, 4 and 8 ranks: eight processes with gloo on the CPU, in meshes of 2, 4 and 8."""

from __future__ import annotations

import copy
import functools
import itertools

import builders
import pytest
import ranks
import torch
from emulator.launch import emulate
from invariant_layers import (
    CASES,
    KINDS,
    K,
    Model,
    corrected,
    generated,
    layer_in,
    model_of,
    on_one,
    plan_of,
)
from marks import emulated
from parallel_layers import LAYERS, layer_of_experts, of_rank, permuted, x_of
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import jitgemm.nn
from jitgemm.nn.layers import invariant, invariant_experts
from jitgemm.nn.layers.shard_weight import Cut
from jitgemm.nn.layers.sharding import EngineSharding
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from jitgemm.nn.parallel.plan import ShardingPlan
from jitgemm.nn.warm import warm
from jitgemm.runtime.loaded import KernelFamily

WORLDS = (2, 4, 8)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks"), world=8) as run:
        yield run


@functools.lru_cache
def mesh_of(world: int):
    """One of so many ranks around this one."""
    return init_device_mesh("cpu", (8 // world, world), mesh_dim_names=("dp", "tp"))["tp"]


# ---- what runs on every rank -----------------------------------------------------------------------------------------


def same_bits_of(mesh, name: str) -> list[str]:
    layer, wrong = CASES[name](), []
    for world in WORLDS:
        mesh = mesh_of(world)
        divided = parallelize_module(copy.deepcopy(layer), mesh, RowwiseParallel(tp_invariant=True))
        for rows, gathered in ((1, invariant.GATHERED_BYTES), (5, invariant.GATHERED_BYTES), (13, 0)):
            x = x_of(layer, torch.bfloat16, rows)
            invariant.GATHERED_BYTES = gathered
            out = divided(x.chunk(world, -1)[mesh.get_local_rank()])
            invariant.GATHERED_BYTES = 2 << 20
            if not builders.same_bits(out, on_one(layer, x)):
                wrong.append(f"{world} ranks, {rows} rows")
    return wrong


def sums_that_an_engine_brings_together_are_the_same(mesh, name: str) -> None:
    """As engines have it, whose sum over the ranks has other layers' parts in it."""
    layer, rank = CASES[name](), mesh_of(4).get_local_rank()
    divided = parallelize_module(copy.deepcopy(layer), mesh_of(4), RowwiseParallel(tp_invariant=True))
    divided.split = EngineSharding(mesh_of(4).get_group(), rank, 4)
    for rows in (1, 5):
        x = x_of(layer, torch.bfloat16, rows)
        out, expected = invariant.multiply_invariantly(divided, x.chunk(4, -1)[rank].contiguous()), on_one(layer, x)
        own = slice(rank * -(-rows // 4), (rank + 1) * -(-rows // 4))
        assert builders.same_bits(out[own], expected[own])
        assert builders.same_bits(out.index_fill(0, torch.arange(rows)[own], -0.0), torch.full_like(out, -0.0))
        divided.split.sum(out)
        assert builders.same_bits(out, expected)


def experts_of(mesh, name: str) -> list[str]:
    torch._dynamo.reset()  # a process compiles a function for eight layers at most
    whole, wrong = layer_of_experts(name), []
    whole.batch_invariant = True
    for world in (1, 2, 4):
        mesh = mesh_of(world)
        divided = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(tp_invariant=True))
        assert divided.num_experts == 4 // world
        for tokens, band in ((9, 64 << 20), (13, 1)):  # a token at a time, too
            given = of_rank(3, tokens, torch.bfloat16)
            invariant_experts.BAND_BYTES, expected = band, whole(*given)
            outs = {"": divided(*given)}
            if world == 4 and tokens == 9 and name == "e4m3":
                outs["compiled"] = torch.compile(divided, backend="aot_eager", fullgraph=True)(*given)
            if world > 1:
                split, divided.split = divided.split, EngineSharding(mesh.get_group(), mesh.get_local_rank(), world)
                outs["added later"] = divided.run(*given, expert_map=split.expert_map(torch.device("cpu")))
                split.sum(outs["added later"])
                divided.split = split
            wrong += [f"{world} ranks {what}" for what, out in outs.items() if not builders.same_bits(out, expected)]
    return wrong


def fewer_ranks_at_most_have_fewer_chunks(mesh) -> None:
    layer, rank = layer_in(), mesh_of(2).get_local_rank()
    divided = parallelize_module(copy.deepcopy(layer), mesh_of(2), RowwiseParallel(tp_invariant=2))
    x = x_of(layer, torch.float32, 5)
    assert invariant.chunks_of(divided.weight, divided.scheme, 2, most=divided.tp_ranks) == 1
    whole = copy.deepcopy(layer)
    whole.tp_ranks = 2
    out = divided(x.chunk(2, 1)[rank])
    assert builders.same_bits(out, on_one(whole, x)) and not builders.same_bits(out, on_one(layer, x))
    with pytest.raises(ValueError, match="expected 1 or 2 ranks for tp_invariant, got 4"):
        parallelize_module(layer, mesh_of(4), RowwiseParallel(tp_invariant=2))


def columns_have_one_gpu_s_bits(mesh, name: str) -> None:
    layer, mesh = LAYERS[name](), mesh_of(2)
    divided = parallelize_module(copy.deepcopy(layer), mesh, ColwiseParallel(tp_invariant=True))
    x = x_of(layer)
    expected = on_one(layer, x, "n")
    assert builders.same_bits(expected, layer(x))  # the reference has one order
    assert builders.same_bits(divided(x), expected.chunk(2, 1)[mesh.get_local_rank()])


def layouts_and_rows_without_a_finite_scale(mesh) -> None:
    mesh = mesh_of(4)
    layer, rank = layer_in(activation="int8", group_size=K), mesh.get_local_rank()
    x = x_of(layer, torch.bfloat16, 2, 4)
    expected = on_one(layer, x)
    for placement, part in ((Shard(1), expected.chunk(4, 1)[rank]), (Replicate(), expected)):
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=placement, tp_invariant=True)
        assert builders.same_bits(parallelize_module(copy.deepcopy(layer), mesh, style)(x), part)
    style = RowwiseParallel(tp_invariant=True)
    divided = parallelize_module(copy.deepcopy(layer), mesh, style)
    mine = x.chunk(4, -1)[rank]
    compiled = torch.compile(divided, backend="aot_eager", fullgraph=True)
    assert builders.same_bits(compiled(mine), expected)
    mine[0, 1, 3] = torch.inf  # of rank 1 in each mesh
    x = x.clone()
    if rank != 1:
        mine[0, 1, 3] = 1.0
    out = divided(mine)
    assert out[0, 1].isnan().all() and builders.same_bits(out[1], expected[1])
    assert divided(mine[:0]).shape == (0, 4, layer.out_features)


def greedy(mesh, whole: Model) -> list[tuple[list[int], torch.Tensor]]:
    found = []
    for world in WORLDS:
        found.append(generated(parallelize_module(copy.deepcopy(whole), mesh_of(world), plan_of(whole))))
    return found


def loaded(mesh, folder: str) -> list[tuple[list[int], torch.Tensor]]:
    """By a plan of names, on one rank, two and four."""
    plan, found = {name: "rowwise" if name in ("o", "down") else "colwise" for name in plan_of(Model())}, []
    for world in (1, 2, 4):
        model = Model()
        jitgemm.nn.load_(model, folder, tp=mesh_of(world), tp_plan=plan, tp_invariant=True)
        found.append(generated(model))
    with pytest.raises(ValueError, match="head: expected a packed layer for tp_invariant, got a Linear in floats"):
        jitgemm.nn.load_(Model(), folder, tp=mesh_of(2), tp_plan=plan | {"head": "colwise"}, tp_invariant=True)
    plan = ShardingPlan(mesh_of(2), {"*.experts": ExpertParallel(input_layouts=Shard(0))}, tp_invariant=True)
    with pytest.raises(ValueError, match=r"input_layouts: expected Replicate\(\) with tp_invariant, got S"):
        plan.expert_split("mlp.experts", 8)
    return found


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_one_gpu_s_bits(eight, name):
    assert eight(same_bits_of, name) == [[]] * 8


ON_EIGHT = [(fewer_ranks_at_most_have_fewer_chunks,), (layouts_and_rows_without_a_finite_scale,)]
for kind in ("int8, per channel", "e4m3, groups of 128"):
    ON_EIGHT.append((sums_that_an_engine_brings_together_are_the_same, kind))
for kind in ("e4m3, groups of 128", "zero points, affine", "rotated", "static"):
    ON_EIGHT.append((columns_have_one_gpu_s_bits, kind))


@pytest.mark.parametrize("run", ON_EIGHT, ids=lambda run: " ".join([run[0].__name__, *run[1:]]))
def test_on_eight_ranks(eight, run):
    eight(*run)


@pytest.mark.parametrize("name", ["int8_affine", "e4m3", "8 bits"])
def test_experts_have_one_gpu_s_bits(eight, name):
    assert eight(experts_of, name) == [[]] * 8


def assert_as(expected: tuple, of_ranks: list) -> None:
    for tokens, found in itertools.chain(*of_ranks):
        assert tokens == expected[0] and builders.same_bits(found, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_generates_the_same_tokens_with_the_same_log_probabilities(eight, kind):
    whole = model_of(kind)  # once: eight ranks would quantise it eight times
    assert_as(generated(whole), eight(greedy, whole))


def test_a_checkpoint_that_ranks_read_has_one_gpu_s_bits(eight, tmp_path):
    kind = "int8, per channel"
    whole = model_of(kind)
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    assert_as(generated(whole), eight(loaded, str(tmp_path)))
    with pytest.raises(ValueError, match="tp_invariant: expected False without tp, a mesh"):
        jitgemm.nn.load_(Model(), tmp_path, tp_invariant=True)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_layer_s_function(name):
    """By as many roundings as a plain layer, or a few of fp32 more."""
    layer = CASES[name]()
    x = x_of(layer, torch.float32)
    plain, out = layer(x), on_one(layer, x)
    assert (out - plain).abs().max() <= 2**-20 * plain.abs().max()


REFUSED = {
    "zero points of activations": (LAYERS["zero points, affine"], 2, "without zero points"),
    "activation order": (lambda: permuted(k=512, within=2), 2, "no activation order"),
    "one group a rank": (lambda: layer_in(256), 2, "expected more than a group of 128 columns on each of 2 ranks"),
    "columns": (lambda: layer_in(768), 4, r"expected k = 768 to be a multiple of 4 ranks \* 128 for tp_invariant"),
    "three ranks": (lambda: layer_in(768), 3, "expected 1, 2, 4 or 8 ranks for tp_invariant, got 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_have_no_such_bits_are_refused_by_name(name):
    make, world, words = REFUSED[name]
    layer = make()
    layer.weight.named("model.down")
    with pytest.raises(ValueError, match=f"model.down: .*{words}"):
        invariant.invariant_part(layer.parts, Cut("k", 0, world))


def test_chunks_and_that_corrections_become_zero_points_again():
    layer = layer_in(6 * 128)
    assert invariant.chunks_of(layer.weight, layer.scheme, 1) == 2  # as many ranks as divide k
    layer = corrected()
    assert layer.weight.format.correction
    part = invariant.invariant_part(layer.parts, Cut("k", 1, 4))
    assert not part.weight.format.correction and part.weight.format.zero_point


def test_the_style_s_flag_is_a_bool_or_the_most_ranks():
    for wrong in ("k", 1, 3, 2.0):
        with pytest.raises(
            ValueError, match=f"tp_invariant: expected a bool, or 2, 4 or 8, the most ranks, got {wrong!r}"
        ):
            RowwiseParallel(tp_invariant=wrong)
    with pytest.raises(ValueError, match="tp_invariant: expected None, 'k' or 'n', got True"):
        layer_in().tp_invariant = True


WARMED = {
    "int8, per channel": {"activation": "int8", "group_size": 512},
    "int8, rotated": {"activation": "int8", "group_size": 512, "rotation": 128},
    "e4m3, groups of 128": {},
    "e4m3, by block": {"activation": "e4m3_block"},
}


@emulated
@pytest.mark.parametrize("dim", ["k", "n"])
@pytest.mark.parametrize("kind", WARMED)
def test_warming_up_has_what_calls_load(monkeypatch, kind, dim):
    layer = layer_in(512, **WARMED[kind])
    layer.tp_invariant = dim
    listed = {spec for spec, *_ in warm.kernels(layer, 64, [torch.bfloat16], "h200")}
    emulate(monkeypatch)
    loaded, load = set(), KernelFamily.load
    monkeypatch.setattr(KernelFamily, "load", lambda self, spec, device: loaded.add(spec) or load(self, spec, device))
    for m in (1, 20):
        layer(x_of(layer, torch.bfloat16, m))
    assert loaded <= listed
    assert {spec.family for spec in loaded} == {"quantize", "gemm"} | ({"finish"} if dim == "k" else set())


def exchanged(mesh) -> list[str]:
    style = RowwiseParallel(tp_invariant=True, exchange="nvlink")
    layer = parallelize_module(layer_in(), mesh_of(2), style)
    listed = warm.kernels(layer, 64, [torch.bfloat16], "h200")
    return [spec.label for spec, *_ in listed if spec.family in ("ranks", "finish")]


def test_warming_up_has_what_ranks_exchange_by(eight):
    chunks, others = "finish-fp32-fp32-p4", "finish-fp32-bf16-p2"
    ranks_ = [f"ranks-{name}-r2" for name in ("agree-s32-bf16", "total-fp32-bf16", "gather-fp32-bf16")]
    assert eight(exchanged) == [[chunks, others, *ranks_]] * 8
