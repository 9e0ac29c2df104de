"""Whole models in the real vLLM, without a GPU: its config, its model classes and its loaders, on one rank and two.

Needs vLLM on its CPU platform; scripts/vllm_contract.sh makes such an environment.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: scripts/vllm_contract.sh runs it")
transformers = pytest.importorskip("transformers")

import mxfp4
import vllm_layers  # noqa: F401  the processes of ranks need what it defines
from engine_models import EXPERTS, INTER, PROJ, SIZES, check, packed_modules, same, save, save_gpt_oss
from safetensors.torch import load_file, save_file
from served_layers import BF16, CONFIGS, mixture, scheme, stored
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

import jitgemm.vllm
from jitgemm.checkpoint.compressed_tensors_config import written_config, written_group
from jitgemm.weight.rotation import rotated, sylvester

jitgemm.vllm.register()

MOE = "model.layers.0.mlp.experts."
llama_or_moe = pytest.mark.parametrize("moe", [False, True], ids=["llama", "qwen3-moe"])


def replica(rank, replicas):
    """Arguments of one of so many data-parallel ranks."""
    return {"data_parallel_size": replicas, "data_parallel_rank": rank} if replicas > 1 else {}


@contextmanager
def process_group(file, rank=0, size=1, replicas=1):
    """A process group of gloo; this process is one rank of it: of `size` that share the model, or of so many replicas."""
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    parallel = ParallelConfig(tensor_parallel_size=size, enable_expert_parallel=replicas > 1, **replica(rank, replicas))
    config = VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=parallel)
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
        patch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)  # torch 2.13 has none on the CPU
        torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=size * replicas)
        init_distributed_environment(size, 0 if replicas > 1 else rank, "env://", rank, "gloo")
        ensure_model_parallel_initialized(size, 1)
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with process_group(tmp_path_factory.mktemp("ranks") / "store"):
        yield


def loaded(folder, **options):
    return loaded_with_config(folder, **options)[0]


def loaded_with_config(folder, change=lambda config: None, **options):
    """A model and vLLM's config; change: given the config before the model is made."""
    options |= {"quantization": "jitgemm", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    change(config)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def test_an_activation_order_survives_vllms_loaders(alone, tmp_path):
    quantization = CONFIGS["gptq"] | {"desc_act": True}
    order = torch.randperm(SIZES["hidden_size"], generator=torch.Generator().manual_seed(3)).to(torch.int32) // 32

    def shuffled(tensors):
        return {n: order.clone() if n.endswith("g_idx") and len(t) == len(order) else t for n, t in tensors.items()}

    dense = save(tmp_path, quantization, False, change=shuffled)
    weight = loaded(tmp_path).model.layers[0].mlp.gate_up_proj.jitgemm.weight
    assert weight.permutation.tolist() == torch.argsort(order.long(), stable=True).tolist() and dense


@llama_or_moe
@pytest.mark.parametrize("name", [
    "packed", "packed-asymmetric", "packed-corrected", "int-quantized", "gptq", "awq", "fp8-names", "fp8-blocks", "mxfp4", "quark",
    "modelopt-mxfp4", "nvfp4", "modelopt-nvfp4", "qserve", "torchao", "torchao-fp8", "bitblas", "executorch",
])  # fmt: skip
def test_a_checkpoint_is_loaded_bit_for_bit(alone, tmp_path, name, moe):
    dense = save(tmp_path, name, moe)
    check(loaded(tmp_path), dense)


def test_gpt_oss_is_loaded_bit_for_bit_with_its_biases(alone, tmp_path):
    whole = save_gpt_oss(tmp_path)
    [experts] = packed_modules(loaded(tmp_path)).values()
    assert (experts.gate.order, experts.gate.limit, experts.activation) == ("interleaved", 7.0, "e4m3")
    whole.check([experts], False)
    assert torch.equal(experts.w2.bias, whole.b2)


def test_deepseek_v4_s_experts_are_loaded_bit_for_bit(alone, tmp_path, monkeypatch):
    """Its attention has no tensors here; the shared expert is FP8 in blocks."""
    pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM's DeepSeek-V4 makes CUDA streams")
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)  # which its attention makes, and torch has not on the CPU
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

    for name in ("process_weights_after_loading", "_wrap_wo_a_process_weights_after_loading"):  # by vLLM's libraries
        monkeypatch.setattr(DeepseekV4CPUAttention, name, lambda *_: None)
    config = transformers.DeepseekV4Config(
        hidden_size=256, moe_intermediate_size=INTER, num_hidden_layers=1, vocab_size=96, num_attention_heads=8, q_lora_rank=128,
        num_experts_per_tok=2, n_routed_experts=EXPERTS, o_groups=2, o_lora_rank=128, index_n_heads=8, max_position_embeddings=64,
        mlp_layer_types=["moe"], layer_types=["sliding_attention"],
    )  # fmt: skip
    config.architectures, config.expert_dtype = ["DeepseekV4ForCausalLM"], "fp4"
    config.quantization_config = CONFIGS["fp8-blocks"] | {
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "ignored_layers": ["attn"],
    }
    config.save_pretrained(tmp_path)
    tensors, dense = {"embed.weight": torch.zeros(96, 256, dtype=BF16)}, {}
    for i, (name, n, k) in enumerate((("w1", INTER, 256), ("w2", 256, INTER), ("w3", INTER, 256))):
        for e in range(EXPERTS):
            parts, layer = mxfp4.parts(3 * e + i, n, k, shift=-12), f"layers.0.ffn.experts.{e}.{name}"
            tensors[f"{layer}.weight"] = parts.canonical.view(torch.int8)
            tensors[f"{layer}.scale"] = parts.scales.view(torch.float8_e8m0fnu)
            dense[e, name] = parts.dequantize_fp64()
        weight = stored(CONFIGS["fp8-blocks"], n, k, seed=i)[0]["weight"]
        powers = torch.ldexp(torch.ones(n // 128, k // 128), torch.randint(-6, -2, (n // 128, k // 128)))
        dense[name] = weight.double() * powers.repeat_interleave(128, 0).repeat_interleave(128, 1).double()
        layer = f"layers.0.ffn.shared_experts.{name}"
        tensors |= {f"{layer}.weight": weight, f"{layer}.scale": powers.to(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    modules = packed_modules(loaded(tmp_path))
    [experts] = [each for each in modules.values() if hasattr(each, "w13")]
    assert experts.activation == "e4m3_block" and experts.gate.limit == config.swiglu_limit
    for e in range(EXPERTS):
        same(experts.w13.weight[e], torch.cat([dense[e, "w1"], dense[e, "w3"]]), True)
        same(experts.w2.weight[e], dense[e, "w2"], True)
    shared = {name.rpartition(".")[2]: each for name, each in modules.items() if "shared_experts" in name}
    same(shared["gate_up_proj"].weight, torch.cat([dense["w1"], dense["w3"]]), True)
    same(shared["down_proj"].weight, dense["w2"], True)


def test_a_model_of_the_library_s_transforms_is_loaded_without_its_matrix(alone, tmp_path):
    """As SpinQuant's R4, whose matrix the file has behind the first layer's name."""
    apply = [
        {"targets": ["re:.*down_proj$"], "location": place, "inverse": bool(i)}
        for i, place in enumerate(("input", "weight_input"))
    ]
    said = scheme(size=128) | {
        "transform_config": {"config_groups": {"R4": {"type": "hadamard", "head_dim": 128, "apply": apply}}}
    }
    matrix = {"model.layers.0.mlp.down_proj.R4_input.weight": sylvester(128, torch.device("cpu"))}
    dense = save(tmp_path, said, False, change=lambda tensors: tensors | matrix)
    model = loaded(tmp_path)
    down = "model.layers.0.mlp.down_proj"
    check(model, dense | {down: rotated(dense[down].float()).double()})  # which the file has rotated
    rotations = {name: each.weight.rotation for name, each in packed_modules(model).items()}
    assert {name for name, rotation in rotations.items() if rotation} == {down}


def test_vllm_s_own_layers_rotate_the_inputs_of_linears_on_one_rank_and_not_of_experts(alone, monkeypatch):
    """As docs/quantize.md says of files that jitgemm quantize --rotation 128 writes."""
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.quantization import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.transform import linear, module

    theirs = CompressedTensorsConfig.from_config(written_config([written_group(["Linear"], 8, "int")], [], 128))
    theirs.packed_modules_mapping = {}

    def made():
        return RowParallelLinear(256, 64, bias=False, params_dtype=BF16, quant_config=theirs, prefix="m.o_proj")

    assert type(made().quant_method) is linear.CompressedTensorsLinearTransformMethod
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(NotImplementedError, match="transforms with tensor parallelism"):
        made()
    of_experts = list((Path(compressed_tensors.__file__).parent / "compressed_tensors_moe").glob("*.py"))
    assert of_experts and not any("transform" in file.read_text() for file in of_experts)


@pytest.mark.parametrize("moe, head", [(False, False), (False, True), (True, False)])
def test_a_model_that_jitgemm_saved_is_loaded_bit_for_bit(alone, tmp_path, moe, head):
    """Its output layer, too, if it packed that; vLLM fills up 96 rows to 128."""
    dense = save(tmp_path, "saved", moe, head=head)
    model = loaded(tmp_path)
    check(model, dense)
    assert hasattr(model.lm_head, "jitgemm") == head and model.lm_head.weight.dtype == BF16


@llama_or_moe
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_in_floats_is_quantised_layer_by_layer(alone, tmp_path, bits, moe):
    dense = save(tmp_path, "floats", moe)
    options = {"bits": bits, "activation": "int8"} | ({"group_size": 64} if bits == 4 else {})
    model = loaded(tmp_path, hf_overrides={"jitgemm": options})
    check(model, dense, exact=False)
    kinds = {(each.activation, next(each.buffers()).device.type) for each in packed_modules(model).values()}
    assert kinds == {("int8", "cpu")}


def reload(model, config, folder, change=dict):
    """As `reload_weights` of vLLM's model runner; change: the files' tensors."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    config.model_config.model = str(folder)
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        model.load_weights(change(load_file(folder / "model.safetensors")).items())
        finalize_layerwise_reload(model, config.model_config)


def packed_buffers(model):
    """All tensors of packed weights, by name: memory that CUDA graphs hold."""
    modules = packed_modules(model).items()
    return {f"{name}.{key}": buffer for name, module in modules for key, buffer in module.named_buffers()}


@llama_or_moe
@pytest.mark.parametrize("name", ["packed", "packed-tensor", "gptq", "fp8", "fp8-blocks", "floats", "saved"])
def test_a_checkpoint_that_vllm_loads_again_goes_to_the_same_memory(alone, tmp_path, name, moe):
    save(tmp_path / "first", name, moe)
    model, config = loaded_with_config(tmp_path / "first")
    addresses = {key: buffer.data_ptr() for key, buffer in packed_buffers(model).items()}
    dense = save(tmp_path / "second", name, moe, seed=100)
    reload(model, config, tmp_path / "second")
    assert {key: buffer.data_ptr() for key, buffer in packed_buffers(model).items()} == addresses
    check(model, dense, exact=name != "floats")


@llama_or_moe
def test_a_partial_update_raises_and_the_old_weights_serve_on(alone, tmp_path, moe):
    folders = [tmp_path / each for each in ("first", "second")]
    for seed, folder in enumerate(folders):
        dense = save(folder, "packed", moe, seed=100 * seed)
    model, config = loaded_with_config(folders[0])
    before = {name: buffer.clone() for name, buffer in packed_buffers(model).items()}
    gone = "experts.3.down_proj.weight_scale" if moe else "o_proj.weight_scale"

    def part(tensors):
        return {name: each for name, each in tensors.items() if not name.endswith(gone)}

    with pytest.raises(ValueError, match="weight_scale.*: expected numbers"):
        reload(model, config, folders[1], part)
    layer = "experts" if moe else "o_proj"
    kept = [
        name for name, buffer in packed_buffers(model).items() if layer in name and torch.equal(buffer, before[name])
    ]
    assert kept == [name for name in before if layer in name] != []
    reload(model, config, folders[1])
    check(model, dense)


def test_experts_that_jitgemm_saved_are_not_mixed_with_weights_from_elsewhere(alone, tmp_path):
    """As a trainer hands them over: experts would stay those of the files."""
    for number, folder in enumerate(("first", "second")):
        save(tmp_path / folder, "saved", True, seed=number)
    model, config = loaded_with_config(tmp_path / "first")
    others = load_file(tmp_path / "second" / "model.safetensors")
    with pytest.raises(
        ValueError, match="weights: expected those of a path for a model with experts that jitgemm packed"
    ):
        reload(model, config, tmp_path / "first", lambda tensors: others)


@pytest.mark.parametrize("name", ["packed", "floats", "saved"])
def test_a_model_comes_back_from_sleep(alone, tmp_path, name):
    """Level 2 discards what is on the GPU but for buffers, which vLLM keeps; then all is loaded again."""
    save(tmp_path, name, True)
    model, config = loaded_with_config(tmp_path)
    kept = {key: buffer.clone() for key, buffer in model.named_buffers()}
    assert packed_buffers(model).keys() <= {re.sub(r"\.(jitgemm|routed_experts)\b", "", key) for key in kept}
    experts = next(m for m in model.modules() if hasattr(m, "jitgemm") and hasattr(m.jitgemm, "w13"))
    torch.manual_seed(2)
    x, ids = torch.randn(5, SIZES["hidden_size"], dtype=BF16), torch.randint(0, EXPERTS, (5, 2)).int()
    weights = torch.rand(5, 2)
    before = experts.quant_method.apply(experts, x, weights, ids, None, None)
    norm = model.model.norm.weight.clone()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.view(torch.uint8).fill_(0xFF) if tensor.dim() else tensor.data.fill_(-1)
    for key, buffer in model.named_buffers():
        buffer.data.copy_(kept[key])
    assert torch.equal(experts.quant_method.apply(experts, x, weights, ids, None, None), before)
    for tensor in packed_buffers(model).values():  # reload_weights alone brings them, too
        tensor.view(torch.uint8).fill_(0xFF)
    reload(model, config, tmp_path, lambda tensors: dict(sorted(tensors.items())))  # weight_shape is each layer's last
    assert torch.equal(experts.quant_method.apply(experts, x, weights, ids, None, None), before)
    assert torch.equal(model.model.norm.weight, norm)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_is_quantised_on_request(alone, tmp_path, tied):
    save(tmp_path, "packed", False, tied=tied)
    model = loaded(tmp_path, hf_overrides={"jitgemm": {"lm_head": "int8"}})
    embedding = model.model.embed_tokens.weight.double()
    file = load_file(tmp_path / "model.safetensors")
    expected = (embedding if tied else file["lm_head.weight"].double())[:96]
    head = model.lm_head.jitgemm
    found = head.weight.dequantize()[:96].double()
    assert model.lm_head.weight.dtype == BF16  # which LoRA reads
    assert head.weight.bits == 8 and (found - expected).norm() < 0.01 * expected.norm()
    x = torch.randn(3, SIZES["hidden_size"], dtype=BF16)
    logits = model.lm_head.quant_method.apply(model.lm_head, x)[:, :96].double()
    wanted = x.double() @ expected.T
    assert (logits - wanted).norm() < 0.02 * wanted.norm()


def rank_of_two(rank, folder, cases):
    """In a process of its own."""
    with process_group(folder / "store", rank, 2):
        for name, (split, dense) in cases.items():
            model = loaded(folder / name, tensor_parallel_size=2, enable_expert_parallel=split == "ep")
            check(model, dense, at=(split, rank, 2))
            print(f"rank {rank} holds its part of {name}")  # the last one before an error
    os._exit(0)  # as scripts/benchmark_lib/divided.py


def test_each_of_two_ranks_holds_its_part(tmp_path):
    cases = {}
    for kind in ("packed", "wide", "fp8-blocks", "saved"):
        for moe, split in ((False, "tp"), (True, "tp"), (True, "ep")):
            name, said = f"{kind} {moe} {split}", scheme(size=128) if kind == "wide" else kind
            cases[name] = split, save(tmp_path / name, said, moe, head=not moe)
    torch.multiprocessing.spawn(rank_of_two, (tmp_path, cases), 2)


# ---- experts whose ranks have other tokens ----------------------------------------------------------------------------

TOKENS = (1, 5)


def rank_with_tokens(rank, folder, dense):
    """In a process of its own: what vLLM's runner makes of this rank's tokens."""
    from vllm.forward_context import set_forward_context

    with process_group(folder / "store", rank, replicas=2):
        options = {"hf_overrides": {"jitgemm": {"exchange": "nvlink"}}, **replica(rank, 2)}
        model, config = loaded_with_config(folder, enable_expert_parallel=True, **options)
        runner = model.model.layers[0].mlp.experts
        torch.manual_seed(rank)
        x, ids = (
            torch.randn(TOKENS[rank], SIZES["hidden_size"]).bfloat16(),
            torch.rand(TOKENS[rank], EXPERTS).argsort(1),
        )
        weights, ids = torch.rand(TOKENS[rank], 2), ids[:, :2].int()
        runner.router.select_experts = lambda **_: (weights, ids)  # vLLM's is in its libraries
        with set_forward_context(None, config, len(x), torch.tensor(TOKENS, dtype=torch.int32)):
            out = runner(x, torch.zeros(len(x), EXPERTS, dtype=BF16)).double()
        assert not runner.do_naive_dispatch_combine
        runner.routed_experts.quant_method.split = None
        assert runner.do_naive_dispatch_combine
        expected = mixture(x, ids, weights, dense)
        assert (out - expected).norm() < 0.06 * expected.norm()
    os._exit(0)


def test_ranks_send_their_tokens_themselves(tmp_path):
    """On a CPU jitgemm's collectives carry them; vLLM's runner, which asks who does, is the same."""
    dense = save(tmp_path, "packed", True)
    experts = {(e, proj): dense[f"{MOE}{e}.{proj}"] for e in range(EXPERTS) for proj in PROJ}
    torch.multiprocessing.spawn(rank_with_tokens, (tmp_path, experts), 2)


# ---- experts that move, experts with adapters ------------------------------------------------------------------------


def balanced(config):
    """--enable-eplb with two redundant experts, which vLLM's arguments take on a GPU alone."""
    config.parallel_config.enable_eplb = True
    config.parallel_config.eplb_config.num_redundant_experts = 2


def rank_that_rebalances(rank, folder, cases):
    """In a process of its own."""
    with process_group(folder / "store", rank, 2):
        for name, down in cases.items():
            model = loaded(folder / name, change=balanced, tensor_parallel_size=2, enable_expert_parallel=True)
            rebalance(rank, model, down)
            print(f"rank {rank} has moved experts of {name}")  # the last one before an error
    os._exit(0)


def rebalance(rank, model, down):
    """Experts before vLLM moves them, and after."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    [layer] = (m for m in model.modules() if hasattr(m, "jitgemm") and hasattr(m.jitgemm, "w13"))
    rows, group = list(layer.get_expert_weights()), get_ep_group().cpu_group
    physical = torch.tensor([[0, 1, 2, 3, 0, 1]]), torch.tensor([[2, 3, 1, 0, 3, 2]])
    addresses, communicator = [row.data_ptr() for row in rows], TorchDistNcclEplbCommunicator(group)
    for moment in (0, 1):
        held = layer.jitgemm.w2.weight.dequantize().double()
        assert torch.equal(held, down[physical[moment][0].chunk(2)[rank]])
        if moment == 0:
            rearrange_expert_weights_inplace(*physical, [rows], list(map(torch.empty_like, rows)), group, communicator)
    assert [row.data_ptr() for row in layer.get_expert_weights()] == addresses


def test_experts_that_vllm_moves_between_ranks_stay_whole(tmp_path):
    """Four experts and two redundant ones on two ranks, rearranged by vLLM's own function."""
    cases = {}
    for name in ("packed", "fp8", "saved"):
        dense = save(tmp_path / name, name, True)
        cases[name] = torch.stack([dense[f"{MOE}{e}.down_proj"] for e in range(EXPERTS)])
    torch.multiprocessing.spawn(rank_that_rebalances, (tmp_path, cases), 2)


def test_vllm_s_lora_layer_takes_packed_experts(alone, tmp_path):
    """Its own class around a layer of a model: what it asks of the method, the kernel and the layer."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from vllm.v1.worker.workspace import init_workspace_manager
    from vllm_kernels import Kernels

    save(tmp_path, "packed", True)
    model, config = loaded_with_config(tmp_path, enable_lora=True, max_loras=1, max_lora_rank=8)
    init_workspace_manager(torch.device("cpu"))
    runner = model.model.layers[0].mlp.experts
    with set_current_vllm_config(config):
        layer = FusedMoEWithLoRA(runner)
        layer.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=BF16))
        layer.set_mapping(Kernels(EXPERTS))
        for each in (*layer.w13_lora_a_stacked, *layer.w2_lora_a_stacked):
            each.normal_(std=0.1)
        inner = runner.routed_experts
        x, ids = torch.randn(5, SIZES["hidden_size"]).bfloat16(), torch.randint(0, EXPERTS, (5, 2))
        weights = torch.rand(5, 2)
        call = (inner, x, weights, ids.int(), None, None)
        without = inner.quant_method.apply(*call)
        assert torch.equal(without, inner.jitgemm.run(x, ids, weights))
        for each in (*layer.w13_lora_b_stacked, *layer.w2_lora_b_stacked):
            each.normal_()
        adapted = inner.quant_method.apply(*call)
        assert not torch.equal(adapted, without)
    with pytest.raises(ValueError, match="reload_weights: expected a model without LoRA on experts"):
        reload(model, config, tmp_path)
