"""Weights that change while an engine serves (RL): in any order, twice, from memory that a trainer fills again, whole or not."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace

import checkpoints
import mxfp4
import nvfp4
import pytest
import torch
from sglang_cases import made as sglang_made
from sglang_cases import row
from sglang_layers import experts as sglang_experts
from sglang_layers import running
from vllm_cases import (
    BF16,
    CONFIGS,
    dense_of,
    process,
    stored,
    vllm_is_there,  # noqa: F401 - a fixture
)
from vllm_cases import gate_up as vllm_gate_up
from vllm_cases import made as vllm_made
from vllm_layers import experts, rank

import jitgemm
from jitgemm.serving.collected import CHILD
from jitgemm.serving.packing import for_any_values

# isort: split
from sglang.srt.layers.linear import MergedColumnParallelLinear  # which sglang_layers puts there

K, N, COUNT = 128, 64, 2
SHARDS = {"w1": (N, K), "w3": (N, K), "w2": (K, N)}
FORMS = ("packed", "packed-int8", "mxfp4", "nvfp4", "gptq", "fp8", "fp8-blocks", None)
each_engine = pytest.mark.parametrize("engine", ["vllm", "sglang"])


def context(engine, **arguments):
    return running(**arguments) if engine == "sglang" else rank()


def tensors_of(name, n, k, seed):
    """A layer's tensors and its weight; name: None for floats."""
    if name is not None:
        return stored(CONFIGS[name], n, k, seed)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(BF16)
    return {"weight": weight}, weight.double()


class Server:
    """A layer of an engine's: what comes for it is [(tensor's parameter, arguments of its loader, tensor)]."""

    def __init__(self, engine, kind, name):
        self.engine, self.kind, self.name = engine, kind, name
        config = None if name is None else CONFIGS[name]
        made = sglang_made(config) if engine == "sglang" else vllm_made(config)
        with context(engine):
            if kind == "linears":
                joined = dict(bias=False, params_dtype=BF16, quant_config=made, prefix="m.gate_up_proj")
                of_sglang = engine == "sglang"
                self.layer = MergedColumnParallelLinear(K, [N, N], **joined) if of_sglang else vllm_gate_up(made, K, N)
            elif engine == "sglang":
                self.layer = sglang_experts(made, (COUNT, K, N), 2)
            else:
                self.layer = experts(made, "m.experts", (COUNT, K, N), 2)
        self.parameters = dict(self.layer.named_parameters())

    def weights(self, seed):
        """What comes, and the layer's weights."""
        if self.kind == "linears":
            found = [tensors_of(self.name, N, K, 2 * seed + part) for part in range(2)]
            come = [
                (suffix, (part,), each) for part, (found_, _) in enumerate(found) for suffix, each in found_.items()
            ]
            return come, [torch.cat([dense for _, dense in found])]
        come, dense = [], {}
        for e in range(COUNT):
            for number, (shard, size) in enumerate(SHARDS.items()):
                tensors, dense[e, shard] = tensors_of(self.name, *size, 10 * seed + 4 * e + number)
                where = "w2_" if shard == "w2" else "w13_"
                come += [(where + suffix, (where + suffix, shard, e), each) for suffix, each in tensors.items()]
        gates = torch.stack([torch.cat([dense[e, "w1"], dense[e, "w3"]]) for e in range(COUNT)])
        return come, [gates, torch.stack([dense[e, "w2"] for e in range(COUNT)])]

    def begin(self):
        if self.engine == "sglang":
            with context(self.engine):
                self.layer.quant_method.restore_weights_before_loading(self.layer)
            return
        for each in [*self.layer._parameters, *self.layer._buffers]:  # as vLLM does
            delattr(self.layer, each)
        for each, parameter in self.parameters.items():
            self.layer.register_parameter(each, parameter)

    def load(self, come):
        parameters = dict(self.layer.named_parameters())
        with context(self.engine):
            for name, arguments, tensor in come:
                parameters[name].weight_loader(parameters[name], tensor, *arguments)

    def end(self):
        with context(self.engine):
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


def bytes_alive():
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and not each.is_meta]  # no tracer's
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())


def from_one_memory(server, come):
    """Each tensor from the memory that the one before of its kind had, which holds something else as soon as it was given."""
    for name, arguments, tensor in come:
        memory = tensor.clone(memory_format=torch.contiguous_format)
        server.load([(name, arguments, memory)])
        memory.view(-1).view(torch.uint8).fill_(0x55)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["linears", "experts"])
@each_engine
def test_ten_updates_in_any_order_and_twice_take_no_memory(engine, kind, name):
    server, alive = Server(engine, kind, name), []
    module, _ = server.first()
    where = {key: buffer.data_ptr() for key, buffer in module.named_buffers()}
    for seed in range(1, 11):
        come, dense = server.weights(seed)
        random.Random(seed).shuffle(come)
        server.begin()
        from_one_memory(server, [each for each in come for _ in range(2)])
        assert server.end() is module and server.holds(dense)
        assert {key: buffer.data_ptr() for key, buffer in module.named_buffers()} == where
        assert not any(matrix.kept or matrix.numbers for matrix in server.layer.quant_method.matrices)
        del come, dense
        alive.append(bytes_alive())
    assert max(alive[2:]) <= alive[1]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["linears", "experts"])
@each_engine
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


def int4(low, seed):
    torch.manual_seed(seed)
    q, scale = torch.randint(low, 8, (N, K)), (torch.rand(N, K // 32) + 0.5).to(BF16) / 64
    q[:, 0] = low
    tensors = {
        "weight_packed": checkpoints.words(q + 8, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor([N, K]),
    }
    return tensors, checkpoints.dequantized(q, scale)


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


BY_VALUES = {
    "packed": (int4(-8, 1), int4(-7, 2)),
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
        with context("sglang", disable_cuda_graph=not graphs):
            layer = row(sglang_made(CONFIGS[name]), K, N)
            load_into(layer, first[0])
            module = process(layer)
            before = module.weight.format
            layer.quant_method.restore_weights_before_loading(layer)
            fails = first is fast and (graphs or name == "mxfp4")  # whose scales take another memory
            expected = pytest.raises(
                ValueError, match="expected values that the first ones' format holds.*layer m.o_proj"
            )
            with expected if fails else nullcontext():
                load_into(layer, second[0])
                process(layer)
        assert torch.equal(dense_of(module), (first if fails else second)[1])
        assert module.weight.format == before or not graphs


def load_into(layer, tensors):
    parameters = dict(layer.named_parameters())
    for suffix, tensor in tensors.items():
        parameters[suffix].weight_loader(parameters[suffix], tensor)


def test_a_rotated_weight_in_the_general_format_stays_rotated():
    q, scale = torch.randint(-7, 8, (COUNT, N, K), dtype=torch.int8), torch.rand(COUNT, N, K // 64).to(BF16)
    weight = replace(jitgemm.pack_w4(q, scale, group_size=64, lhs_dtype=torch.float8_e4m3fn), rotation=128)
    expected = weight.dequantize()
    assert weight.format != weight.format.for_any_values
    general = for_any_values(weight)
    assert general.format == weight.format.for_any_values
    assert general.rotation == 128 and torch.equal(general.dequantize(), expected)
