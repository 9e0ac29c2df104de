"""Weights that change while an engine serves (RL): in any order, twice, from memory that a trainer fills again, whole or not."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace

import mxfp4
import nvfp4
import pytest
import torch
from builders import third
from engines import ENGINES, EXPERTS, each_engine, load, process, sglang
from served_layers import BF16, CONFIGS, SHARDS, dense_of, packed_module, saved, stored, without_least
from sglang_layers import running

import jitgemm
from jitgemm.serving.collected import CHILD
from jitgemm.serving.packing import for_any_values

K, N, COUNT = 128, 64, 2
KINDS = ("linears", "experts")
FORMS = ("packed", "packed-int8", "mxfp4", "nvfp4", "gptq", "awq", "qserve", "fp8", "fp8-blocks", "w4afp8", None)


class Server:
    """A layer of an engine's: what comes for it is [(tensor's parameter, arguments of its loader, tensor)].

    name: of its format; None: it is in floats. known: headers tell its tensors, and optional ones are missing.
    """

    def __init__(self, engine, kind, name, known=False, **options):
        self.engine, self.kind, self.name, self.known = engine, kind, name, known and name is not None
        projs = [f"m.{part}_proj" for part in ("gate", "up")]
        layers = projs if kind == "linears" else [f"{EXPERTS}.{e}.{proj}" for e in range(COUNT) for proj in SHARDS]
        headers = dict.fromkeys(layers, self.tensors(N, K, 0)[0]) if self.known else {}
        config = engine.told(CONFIGS.get(name), headers, **options)
        sizes = COUNT, K, N
        self.layer = engine.gate_up(config, K, N) if kind == "linears" else engine.experts(config, sizes, packed=False)
        self.parameters = dict(self.layer.named_parameters())

    def tensors(self, n, k, seed):
        """A layer's tensors and its weight."""
        if self.name is not None:
            tensors, dense = stored(CONFIGS[self.name], n, k, seed)
            return {suffix: each for suffix, each in tensors.items() if not (self.known and suffix == "g_idx")}, dense
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(BF16)
        return {"weight": weight}, weight.double()

    def weights(self, seed):
        """What comes, and the layer's weights."""
        if self.kind == "linears":
            parts = [self.tensors(N, K, 2 * seed + part) for part in range(2)]
            come = [(suffix, (part,), each) for part, (found, _) in enumerate(parts) for suffix, each in found.items()]
            return come, [torch.cat([dense for _, dense in parts])]
        come, dense = [], {}
        for e in range(COUNT):
            for number, shard in enumerate(SHARDS.values()):
                size = (K, N) if shard == "w2" else (N, K)
                tensors, dense[e, shard] = self.tensors(*size, 10 * seed + 4 * e + number)
                where = "w2_" if shard == "w2" else "w13_"
                come += [(where + suffix, (where + suffix, shard, e), each) for suffix, each in tensors.items()]
        gates = torch.stack([torch.cat([dense[e, "w1"], dense[e, "w3"]]) for e in range(COUNT)])
        return come, [gates, torch.stack([dense[e, "w2"] for e in range(COUNT)])]

    def begin(self):
        self.engine.renewed(self.layer, self.parameters)

    def load(self, come):
        parameters = dict(self.layer.named_parameters())
        with self.engine.rank():
            for name, arguments, tensor in come:
                parameters[name].weight_loader(parameters[name], tensor, *arguments)

    def end(self):
        with self.engine.rank():
            return process(self.layer)

    def first(self, seed=0):
        come, dense = self.weights(seed)
        self.load(come)
        return self.end(), dense

    def holds(self, dense):
        module = self.layer._modules[CHILD]
        found = [dense_of(module)] if self.kind == "linears" else [dense_of(module.w13), dense_of(module.w2)]
        if self.name is not None:
            return all(map(torch.equal, found, dense))
        return all((a - b).norm() < 0.15 * b.norm() for a, b in zip(found, dense, strict=True))


@pytest.fixture
def bytes_alive():
    """What tensors made since hold; objects of before are frozen, which to go through takes most of a second."""
    gc.freeze()
    yield alive
    gc.unfreeze()


def alive():
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_meta]  # no tracer's
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())


def from_one_memory(server, come):
    """Each tensor from the memory that the one before of its kind had, which holds something else as soon as it was given."""
    for name, arguments, tensor in come:
        memory = tensor.clone(memory_format=torch.contiguous_format)
        server.load([(name, arguments, memory)])
        memory.view(-1).view(torch.uint8).fill_(0x55)


@pytest.mark.parametrize("engine, kind, name, known", third(ENGINES, KINDS, FORMS, (False, True)))
def test_ten_updates_in_any_order_and_twice_take_no_memory(engine, kind, name, known, bytes_alive):
    """Of a layer that headers tell, packed with its last tensor each time, or of none."""
    server, held = Server(engine, kind, name, known), []
    module, _ = server.first()
    assert kind == "experts" or (module.input_scale is None) == (name != "fp8")
    where = {key: buffer.data_ptr() for key, buffer in module.named_buffers()}
    for seed in range(1, 11):
        come, dense = server.weights(seed)
        random.Random(seed).shuffle(come)
        server.begin()
        from_one_memory(server, [each for each in come for _ in range(2)])
        assert server.layer.quant_method.complete == (known or name is None)
        assert server.end() is module and server.holds(dense)
        assert {key: buffer.data_ptr() for key, buffer in module.named_buffers()} == where
        assert not any(matrix.kept or matrix.numbers for matrix in server.layer.quant_method.matrices)
        del come, dense
        held.append(bytes_alive())
    assert 0 < max(held[2:]) <= held[1]


@pytest.mark.parametrize("engine, kind, name", third(ENGINES, KINDS, FORMS))
def test_a_partial_update_raises_and_the_old_weights_serve_on(engine, kind, name):
    server = Server(engine, kind, name)
    module, dense = server.first()
    come, other = server.weights(1)
    server.begin()
    server.load(come[: len(come) // 2])
    with pytest.raises(ValueError, match="expected numbers"):
        server.end()
    assert server.layer._modules[CHILD] is module and server.holds(dense)
    server.begin()  # and all of them come again
    server.load(come)
    assert server.end() is module and server.holds(other)


def of_mxfp4(parts):
    return {"weight_packed": parts.canonical, "weight_scale": parts.scales}, parts.dequantize_fp64()


def of_nvfp4(parts):
    whole = torch.tensor([2.0**-6])
    tensors = {
        "weight_packed": parts.canonical,
        "weight_scale": parts.scales,
        "weight_global_scale": whole.reciprocal(),
    }
    return tensors, nvfp4.Parts(parts.codes, parts.scales, whole).dequantize_fp64()


PACKED = stored(CONFIGS["packed"], N, K)
BY_VALUES = {
    "packed": (PACKED, without_least(PACKED[0])),
    "mxfp4": (of_mxfp4(mxfp4.parts(1, N, K, "group", shift=-12)), of_mxfp4(mxfp4.parts(2, N, K, shift=-12))),
    "nvfp4": (of_nvfp4(nvfp4.far(1, N, K)), of_nvfp4(nvfp4.parts(2, N, K))),
}
"""Weights whose values need the general format, and weights that have a faster one."""


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", BY_VALUES)
def test_kernels_that_graphs_hold_read_the_new_values_or_an_error_names_the_layer(name, graphs):
    """A graph's kernel reads codes in the first weights' order, whatever is in their memory."""
    general, fast = BY_VALUES[name]
    for first, second in ((general, fast), (fast, general)):
        with running(disable_cuda_graph=not graphs):
            config = sglang.Config(CONFIGS[name])
            kept = {"bias": False, "params_dtype": BF16, "quant_config": config, "prefix": "m.o_proj"}
            load(layer := sglang.linears.RowParallelLinear(K, N, **kept), first[0])
            module = process(layer)
            before = module.weight.format
            layer.quant_method.restore_weights_before_loading(layer)
            fails = first is fast and (graphs or name == "mxfp4")  # whose scales take another memory
            expected = pytest.raises(
                ValueError, match="expected values that the first ones' format holds.*layer m.o_proj"
            )
            with expected if fails else nullcontext():
                load(layer, second[0])
                process(layer)
        assert torch.equal(dense_of(module), (first if fails else second)[1])
        assert module.weight.format == before or not graphs


def test_a_rotated_weight_in_the_general_format_stays_rotated():
    q, scale = torch.randint(-7, 8, (COUNT, N, K), dtype=torch.int8), torch.rand(COUNT, N, K // 64).to(BF16)
    weight = replace(jitgemm.pack_w4(q, scale, group_size=64, lhs_dtype=torch.float8_e4m3fn), rotation=128)
    expected = weight.dequantize()
    assert weight.format != weight.format.for_any_values
    general = for_any_values(weight)
    assert general.format == weight.format.for_any_values
    assert general.rotation == 128 and torch.equal(general.dequantize(), expected)


@each_engine
def test_layers_that_do_not_come_again_stay_as_they_are(engine):
    server = Server(engine, "linears", "packed")
    module, dense = server.first()
    packed = server.layer.quant_method.pack
    server.layer.quant_method.pack = lambda layer: pytest.fail("packed with nothing")
    if engine is sglang:
        server.begin()
    assert server.end() is module and server.holds(dense)
    server.layer.quant_method.pack = packed


@each_engine
@pytest.mark.parametrize("name, sums", [("packed", "f16"), ("packed-int8", "exact")])
def test_what_kernels_may_add_up_in_is_an_option_that_a_layer_keeps(engine, name, sums):
    server = Server(engine, "linears", name, sums=sums)
    module, _ = server.first()
    assert module.sums == module.call_sums == sums
    powers = module.channel_scale
    before = None if powers is None else (powers.data_ptr(), powers.clone())
    server.begin()
    server.load(
        [(suffix, at, each * 4 if suffix == "weight_scale" else each) for suffix, at, each in server.weights(1)[0]]
    )
    assert server.end() is module and module.sums == module.call_sums == sums
    if before is not None:
        assert module.channel_scale.data_ptr() == before[0] and not torch.equal(module.channel_scale, before[1])


@each_engine
@pytest.mark.parametrize("first", [True, False], ids=["with", "without"])
def test_weights_that_are_loaded_again_are_corrected_as_the_first_were(engine, first):
    """Of a scale of zero no factor tells a zero point."""
    server = Server(engine, "linears", "packed-corrected")
    come, dense = server.weights(0)
    none = [(suffix, at, each.clone()) for suffix, at, each in come]
    next(each for suffix, _, each in none if suffix == "weight_scale")[3, 1] = 0
    server.load(come if first else none)
    module = server.end()
    address = module.blocks.data_ptr()
    assert bool(module.weight.format.correction) == first
    server.begin()
    server.load(none if first else come)
    with (
        pytest.raises(ValueError, match="correction: expected scales times zero .*m.gate_proj")
        if first
        else nullcontext()
    ):
        assert server.end() is module
    assert module.blocks.data_ptr() == address and server.holds(dense)


@each_engine
def test_a_saved_model_is_loaded_again_in_place_and_from_its_files_alone(tmp_path, engine):
    torch.manual_seed(0)
    linear, other = saved("4 bits", 64, 128), saved("4 bits", 64, 128)
    config = engine.of_folder(tmp_path, {"m.o_proj": linear, EXPERTS: packed_module()})
    layers = [engine.row(config, 128, 64), engine.experts(config, (4, 128, 384), packed=False, **engine.biased)]
    params = [dict(layer.named_parameters()) for layer in layers]
    with engine.rank():
        load(layers[0], linear.state_dict())
        modules = [process(layer) for layer in layers]
    before = [{name: (each.data_ptr(), each.clone()) for name, each in m.named_buffers()} for m in modules]
    for layer, own in zip(layers, params):
        engine.renewed(layer, own)
    with engine.rank():
        load(layers[0], linear.state_dict())
        assert [process(layer) for layer in layers] == modules
    for module, held in zip(modules, before, strict=True):
        for name, each in module.named_buffers():
            assert each.data_ptr() == held[name][0] and torch.equal(each, held[name][1])
    engine.renewed(layers[0], params[0])
    with engine.rank(), pytest.raises(ValueError, match="got another m.o_proj.blocks than theirs"):
        load(layers[0], other.state_dict())
