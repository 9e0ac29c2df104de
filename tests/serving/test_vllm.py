"""What vLLM alone has: its signatures, exchanges of tokens, EPLB and LoRA, the weight that MLA reads, models whose rows it
sorts. What it has in common with SGLang, test_served*.py ask.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import EXPERTS, SPLITS, process, vllm
from fresh_python import fresh_python
from served_layers import BF16, CONFIGS, SHARDS, dense_of, expert_tensors, mixture, packed_module, routed, saved, stored
from vllm_kernels import Kernels
from vllm_layers import REAL, rank

import jitgemm
from jitgemm.activations.scheme import Gate
from jitgemm.vllm import config as configs

JitGemmConfig, JitGemmLinearMethod, JitGemmMoEMethod = vllm.Config, vllm.Linear, vllm.Experts
_experts = import_module("jitgemm.vllm.experts")
JitGemmExperts, JitGemmBatchedExperts = _experts.JitGemmExperts, _experts.JitGemmBatchedExperts
ROOT = Path(__file__).resolve().parents[2]
VERSIONS = json.loads((ROOT / "tests" / "helpers" / "vllm_signatures.json").read_text())
SIZES = 4, 64, 64


# ---- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "ours", [JitGemmConfig, JitGemmLinearMethod, JitGemmMoEMethod, JitGemmExperts, JitGemmBatchedExperts]
)
def test_what_is_overridden_has_vllms_signature(ours, version):
    bases = VERSIONS[version]["bases"]
    own = [each for each in ours.__mro__ if each.__module__.startswith("jitgemm")]
    by_name = {path.partition(":")[2]: described for path, described in bases.items()}
    theirs = {}
    for each in reversed(ours.__mro__[len(own) :]):
        theirs |= by_name.get(each.__name__, {})
    members = {name: member for each in reversed(own) for name, member in vars(each).items()}
    checked = 0
    for name, described in theirs.items():
        head, _, rest = described.partition("(")
        assert "abstract" not in head or name in members, f"{name} is abstract in vLLM"
        if name not in members or name == "__init__":
            continue
        raw = members[name]
        function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        mine = [stars.get(each.kind, "") + each.name for each in inspect.signature(function).parameters.values()]
        expected = [part.partition("=")[0] for part in rest[:-1].split(", ") if part]
        assert [each for each in mine if each != "self"] == [each for each in expected if each != "self"], name
        checked += 1
    assert checked >= 3


@pytest.mark.skipif(not REAL, reason="needs vLLM: scripts/vllm_contract.sh runs it")
def test_the_signatures_are_those_of_the_vllm_that_is_installed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from vllm_signatures import signatures

    installed = metadata.version("vllm").partition("+")[0]
    if installed not in VERSIONS:
        pytest.skip(f"scripts/vllm_signatures.py has not been run on {installed}")
    assert signatures() == VERSIONS[installed]


@pytest.mark.skipif(REAL, reason="needs the stand-in: scripts/vllm_contract.sh installs each version")
@pytest.mark.parametrize("version", sorted(VERSIONS)[:-1])
def test_layers_and_experts_work_with_the_signatures_of_older_versions(version):
    """A case of each thing that the plug-in does; the stand-in of this process has the newest version's."""
    files = [f"tests/serving/test_{name}.py" for name in ("served", "served_experts", "vllm")]
    cases = "add_up and packed-int8 or ranks_hold and part7 or k_and_v and gptq or taken_over or sorted_by_expert and fp8 or an_adapter and 20-None-packed"
    call = ["-q", "-p", "no:cacheprovider", *files, "-k", f"({cases} or joined_layers_that) and not sglang"]
    code = f"import os, pytest; os.chdir({str(ROOT)!r}); assert pytest.main({call}) == 0"
    done = fresh_python(code, {"JITGEMM_TEST_VLLM": version})
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10


def test_vllm_finds_the_plug_in_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["jitgemm"].partition(":")
    register = getattr(import_module(module), name)
    register()
    register()
    assert configs.get_quantization_config("jitgemm") is JitGemmConfig


# ---- the config ------------------------------------------------------------------------------------------------------


def test_a_config_travels_to_vllms_workers():
    config = pickle.loads(pickle.dumps(vllm.config(CONFIGS["gptq"], activation="int8")))
    assert (config.checkpoint, config.recipe.activation) == (CONFIGS["gptq"], "int8")
    assert vllm.serves(config, "model.a")


def test_headers_of_a_model_that_is_not_here_are_those_that_vllm_finds(monkeypatch):
    tensors, dense = stored(CONFIGS["gptq"], 64, 64)
    found = {f"m.o_proj.{name}": {"dtype": "F32", "shape": [*each.shape]} for name, each in tensors.items()}
    module = import_module("vllm.transformers_utils.config")
    monkeypatch.setattr(module, "get_safetensors_params_metadata", lambda model, *, revision=None: found)
    config = vllm.config(CONFIGS["gptq"])
    config.maybe_update_config("of/somebody", hf_config=SimpleNamespace())
    assert config._headers["m.o_proj"].keys() == tensors.keys()


def test_a_checkpoints_own_config_is_vllms_and_says_how_its_cache_is_quantised(monkeypatch):
    said, asked = {"strategy": "attn_head", "num_bits": 8, "type": "float"}, []
    own = SimpleNamespace(kv_cache_scheme=said, maybe_update_config=lambda *model: None)
    made = SimpleNamespace(from_config=lambda config: asked.append(config) or own)
    monkeypatch.setattr(configs, "get_quantization_config", lambda name: asked.append(name) or made)
    given = CONFIGS["packed"] | {"kv_cache_scheme": said}
    assert vllm.config(given).kv_cache_scheme == said and asked == ["compressed-tensors", given]
    assert vllm.config(None).kv_cache_scheme is None
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}, "quant_method": "modelopt"}
    assert vllm.config(modelopt)._checkpoints_own() is own and asked[2:] == ["modelopt", modelopt]  # as it was given


@pytest.mark.parametrize("model_type, name, served", [
    ("falcon", "saved", False), ("falcon", "gptq", True), ("falcon", "packed", True), ("bloom", "saved", False),
    ("bloom", "gptq", False), ("gpt_neox", "int8-quantized", True), ("chatglm", "gptq", True),
])  # fmt: skip
def test_models_whose_rows_vllm_sorts_are_served_from_tensors_with_rows(tmp_path, model_type, name, served):
    if name == "saved":
        config = vllm.of_folder(tmp_path, {"m.query_key_value": saved("4 bits", 192, 128)})
    else:
        config = vllm.told(CONFIGS[name], {"m.query_key_value": stored(CONFIGS[name], 192, 128)[0]})
    config._model = ("", SimpleNamespace(model_type=model_type), None)

    if served:
        layer = vllm.qkv(config, 128, heads=(64, 1, 1), prefix="m.query_key_value")
        assert isinstance(layer.quant_method, JitGemmLinearMethod)
        return
    try:  # vLLM's own kernels serve it, if it has some
        layer = vllm.qkv(config, 128, heads=(64, 1, 1), prefix="m.query_key_value")
        assert name != "saved" and not isinstance(layer.quant_method, JitGemmLinearMethod)
    except ValueError as error:
        assert "query_key_value: expected tensors with a row each" in str(error)


@pytest.mark.parametrize(
    "name", ["packed", "packed-static", "gptq", "awq", "fp8", "fp8-blocks", "float-quantized", None]
)
def test_mla_gets_a_layers_weight_and_lora_its_device(name):
    """From the attributes that vLLM knows, and a product with an identity: no static scale may round that."""
    if name is None:
        layer = vllm.row(vllm.config(None, bits=8), 128, 128, {"weight": torch.randn(128, 128)}, prefix="m.kv_b_proj")
    else:
        tensors, _ = stored(CONFIGS[name], 128, 128)
        tensors |= {"input_scale": torch.tensor([1e-4])} if "input_scale" in tensors else {}
        layer = vllm.row(CONFIGS[name], 128, 128, tensors, prefix="m.kv_b_proj")
    module = process(layer)
    if REAL:
        from vllm.lora.layers.utils import _get_lora_device
        from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

        assert _get_lora_device(layer) == module.blocks.device
        found = get_and_maybe_dequant_weights(layer, out_dtype=BF16)
    else:
        found = vllm.run(layer, torch.eye(128, dtype=BF16)).T
    assert not torch.equal(layer.weight, layer.weight)  # as vLLM asks of the heads of two models, to share one
    assert (layer.weight.device, layer.weight.dtype) == (module.blocks.device, BF16)  # MLA's input is cast to it
    exact = dense_of(module)
    assert ((found.double() - exact).abs() <= exact.abs() / 256 + 1e-30).all()


def test_kernels_of_vllms_with_other_bits_are_named(monkeypatch):
    said = vllm.log(monkeypatch)
    config = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=True)))
    monkeypatch.setattr(configs, "get_current_vllm_config_or_none", lambda: config)
    vllm.config(None, tp_invariant=True).warn_of_others()
    monkeypatch.setattr(configs, "get_current_vllm_config_or_none", lambda: None)
    vllm.row(vllm.config(None, tp_invariant=True), 512, 64)
    monkeypatch.setattr(JitGemmConfig, "batch_invariant", True)
    vllm.row(vllm.config(None, tp_invariant=True), 512, 64)
    assert [text.rpartition("; set ")[2] for text in said if "tp_invariant" in text] == [
        "pass_config.fuse_allreduce_rms to false in --compilation-config", "VLLM_BATCH_INVARIANT=1",
        "VLLM_BATCH_INVARIANT=1",
    ]  # fmt: skip


# ---- tokens that others send -----------------------------------------------------------------------------------------


def test_a_modular_kernel_gets_the_same_results_into_its_output(workspaces):
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    layer = vllm.experts(CONFIGS["packed"], SIZES, tensors, ("ep", 1, 2))
    method = layer.quant_method
    assert method.moe_kernel is None  # nobody exchanges tokens
    module = layer.jitgemm
    blocks = module.w13.blocks, module.w2.blocks
    kernel = JitGemmExperts(module, layer.moe_config, method.get_fused_moe_quant_config(layer))
    x, ids, weights = routed(4)
    assert kernel.moe_problem_size(x, *blocks, ids) == (2, 6, 128, 64, 2)
    shape = kernel.workspace_shapes(6, 128, 64, 2, 4, 2, None, layer.activation)[2]
    wanted, spare = vllm.run_experts(layer, x, ids, weights), torch.empty(0)
    for weighed, expected in ((False, wanted), (True, vllm.run_experts(layer, x, ids, torch.ones_like(weights)))):
        out = torch.empty(shape, dtype=BF16)  # weighed: by whoever has sent tokens, on their input
        call = out, x, *blocks, weights, ids, layer.activation, 4, layer.expert_map, None, None, spare, spare, None
        kernel.apply(*call, weighed)
        assert torch.equal(out, expected)
    if not REAL:
        return
    from vllm.model_executor.layers.fused_moe.all2all_utils import make_moe_prepare_and_finalize_no_dp_ep
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    method.moe_kernel = FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), kernel)
    with rank():
        assert torch.equal(vllm.run_experts(layer, x, ids, weights), wanted)


def batched(monkeypatch, config, sizes, ep, max_num_tokens=8, **options):
    """Experts on a rank to which a backend sends tokens sorted by expert; vLLM's reference stands for the backend."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    asked = []

    def exchange(moe, quant_config, routing_tables=None, allow_new_interface=False):
        asked.append(quant_config)
        return BatchedPrepareAndFinalize(max_num_tokens, moe.num_local_experts, 1, ep[0])

    owner = import_module("vllm.model_executor.layers.fused_moe.all2all_utils")
    monkeypatch.setattr(owner, "maybe_make_prepare_finalize", exchange)
    tensors, dense = expert_tensors(config, *sizes)
    layer = vllm.experts(config, sizes, tensors, ("ep", *ep), all2all="deepep_low_latency", **options)
    process(layer)  # again, as the loader may
    assert layer.jitgemm.batched and len(asked) == 1
    return layer, dense, asked[0]


@pytest.mark.parametrize("name", ["packed", "packed-asymmetric", "packed-int8", "fp8", "int8-quantized", "w4afp8"])
def test_tokens_that_come_sorted_by_expert_add_up_to_the_dequantised_mixture(monkeypatch, workspaces, name):
    """Each rank sends its own tokens to all ranks' experts."""
    x, ids, weights = routed(4, tokens=7)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for _, *place in SPLITS["ep"]:
        layer, dense, config = batched(monkeypatch, CONFIGS[name], SIZES, place)
        kernel = layer.quant_method.moe_kernel.fused_experts
        assert type(kernel) is JitGemmBatchedExperts and getattr(config, "quant_dtype", None) is None
        with rank():
            found = vllm.run_experts(layer, x, ids, weights).double()
        module = layer.jitgemm
        same = module.run(x, ids, weights, expert_map=layer.expert_map)
        assert (found - same.double()).norm() < 0.01 * same.double().norm()
        total += found
    wanted = mixture(x, ids, weights, dense)
    assert (total - wanted).norm() < 0.06 * wanted.norm()


def test_tokens_that_come_in_8_bits_are_not_quantised_again(monkeypatch):
    """DeepEP's form: e4m3 with a scale for each token and 128 k, room for the tokens of two ranks, few of them live."""
    layer, dense, config = batched(monkeypatch, CONFIGS["fp8-blocks"], (4, 256, 256), (1, 2))
    assert (config.quant_dtype, list(config.block_shape)) == (torch.float8_e4m3fn, [128, 128])
    assert layer.jitgemm.activation == "e4m3_block"
    kernel = layer.quant_method.moe_kernel.fused_experts
    live, x = torch.tensor([3, 0], dtype=torch.int64), torch.randn(2, 16, 256, dtype=BF16)
    q, scale = jitgemm.quantize_activations(x, torch.float8_e4m3fn, scheme="block")
    q.view(torch.uint8)[0, 3:] = 0x7F  # NaN
    module, ids = layer.jitgemm, torch.zeros(8, 2, dtype=torch.int64)
    blocks = module.w13.blocks, module.w2.blocks
    assert kernel.moe_problem_size(q, *blocks, ids) == (2, 16, 512, 256, 2)
    out = torch.full(kernel.workspace_shapes(16, 512, 256, 2, 4, 2, None, layer.activation)[2], 7.0, dtype=BF16)
    kernel.apply(
        out, q, *blocks, torch.ones(8, 2), ids, layer.activation, 4, layer.expert_map, scale, None, torch.empty(0),
        torch.empty(0), SimpleNamespace(expert_num_tokens=live), False,
    )  # fmt: skip
    values = q.double()[0, :3] * scale.double()[0, :3].repeat_interleave(128, 1)
    w1, w3, w2 = (dense[2, proj] for proj in SHARDS)
    wanted = (torch.nn.functional.silu(values @ w1.T) * (values @ w3.T)) @ w2.T
    assert (out[0, :3].double() - wanted).norm() < 0.03 * wanted.norm()
    assert bool((out[0, 3:] == 7).all()) and bool((out[1] == 7).all())


@pytest.mark.parametrize("options, message", [
    ({"all2all": "deepep_low_latency", "pads": 128}, "expected one for tokens of 64 values, got .*pads them to 128"),
    *(({"all2all": each}, f"all2all_backend: expected one that exchanges .* got {each}") for each in ("passthrough", "moonep")),
])  # fmt: skip
def test_a_backend_that_pads_tokens_or_leaves_their_exchange_to_the_experts_is_an_error(options, message):
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    with pytest.raises(ValueError, match=message):
        vllm.experts(CONFIGS["packed"], SIZES, tensors, ("ep", 0, 2), **options)


def test_situ_without_its_beta_is_an_error():
    layer = vllm.experts(CONFIGS["packed"], (2, 64, 64), expert_tensors(CONFIGS["packed"], 2, 64, 64)[0], packed=False,
                         **vllm.gates["situ"])  # fmt: skip
    layer.quant_method.moe = SimpleNamespace(**{**vars(layer.moe_config), "activation_situ_beta": None})
    with pytest.raises(ValueError, match="activation_situ_beta: expected a number for the activation situ, got None"):
        process(layer)


# ---- biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", "gptq", "awq", "fp8", "fp8-blocks", "int8-quantized"])
@pytest.mark.parametrize("split", ["tp", "ep"])
def test_biases_of_experts_are_the_files_on_every_rank(name, split):
    inter = 256 if name == "fp8-blocks" else 64
    tensors, _ = expert_tensors(CONFIGS[name], 4, 64, inter)
    biases = {(e, proj): torch.randn(64 if proj == "down_proj" else inter, dtype=BF16) for e, proj in tensors}
    for key, bias in biases.items():
        tensors[key]["bias"] = bias
    ranks = [vllm.experts(CONFIGS[name], (4, 64, inter), tensors, at, **vllm.biased).jitgemm for at in SPLITS[split]]
    first, second = ([getattr(module, part).bias for module in ranks] for part in ("w13", "w2"))
    gate, up, down = (torch.stack([biases[e, proj] for e in range(4)]) for proj in SHARDS)
    if split == "ep":
        assert torch.equal(torch.cat(first), torch.cat([gate, up], 1)) and torch.equal(torch.cat(second), down)
        return
    halves = [torch.cat([gate.chunk(2, 1)[number], up.chunk(2, 1)[number]], 1) for number in range(2)]
    assert all(map(torch.equal, first, halves))
    assert torch.equal(second[0], down) and second[1] is None  # ranks' results are summed


def test_an_expert_without_its_bias_is_an_error():
    tensors, _ = expert_tensors(CONFIGS["packed"], *SIZES)
    for key in list(tensors)[:-1]:
        tensors[key]["bias"] = torch.zeros(64, dtype=BF16)
    with pytest.raises(ValueError, match="w2_bias: expected numbers .* for number 3's down_proj"):
        vllm.experts(CONFIGS["packed"], SIZES, tensors, **vllm.biased)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

ADAPTED = {"more": {"is_lora_enabled": True}}


def context(experts_here, hidden, inter, gates=2, rank=8):
    """One adapter for all tokens, as vLLM's layer sets it."""
    torch.manual_seed(3)

    def pair(n, k):
        first, second = (
            torch.randn(1, experts_here, rank, k, dtype=BF16),
            torch.randn(1, experts_here, n, rank, dtype=BF16),
        )
        return first / k**0.5, second / 2

    first, second = zip(*(pair(inter, hidden) for _ in range(gates)))
    a2, b2 = pair(hidden, inter)
    return SimpleNamespace(
        w13_lora_a_stacked=first, w13_lora_b_stacked=second, w2_lora_a_stacked=(a2,), w2_lora_b_stacked=(b2,),
        adapter_enabled=torch.ones(2, dtype=torch.int32), max_loras=1, top_k=2, w13_num_slices=gates,
        fully_sharded=False, tp_rank=0, tp_size=1, local_num_experts=experts_here, punica_wrapper=Kernels(experts_here),
        use_tuned_config=False, enable_moe_shared_loras=False, aux_stream=None, events=None,
        local_token_lora_mapping=None, original_hidden_states=None,
    )  # fmt: skip


def with_adapter(dense, ctx, first=0, count=4):
    """Experts' weights with the adapter's products added."""
    first_ones, second_ones = ((*vars(ctx)[f"w13_lora_{i}_stacked"], *vars(ctx)[f"w2_lora_{i}_stacked"]) for i in "ab")
    found = dict(dense)
    for proj, a, b in zip(SHARDS, first_ones, second_ones):
        for e in range(count):
            found[first + e, proj] = dense[first + e, proj] + b[0, e].double() @ a[0, e].double()
    return found


@pytest.mark.parametrize("name", ["packed", "fp8"])
@pytest.mark.parametrize("place", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("tokens", [3, 20])
def test_experts_with_an_adapter_compute_the_sum_of_both(workspaces, name, place, tokens):
    """One of zeros changes no bit."""
    tensors, dense = expert_tensors(CONFIGS[name], *SIZES)
    at = ("tp", 0, 1) if place is None else ("ep", *place)
    layer = vllm.experts(CONFIGS[name], SIZES, tensors, at, **ADAPTED)
    here = 4 if place is None else 2
    ctx = context(here, 64, 64)
    zeros = {
        each: tuple(map(torch.zeros_like, vars(ctx)[each])) for each in ("w13_lora_b_stacked", "w2_lora_b_stacked")
    }
    kernel = layer.quant_method.moe_kernel.fused_experts
    assert kernel.supports_lora() and layer.w2_weight.shape[0] == layer.w13_weight.shape[0] == here
    x, ids, weights = routed(4, tokens)
    found = []
    with rank():
        for adapter in (None, SimpleNamespace(**vars(ctx) | zeros), ctx):
            if adapter is not None:
                kernel.set_lora_context(adapter)
            found.append(vllm.run_experts(layer, x, ids, weights))
    assert torch.equal(found[0], layer.jitgemm.run(x, ids, weights, expert_map=layer.expert_map))
    assert torch.equal(found[1], found[0])
    first = 0 if place is None else 2 * place[0]
    mine = (ids >= first) & (ids < first + here)
    expected = mixture(x, ids, weights * mine, with_adapter(dense, ctx, first, here))
    assert (found[2].double() - expected).norm() < 0.06 * expected.norm()
    assert (found[2].double() - found[0].double()).norm() > 0.15 * expected.norm()


def test_saved_experts_with_gates_in_another_order_take_no_adapters(tmp_path):
    config = vllm.of_folder(tmp_path, {EXPERTS: packed_module(gate=Gate("silu", "interleaved"))})
    with pytest.raises(ValueError, match="m.experts.gate: expected order gate_up with LoRA.*, got interleaved"):
        vllm.experts(config, (4, 128, 384), None, **vllm.biased, **ADAPTED)
