"""Layers divided among ranks: two processes with gloo on the CPU."""

from __future__ import annotations

import copy
import os
import re
import time
from dataclasses import replace
from operator import attrgetter

import builders
import pytest
import ranks
import torch
import torch._dynamo
from fresh_python import fresh_python
from parallel_layers import (
    EXPERTS,
    LAYERS,
    PLAN,
    K,
    M,
    Model,
    N,
    apart,
    columns_of,
    layer_of_experts,
    linear,
    of_rank,
    permuted,
    quantised,
    x_of,
)
from safetensors.torch import save_file
from small_models import checkpoint_tensors
from small_models import config as stored_config
from stored_weights import COMPRESSED, GROUP, WEIGHTS, compressed, rounded
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import jitgemm
import jitgemm.nn
from jitgemm.checkpoint.files import Checkpoint
from jitgemm.nn import PackedExperts, PackedLinear
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.layers.shard_weight import part_of_weight
from jitgemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

NAMED = attrgetter("__name__")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks")) as run:
        yield run


# ---- what runs on every rank -----------------------------------------------------------------------------------------


def fails_alone(mesh, how: str) -> int:
    """On rank 0: by an exception, or as the process ends; rank 1 waits for it."""
    if mesh.get_local_rank() == 0 and how == "raises":
        raise KeyError("of rank 0")
    if mesh.get_local_rank() == 0 and how == "ends":
        os._exit(1)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return int(total)


def colwise(mesh, name: str) -> None:
    layer = LAYERS[name]()
    x, size = x_of(layer), layer.weight.nbytes
    expected = columns_of(layer(x), mesh.get_local_rank())
    parallelize_module(layer, mesh, ColwiseParallel())
    assert layer.out_features == expected.shape[1] and builders.same_bits(layer(x), expected)
    assert layer.weight.nbytes < size and layer(x[None]).shape == (1, *expected.shape)  # and memory is given back


def rowwise(mesh, name: str, dtype: torch.dtype) -> torch.Tensor:
    layer = LAYERS[name]()
    x = x_of(layer, dtype)
    whole, each = layer(x), [apart(layer, rank)(columns_of(x, rank)) for rank in range(ranks.WORLD)]
    parallelize_module(layer, mesh, RowwiseParallel())
    out = layer(columns_of(x, mesh.get_local_rank()))
    assert (layer.bias is None) == (mesh.get_local_rank() == 1 or name == "no bias")
    assert builders.same_bits(out, each[0] + each[1])
    # Codes of other scales: the activations' own error, twice at most.
    assert (out.float() - whole.float()).norm() < 0.06 * whole.float().norm()
    return out


def layouts_of_inputs_and_outputs(mesh) -> None:
    rank = mesh.get_local_rank()
    whole = quantised(linear(), activation="int8")
    x = x_of(whole, torch.bfloat16, 2, 4)
    tokens = x.chunk(2, 1)[rank]
    expected = whole(x)

    def divided(style):
        return parallelize_module(copy.deepcopy(whole), mesh, style)

    gathered = divided(ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    assert builders.same_bits(gathered(tokens), expected)
    given = DTensor.from_local(tokens, mesh, [Shard(1)])
    out = divided(ColwiseParallel(use_local_output=False))(given)
    assert out.placements == (Shard(2),) and builders.same_bits(out.full_tensor(), expected)

    summed = divided(RowwiseParallel())(columns_of(x, rank))
    for input_layout, local in ((Replicate(), x), (Shard(1), tokens), (Shard(-1), columns_of(x, rank))):
        for placement, part in ((Shard(1), summed.chunk(2, 1)[rank]), (Replicate(), summed)):
            layer = divided(RowwiseParallel(input_layouts=input_layout, output_layouts=placement))
            assert builders.same_bits(layer(local), part)
    layer = divided(RowwiseParallel(use_local_output=False))
    out = layer(DTensor.from_local(x, mesh, [Replicate()]))
    assert out.placements == (Replicate(),) and builders.same_bits(out.to_local(), summed)


def what_cannot_be_divided_is_refused_by_name(mesh) -> None:
    def divided() -> PackedLinear:
        return parallelize_module(quantised(linear()), mesh, ColwiseParallel())

    for make, style, words in (
        (lambda: quantised(linear(n=72)), ColwiseParallel(), "tp_size: expected n / tp_size to be a multiple of 8"),
        (permuted, RowwiseParallel(), "tp_dim: activation order cannot be cut along k here"),
        (divided, ColwiseParallel(), "expected a whole layer, got one that is divided along n already"),
    ):  # fmt: skip
        layer = make()
        layer.named("model.up")
        before, x = layer(x_of(layer)), x_of(layer)
        with pytest.raises(ValueError, match=f"^model.up: {words}"):
            parallelize_module(layer, mesh, style)
        assert builders.same_bits(layer(x), before)  # as it was


def divided_model(mesh, **options) -> Model:
    model = Model()
    jitgemm.nn.quantize_(model, activation="int8", clip_steps=0, **options)
    return parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})


def a_model_runs_compiled_and_from_its_state(mesh) -> torch.Tensor:
    whole = Model()
    x = torch.randn(3, N, generator=builders.generator(2))
    jitgemm.nn.quantize_(whole, activation="int8", clip_steps=0)
    expected = whole(x)
    model = divided_model(mesh)
    out = model(x)
    assert (out - expected).norm() < 0.03 * expected.norm()

    block = model.layers[0]
    assert builders.same_bits(torch.compile(block, backend="aot_eager", fullgraph=True)(x), block(x))

    state = model.state_dict()
    other = divided_model(mesh)
    for buffer in other.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    assert not builders.same_bits(other(x), out)
    other.load_state_dict(state)
    assert builders.same_bits(other(x), out)

    mixed = divided_model(mesh, filter=lambda name, module: not name.startswith("layers.1"))
    assert isinstance(mixed.layers[1].mlp.down, torch.nn.Linear)  # which goes to PyTorch's styles
    assert (mixed(x) - expected).norm() < 0.3 * expected.norm()  # codes of 4 bits make the difference
    return out


def divided_experts(mesh, kind: str, dtype: torch.dtype) -> None:
    layer, rank = layer_of_experts(kind), mesh.get_local_rank()
    whole, size = copy.deepcopy(layer), layer.w13.weight.nbytes
    parallelize_module(layer, mesh, ExpertParallel(input_layouts=Shard(0)))
    fixed = parallelize_module(copy.deepcopy(whole), mesh, ExpertParallel(input_layouts=Shard(0), max_tokens=24))
    assert layer.num_experts == 2 and layer.w13.weight.nbytes == size // 2
    error = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    for counts in ((9, 6), (24, 5), (5, 0)):
        tokens = counts[rank]
        x, ids, weights = (each[:tokens] for each in of_rank(rank, max(tokens, 5), dtype))
        ids = ids.long()
        ids[:1, 1] = (1 << 32) + 1  # not an expert, and not one for having been cut to 32 bits
        expected, out = whole(x, ids, weights), layer(x, ids, weights)
        assert out.shape == expected.shape and out.dtype == dtype
        if tokens:
            assert (out - expected).abs().max() <= error * expected.abs().max()
            assert not out[3].any()
        assert builders.same_bits(fixed(x, ids.clamp(max=9).int() if tokens == 5 else ids, weights), out)
        fixed.split = replace(fixed.split, nvlink=not fixed.split.nvlink)  # the CPU's tokens go by collectives, too
    with pytest.raises(ValueError, match="hidden_states: expected at most max_tokens = 24 tokens, got 25"):
        fixed(*of_rank(rank, 25, dtype))
    same = copy.deepcopy(whole)
    parallelize_module(same, mesh, ExpertParallel())
    given = of_rank(0, 9, dtype)
    expected = whole(*given)
    assert (same(*given) - expected).abs().max() <= error * expected.abs().max()
    for module, style, words in (
        (layer, ExpertParallel(), "expected all experts, got 2 of a rank"),
        (copy.deepcopy(whole), ExpertParallel(input_layouts=Shard(1)), "expected Replicate"),
        (copy.deepcopy(whole), ExpertParallel(max_tokens=24), "max_tokens: expected None without"),
        (copy.deepcopy(whole), ExpertParallel(input_layouts=Shard(0), max_tokens=0), "max_tokens: expected a number"),
        (copy.deepcopy(whole), ExpertParallel(input_layouts=Shard(0), exchange="nvlink"), "max_tokens: expected a"),
        (copy.deepcopy(whole), ExpertParallel(exchange="nccl"), "exchange: expected one of"),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize_module(module, mesh, style)


def compiled_experts(mesh, options: dict[str, object]) -> None:
    """One graph for any number of tokens, with no guard on it: Dynamo raises if a size with bounds gets one."""
    layer, rank = layer_of_experts("e4m3"), mesh.get_local_rank()
    parallelize_module(layer, mesh, ExpertParallel(**options))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for counts in ((9, 6), (24, 5), (7, 24)):
        given = of_rank(rank, counts[rank], torch.bfloat16) if options else of_rank(0, counts[0], torch.bfloat16)
        expected = layer(*given)
        for each in given:
            torch._dynamo.mark_dynamic(each, 0, min=2, max=4096)
        assert builders.same_bits(compiled(*given), expected)
    if "max_tokens" in options:
        with pytest.raises(ValueError, match="hidden_states: expected at most max_tokens = 24 tokens, got 25"):
            compiled(*of_rank(rank, 25, torch.bfloat16))
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_columns_of_the_output_are_the_whole_layers(both, name):
    both(colwise, name)


@pytest.mark.parametrize(
    "options", [{}, {"input_layouts": Shard(0)}, {"input_layouts": Shard(0), "max_tokens": 24}], ids=len
)
def test_divided_experts_compile_to_one_graph_for_any_number_of_tokens(both, options):
    both(compiled_experts, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_k_sum_up_to_the_same_on_every_rank(both, name, dtype):
    first, second = both(rowwise, name, dtype)
    assert builders.same_bits(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_of_two_ranks_are_the_layer(both, kind, dtype):
    both(divided_experts, kind, dtype)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "static"])
@pytest.mark.parametrize("dim", ["n", "k"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_part_is_the_same_codes_and_scales(name, dim, world):
    """Cut between records and within them: what is unpacked is what was cut."""
    layer = LAYERS[name]()
    weight, row_sum = layer.weight, layer.weight.row_sum
    dense = weight.dequantize()
    size = dense.shape[0 if dim == "n" else 1] // world
    for rank in range(world):
        part = part_of_weight(weight, dim, rank, world, LHS_DTYPES[layer.activation])
        expected = dense.narrow(0 if dim == "n" else 1, rank * size, size)
        assert torch.equal(part.dequantize(), expected)
        assert (part.row_sum is None) == (row_sum is None)
        if row_sum is not None:
            sums = expected.double().sum(1)
            assert (part.row_sum[: part.n] - sums).abs().max() < 1e-5
        assert part.blocks.untyped_storage().nbytes() == part.blocks.nbytes or world == 1


def test_act_order_within_a_ranks_columns_is_divided():
    layer = permuted(within=2)
    columns = torch.empty(N, K)
    columns[:, layer.weight.permutation.long()] = layer.weight.dequantize()
    for rank in range(2):
        part = part_of_weight(layer.weight, "k", rank, 2, torch.float8_e4m3fn)
        found = torch.empty(N, K // 2)
        found[:, part.permutation.long()] = part.dequantize()
        assert torch.equal(found, columns[:, rank * K // 2 : (rank + 1) * K // 2])


# ---- DTensors through whole layers and through the ops ---------------------------------------------------------------

LEAD = {"tokens": (6,), "a token": (1,), "uneven": (5,), "sequences": (2, 4), "one vector": ()}


def on_rows(mesh, name: str) -> None:
    layer = LAYERS[name]()
    for lead in LEAD.values():
        x = torch.randn((*lead, layer.in_features), generator=builders.generator(9)).bfloat16()
        expected = layer(x)
        for dim in range(-1, len(lead)):
            layout = Replicate() if dim < 0 else Shard(dim)
            out = layer(distribute_tensor(x, mesh, [layout], src_data_rank=None))
            assert isinstance(out, DTensor) and out.placements == (layout,) and out.dtype == x.dtype
            assert builders.same_bits(out.full_tensor(), expected)
        # Columns and partial sums are brought together: a row's scale is of the whole row.
        out = layer(distribute_tensor(x, mesh, [Shard(len(lead))], src_data_rank=None))
        assert out.placements == (Replicate(),) and builders.same_bits(out.to_local(), expected)
        mine = x if mesh.get_local_rank() else torch.zeros_like(x)
        assert builders.same_bits(layer(DTensor.from_local(mine, mesh, [Partial()])).to_local(), expected)


def a_model_takes_sequences_divided_among_ranks(mesh) -> None:
    """Sequences divided among ranks, through layers that are whole on each; compiled, and with a divided MLP."""
    model, x = Model().layers[0], torch.randn(2, 6, N, generator=builders.generator(2))
    jitgemm.nn.quantize_(model, activation="int8", clip_steps=0)
    expected = model(x)
    parallelize_module(model, mesh, {"norm": SequenceParallel()})
    sharded = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)
    out, compiled = model(sharded), torch.compile(model, backend="aot_eager", fullgraph=True)
    assert out.placements == (Shard(1),) and builders.same_bits(out.full_tensor(), expected)
    assert builders.same_bits(compiled(sharded).full_tensor(), expected)

    mlp = divided_model(mesh).layers[0].mlp
    assert builders.same_bits(mlp(sharded), mlp(x))


def ops_take_rows_and_refuse_other_layouts(mesh) -> None:
    layer = LAYERS["zero points, affine"]()
    weight, x = layer.weight, x_of(layer)
    q, scale, zero = jitgemm.quantize_activations(x, torch.int8, affine=True)
    expected = torch.empty(M, N)
    jitgemm.gemm_w4a8_nt((q, scale, zero), weight, expected)
    for layout in (Shard(0), Replicate()):
        given = distribute_tensor(x, mesh, [layout], src_data_rank=None)
        lhs = jitgemm.quantize_activations(given, torch.int8, affine=True)
        for ours, whole in zip(lhs, (q, scale, zero)):
            assert ours.placements == (layout,) and builders.same_bits(ours.full_tensor(), whole)
        out = distribute_tensor(torch.zeros(M, N), mesh, [layout], src_data_rank=None)
        jitgemm.gemm_w4a8_nt(lhs, weight, out)
        assert builders.same_bits(out.full_tensor(), expected)
        wanted = jitgemm.quantize_activations(x, torch.int8, scheme="block")[1]
        found = jitgemm.quantize_activations(given, torch.int8, scheme="block")[1]
        assert found.stride() == wanted.stride() and builders.same_bits(found.full_tensor(), wanted)

    sharded, columns = (distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1))
    lhs = jitgemm.quantize_activations(sharded, torch.int8, affine=True)
    out = distribute_tensor(torch.zeros(M, N), mesh, [Shard(0)], src_data_rank=None)
    both = init_device_mesh("cpu", (2, 1))
    given = distribute_tensor(x, both, [Shard(0), Replicate()], src_data_rank=None)
    assert layer(given).placements == (Shard(0), Replicate())
    divided = parallelize_module(copy.deepcopy(layer), mesh, ColwiseParallel())
    quantize, gemm = jitgemm.quantize_activations, jitgemm.gemm_w4a8_nt
    whole, bias = out.redistribute(placements=[Replicate()]), distribute_tensor(torch.zeros(N), mesh, [Shard(0)])
    for words, call in (
        ("x: expected a DTensor on DeviceMesh", lambda: divided(given)),
        ("hidden_states: expected a plain tensor", lambda: layer_of_experts("int8")(sharded[:, :64], None, None)),
        ("x: expected placements Replicate() or Shard(0) in quantize_a", lambda: quantize(columns, torch.int8)),
        ("out: expected a DTensor with (Shard(dim=0),)", lambda: gemm(lhs, weight, torch.zeros(M, N))),
        ("x_scale: expected a DTensor", lambda: gemm((lhs[0], scale, lhs[2]), weight, out)),
        ("x: expected a DTensor, as other arguments of gemm_w4a8_nt", lambda: gemm((q, scale, zero), weight, out)),
        ("out: expected a DTensor with (Shard(dim=0),)", lambda: gemm(lhs, weight, whole)),
        ("bias: expected a plain tensor or one with Replicate()", lambda: gemm(lhs, weight, out, bias=bias)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(words)}"):
            call()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_dtensors_through_whole_layers(both, name):
    both(on_rows, name)


def test_layers_import_dtensors_with_the_first_of_them():
    done = fresh_python("import sys, jitgemm.nn; assert 'torch.distributed.tensor' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")


ALONE = [
    layouts_of_inputs_and_outputs, what_cannot_be_divided_is_refused_by_name,
    a_model_runs_compiled_and_from_its_state, a_model_takes_sequences_divided_among_ranks,
    ops_take_rows_and_refuse_other_layouts,
]  # fmt: skip


@pytest.mark.parametrize("run", ALONE, ids=NAMED)
def test_on_both_ranks(both, run):
    first, second = both(run)
    assert first is None or builders.same_bits(first, second)


# ---- whole models ----------------------------------------------------------------------------------------------------

LLAMA = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "max_position_embeddings": 64, "eos_token_id": None,
    "attention_bias": True,
}  # fmt: skip
TOKENS = torch.arange(1, 13)[None]
NEAR = 0.08
"""Of the logits' norm: codes of 8 bits by other scales, in two layers."""


def llama(name: str = "Llama", **sizes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    told = getattr(transformers, f"{name}Config")(**LLAMA | sizes)
    model = transformers.AutoModelForCausalLM.from_config(told, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # one that was added twice would show
    return model


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("floats"))
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> str:
    """The same in compressed-tensors, but for one MLP's Linears, which are in floats."""
    folder = tmp_path_factory.mktemp("stored")
    model = llama()
    names = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    names = [name for name in names if name != "lm_head" and "layers.1.mlp" not in name]
    tensors, _ = checkpoint_tensors(model, *names)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = stored_config()
    said["ignore"] = ["lm_head", "re:.*layers.1.mlp.*"]
    model.config.quantization_config = said
    model.config.save_pretrained(folder)
    return str(folder)


def a_checkpoint_is_cut_through_its_groups(mesh, folder: str) -> None:
    """load_ cuts 384 / 2 columns in groups of 128, and 480 / 2 in groups of 32 not."""

    def cut(k: int, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
        layer = rounded(torch.randn(64, k, generator=builders.generator(1)), group_size=size)
        model = torch.nn.ModuleDict({"down": torch.nn.Linear(k, 64, bias=False)})
        config = COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": WEIGHTS | {"group_size": size}}}}
        source = {f"down.{suffix}": tensor for suffix, tensor in compressed(layer).items()}
        jitgemm.nn.load_(model, source, config=config, tp=mesh, tp_plan={"down": "rowwise"})
        return model, layer.weight.float()

    with pytest.raises(ValueError, match=r"down: expected k = 480 to be a multiple of 2 ranks \* 32"):
        cut(480, 32)
    with pytest.warns(UserWarning, match="inside groups of 128: scales are repeated over groups of 64"):
        model, weight = cut(384, 128)
    assert torch.equal(model.down.weight.dequantize(), columns_of(weight, mesh.get_local_rank()))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).norm() < NEAR * b.float().norm())


def generates_alike(model) -> None:
    """A static cache, which has the rank's heads, gives what the default one gives."""
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    static = model.generate(TOKENS, **how, cache_implementation="static", disable_compile=True)
    for a, b in zip(static.logits, model.generate(TOKENS, **how).logits, strict=True):
        assert near(a, b)
        if not torch.equal(a.argmax(-1), b.argmax(-1)):  # two tokens are as likely
            break


def load_gives_each_rank_its_part(mesh, folder: str) -> torch.Tensor:
    whole, model = llama(), llama()
    jitgemm.nn.load_(whole, folder)
    report = jitgemm.nn.load_(model, folder, tp=mesh)
    assert "model.layers.0.self_attn.q_proj" in report
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    assert attention.q_proj.weight.shape == (128, 256) and attention.o_proj.weight.shape == (256, 128)
    assert (attention.o_proj.bias is None) == (mesh.get_local_rank() == 1)
    assert mlp.up_proj.weight.placements == (Shard(0),)  # PyTorch's own style
    rank = mesh.get_local_rank()
    for name in ("q_proj", "k_proj", "v_proj"):
        x = torch.randn(3, 256).bfloat16()
        expected = columns_of(getattr(whole.model.layers[0].self_attn, name)(x), rank)
        assert builders.same_bits(getattr(attention, name)(x), expected)
    logits = model(TOKENS).logits
    assert near(logits, whole(TOKENS).logits)
    generates_alike(model)

    planned = llama()
    plan = {"*.[qkv]_proj": "colwise", "*layers.0*.gate_proj": "colwise", "*layers.0*.up_proj": "colwise"}
    plan |= {"*.o_proj": RowwiseParallel(), "*layers.0*.down_proj": RowwiseParallel()}
    jitgemm.nn.load_(planned, folder, tp=mesh, tp_plan=plan)
    assert near(planned(TOKENS).logits, whole(TOKENS).logits)
    return logits


def plans_that_load_refuses(mesh, folder: str) -> None:
    for model, options, words in (
        (llama(), {"tp_plan": {"*.q_proj": "packed_colwise"}}, "tp_plan: expected a style"),
        (llama(), {"tp_plan": {"*.nothing": "colwise"}}, "tp_plan: expected patterns"),
        (Model(), {}, "tp_plan: expected {"),
        (llama(), {"tp": None, "tp_plan": {"*.q_proj": "colwise"}}, "tp_plan: expected None"),
        (llama(), {"tp": "cpu"}, "tp: exp"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            jitgemm.nn.load_(model, folder, **{"tp": mesh} | options)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
    # As models of transformers without a plan for their decoder have it, gpt-oss for one.
    with pytest.warns(UserWarning, match="tp_plan: divides none of the 11 quantised layers, which every rank holds"):
        jitgemm.nn.load_(llama(), folder, tp=mesh, tp_plan={"lm_head": "colwise_gather_output"})


def from_pretrained(mesh, folder: str, quantising: bool) -> torch.Tensor:
    import transformers
    from transformers.distributed import DistributedConfig

    import jitgemm.hf

    def load(invariant=False, **more):
        auto, options = transformers.AutoModelForCausalLM, {"tp_invariant": invariant}
        if quantising:
            told = jitgemm.hf.JitGemmConfig(activation="int8", **options)
            return auto.from_pretrained(folder, quantization_config=told, dtype=torch.bfloat16, **more)
        return auto.from_pretrained(folder, config=jitgemm.hf.config(folder, **options), dtype=torch.bfloat16, **more)

    divided = {"distributed_config": DistributedConfig(tp_size=ranks.WORLD, tp_plan="auto")}
    if quantising:
        hidden = [load(True, **options).model(TOKENS).last_hidden_state for options in ({}, divided)]
        assert builders.same_bits(*hidden)
    else:
        with pytest.raises(ValueError, match="layers.1.mlp.gate_proj: expected a packed layer for tp_invariant, got a"):
            load(True, **divided)
    whole = load()
    model = load(**divided)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, PackedLinear) and attention.q_proj.weight.shape == (128, 256)
    assert (attention.o_proj.bias is None) == (mesh.get_local_rank() == 1)
    logits = model(TOKENS).logits
    assert near(logits, whole(TOKENS).logits)
    generates_alike(model)
    with pytest.raises(ValueError):
        model.save_pretrained("nowhere")
    return logits


def mixture(mesh, folder: str) -> torch.Tensor:
    """Experts are whole on every rank, through load_ and through transformers' plan."""
    import transformers
    from transformers.distributed import DistributedConfig

    import jitgemm.hf

    auto, options = transformers.AutoModelForCausalLM, {"config": jitgemm.hf.config(folder), "dtype": torch.bfloat16}
    whole = auto.from_pretrained(folder, **options)
    model = llama("Qwen3Moe", **MIXTURE)
    jitgemm.nn.load_(model, folder, tp=mesh)
    logits = model(TOKENS).logits
    assert near(logits, whole(TOKENS).logits)
    divided = llama("Qwen3Moe", **MIXTURE)
    plan = {name: rule for name, rule in divided.tp_plan.items() if ".mlp." not in name}
    plan = {"*.mlp.experts": ExpertParallel()} | plan
    jitgemm.nn.load_(divided, folder, tp=mesh, tp_plan=plan)
    assert divided.model.layers[0].mlp.experts.num_experts == 2
    assert near(divided(TOKENS).logits, logits)
    options["config"] = jitgemm.hf.config(folder)
    model = auto.from_pretrained(folder, **options, distributed_config=DistributedConfig(tp_size=ranks.WORLD))
    assert isinstance(model.model.layers[0].mlp.experts, PackedExperts)
    assert model.model.layers[0].self_attn.q_proj.split is not None
    assert builders.same_bits(model(TOKENS).logits, logits)
    return logits


def packed_layers_of_a_checkpoint_are_cut(mesh, folder: str) -> None:
    whole, expected, found = llama(), llama(), llama()
    jitgemm.nn.load_(whole, folder)
    jitgemm.nn.load_(expected, folder, tp=mesh)
    jitgemm.nn.load_(found, whole.state_dict(), tp=mesh)
    x, y = expected.state_dict(), found.state_dict()
    assert x.keys() == y.keys()
    for name, tensor in x.items():
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (tensor, y[name])]
        assert builders.same_bits(*local), name


def own_experts(mesh, kind: str) -> None:
    """Of experts one by one, in one tensor and with biases, each rank reads its own alone."""
    import expert_models as mixtures  # which need a newer transformers than the others here

    name = "gpt-oss" if kind == "biases" else "qwen3"
    source, whole, divided = (mixtures.build(name, seed=seed) for seed in (0, 1, 1))
    if kind == "together":
        tensors, _ = mixtures.fused(source, ("gate_up_proj.", "down_proj."))
    else:
        tensors, _ = (mixtures.gpt_oss_file if kind == "biases" else mixtures.file_of)(source)
    others = [f".experts.{e}." for e in range(mixtures.E) if e * ranks.WORLD // mixtures.E != mesh.get_local_rank()]
    read: list[tuple[str, int]] = []

    class Watched(Checkpoint):
        def read(self, name, *options):
            tensor = super().read(name, *options)
            if "experts" in name and not name.endswith("weight_shape"):
                read.append((name, tensor.nbytes))
            return tensor

    checkpoint = Watched(tensors, COMPRESSED)
    jitgemm.nn.load_(whole, checkpoint)
    everything = sum(nbytes for _, nbytes in read)
    read.clear()
    jitgemm.nn.load_(divided, checkpoint, tp=mesh, tp_plan={"*.mlp.experts": ExpertParallel()})
    assert 0 < sum(nbytes for _, nbytes in read) <= everything // ranks.WORLD
    assert not any(part in name for name, _ in read for part in others)

    for i in range(2):
        mine, cut = (model.model.layers[i].mlp.experts for model in (divided, whole))
        parallelize_module(cut, mesh, ExpertParallel())
        a, b = mine.state_dict(), cut.state_dict()
        assert a.keys() == b.keys() and all(builders.same_bits(a[key], b[key]) for key in a)
        assert mine.split == cut.split and mine.num_experts == mixtures.E // ranks.WORLD
    assert builders.same_bits(mixtures.logits(divided), mixtures.logits(whole))


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "attention_bias": False}


@pytest.fixture(scope="module")
def stored_mixture(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    model = llama("Qwen3Moe", **MIXTURE)
    jitgemm.nn.quantize_(model, clip_steps=0)
    model.save_pretrained(folder)
    return str(folder)


def needs_plans() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.PreTrainedModel, "_mesh_manager"):
        pytest.skip("needs transformers with a mesh manager")


def test_experts_are_whole_on_every_rank(both, stored_mixture):
    needs_plans()
    first, second = both(mixture, stored_mixture)
    assert builders.same_bits(first, second)


@pytest.mark.parametrize("kind", ["one by one", "together", "biases"])
def test_ranks_read_their_experts_alone(both, kind):
    pytest.importorskip("transformers", minversion="5")
    both(own_experts, kind)


OF_A_CHECKPOINT = [
    a_checkpoint_is_cut_through_its_groups, packed_layers_of_a_checkpoint_are_cut, load_gives_each_rank_its_part,
    plans_that_load_refuses,
]  # fmt: skip


@pytest.mark.parametrize("run", OF_A_CHECKPOINT, ids=NAMED)
def test_of_a_checkpoint(both, stored, run):
    first, second = both(run, stored)
    assert first is None or builders.same_bits(first, second)


@pytest.mark.parametrize("quantising", [False, True], ids=["a checkpoint", "from floats"])
def test_transformers_divides_the_model_by_its_own_plan(both, stored, floats, quantising):
    needs_plans()
    first, second = both(from_pretrained, floats if quantising else stored, quantising)
    assert builders.same_bits(first, second)


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "rank 0: .*KeyError: 'of rank 0'"), ("ends", "rank 0: the process ended")]
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path, how, said):
    with ranks.two_ranks(tmp_path) as run:
        assert run(fails_alone, "does not") == [2, 2]
        began = time.monotonic()
        with pytest.raises(AssertionError, match=f"(?s){said}"):
            run(fails_alone, how)
        assert time.monotonic() - began < ranks.LIMIT_S / 4
        assert run(fails_alone, "does not") == [2, 2]  # of new processes
