"""Linear layers of a transformer from its Hugging Face config.json, as one tensor-parallel rank holds them, and what
the file says of how they are quantised.

Reads a dictionary and does arithmetic: no torch, no network. Sharding follows what serving engines do:
projections out of the hidden state are cut along n (columns), projections back into it along k (rows), key and value
heads are repeated when there are more ranks than heads, and every rank keeps its slice of every expert, or with expert
parallelism some of the experts whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from jitgemm.activations.kernel import Gate
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, LHS_GROUP

DENSE_MODELS = frozenset(
    "llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text granite olmo2 phi3 smollm3 seed_oss".split()
)
"""model_type of decoders with q, k, v, o and gated gate, up, down projections in every layer."""

_W8A8 = dict.fromkeys(("fp8", "w8a8-fp8", "fbgemm-fp8", "modelopt"), "fp8")
_W8A8 |= dict.fromkeys(("blockwise-int8", "w8a8-int8"), "int8")
"""Methods of 8-bit weights, and the type of their activations."""
_MODELOPT = {"FP8": ("static",), "FP8_PER_CHANNEL_PER_TOKEN": ()}
"""ModelOpt's algorithms of those, and the variants of their activations."""
_CODES = {(4, "int", False): None, (4, "int", True): None, (8, "int", False): "int8", (8, "float", False): "fp8"}
"""Compressed-tensors' weights by num_bits, type and whether they have zero points: the activations that those of 8 bits
must meet."""

DEEPSEEK_MODELS = frozenset({"deepseek_v2", "deepseek_v3"})
"""Those with latent attention (MLA)."""
KNOWN_MODELS = DENSE_MODELS | DEEPSEEK_MODELS | {"mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe"}
"""And experts: in every layer of mixtral and gpt_oss; of the others' layers some may be dense, and qwen2_moe and
DeepSeek's have shared experts."""

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "experts": ("experts.gate_proj", "experts.up_proj", "experts.down_proj"),
}
"""Projections as serving engines join them, and what each is made of."""

_GATES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Kinds of gates by hidden_act."""

Form = Enum("Form", {name: name for name in ("both", "fused", "separate")}, type=str)
"""Which projections a model's layers are made of."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """One shape of linear layer: out[m, n] = x[m, k] · weight[n, k]ᵀ on one tensor-parallel rank.

    Attributes:
        name: the projection's name in the checkpoint, such as "down_proj" or "experts.up_proj".
        n, k: rows and columns of the weight on this rank.
        count: how many weights of this shape and name the model has (every expert of every layer counts).
    """

    name: str
    n: int
    k: int
    count: int = 1

    @property
    def label(self) -> str:
        return f"{self.name} {self.n}x{self.k}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of a layer on one rank, as `jitgemm.fused_experts` runs them.

    Attributes:
        experts: how many this rank has.
        hidden, inter: w13 is [2 * inter, hidden], w2 [hidden, inter]; inter on this rank.
        top_k: experts of a token, on all ranks.
        gate: what stands between the GEMMs.
        count: layers of the model that have such experts.
    """

    experts: int
    hidden: int
    inter: int
    top_k: int
    gate: Gate
    count: int = 1
    name: str = "experts"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(n, k) of w13 and of w2."""
        return (2 * self.inter, self.hidden), (self.hidden, self.inter)

    @property
    def label(self) -> str:
        return " ".join([self.name, str(self.experts), *(f"{n}x{k}" for n, k in self.shapes)])

    def to_dict(self) -> dict[str, object]:
        limit = None if self.gate.limit == math.inf else self.gate.limit
        return asdict(self) | {"gate": self.gate._asdict() | {"limit": limit}}


Layer = LinearLayer | ExpertLayer


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a quantization_config says of all layers.

    Attributes:
        method: its quant_method.
        group_size: 0 for per channel.
        zero_point: weights have integer zero points.
        lhs: type of the activations, "fp8" or "int8"; None where it says nothing of them.
        variants: what the activations' quantiser does besides: of "affine", "static", "permuted", "block".
        bits: of a weight's codes; 8-bit ones have the type of the activations.
        scale_type: of the weights' scales, as the method's tools write them: the file does not say.
    """

    method: str
    group_size: int
    zero_point: bool
    lhs: str | None = None
    variants: tuple[str, ...] = ()
    bits: int = 4
    scale_type: str = "bf16"


def read_config(path: str | Path) -> dict[str, Any]:
    """The dictionary in a config.json, or in the config.json of a model's folder.

    What ModelOpt writes of the quantisation into a file beside it stands as its quantization_config.

    Raises:
        ValueError: there is no such file, or it does not hold a JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config, beside = _read_object(file), file.with_name("hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _read_object(beside).get("quantization")
    return config


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model config {str(file)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model config {str(file)!r}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"model config {str(file)!r}: expected a JSON object, got {type(config).__name__}")
    return config


def linear_layers(
    config: Mapping[str, Any], tp: int = 1, *, ep: int = 1, group_size: int = 0, form: Form = Form.both
) -> list[Layer]:
    """The linear layers and experts that W4A8 applies to, as one rank holds them. All ranks hold the same shapes.

    Embeddings, lm_head and the experts' router are left out: checkpoints keep them in 16 bits.

    Args:
        config: a Hugging Face config.json as a dictionary. A multimodal model's `text_config` is used where it has one.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks: each has 1 / ep of the experts, whole, whatever tp is.
        group_size: values of k that share a scale; 0 for per channel. Rows are cut along k at group borders only.
        form: separate for the projections as checkpoints name them (q_proj, k_proj, …, those of an expert each a call
            of its own), fused for qkv_proj, gate_up_proj and experts in grouped GEMMs as serving engines run them, both
            for either.

    Returns:
        Layers with unique labels, in the order in which a forward pass meets them.

    Raises:
        ValueError: the architecture is not known, a size is missing from the config, or it cannot be cut into `tp`
            or `ep`; the message says what would fit.
    """
    for name, ranks in (("tp", tp), ("ep", ep)):
        if ranks < 1:
            raise ValueError(f"{name}: expected at least 1, got {ranks}")
    config = _text_config(config)
    model_type = config["model_type"]
    attention = _latent_attention if model_type in DEEPSEEK_MODELS else _attention
    layers: list[Layer] = [*attention(config, tp, group_size)]
    depth = _size(config, "num_hidden_layers")
    if ep > 1 and model_type in DENSE_MODELS:
        raise ValueError(f"ep={ep}: expected 1 for {model_type}, which has no experts")
    if model_type in DENSE_MODELS:
        layers += _mlp(config, "", _size(config, "intermediate_size"), tp, group_size, depth)
    elif model_type in ("mixtral", "gpt_oss"):
        layers += _experts(config, "num_local_experts", "intermediate_size", tp, ep, group_size, depth)
    elif model_type in DEEPSEEK_MODELS:
        layers += _deepseek_moe(config, tp, ep, group_size, depth)
    else:
        layers += _qwen_moe(config, tp, ep, group_size, depth)
    names = {layer.name.rpartition(".")[2] for layer in layers}
    parts = [part for whole, of in _FUSED.items() if whole in names for part in of]
    dropped = {Form.both: (), Form.fused: parts, Form.separate: _FUSED}[Form(form)]
    layers = [layer for layer in layers if not {layer.name, layer.name.rpartition(".")[2]} & set(dropped)]
    for layer in layers:
        for n, k in layer.shapes if isinstance(layer, ExpertLayer) else [(layer.n, layer.k)]:
            for what, size, step in (("n", n, 8), ("k", k, K_ALIGNMENT)):
                if size % step:
                    raise ValueError(f"{layer.name}: {what} = {size} on one rank is not a multiple of {step}")
    return layers


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "hidden_size" not in config:
        config = inner
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError(
            "model config: expected a key 'model_type', found none; is this a Hugging Face config.json? "
            "The layers' shapes can be given directly instead (--shape N,K)"
        )
    if not isinstance(model_type, str) or model_type not in KNOWN_MODELS:
        raise ValueError(
            f"model config: model_type {model_type!r} is not known (known: {', '.join(sorted(KNOWN_MODELS))}); "
            "give its layers' shapes directly instead (--shape N,K)"
        )
    return config


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(
            f"model config: {key}: expected a positive integer, found none: the file leaves it to the model class's "
            "default. AutoConfig.from_pretrained(…).to_json_file(…, use_diff=False) writes every size; the layers' "
            "shapes can be given directly instead (--shape N,K)"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model config: {key}: expected a positive integer, got {value!r}")
    return value


def _cut(what: str, size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"tp={tp}: {what} {size} is not divisible by it")
    return size // tp


def _cut_k(name: str, size: int, tp: int, group_size: int) -> int:
    """Columns of a row-parallel weight on one rank; a group of scales stays whole."""

    def fits(part: int, group: int) -> bool:
        return part % K_ALIGNMENT == 0 and part % (group or 1) == 0

    part = _cut(f"k of {name},", size, tp)
    if tp == 1 or fits(part, group_size):
        return part
    border = f"multiple of {K_ALIGNMENT}" if part % K_ALIGNMENT else f"border of a group of {group_size}"
    ranks = [each for each in range(1, tp) if size % each == 0 and (each == 1 or fits(size // each, group_size))]
    found = [f"tp of {', '.join(map(str, ranks))}"]
    found += [f"groups of {each}" for each in GROUP_SIZES if each < group_size and fits(part, each)]
    found += ["--ep, which leaves experts whole"] if name.startswith("experts.") else []
    raise ValueError(
        f"tp={tp}: {name} would be cut at k = {part}, which is not a {border}; what fits: {'; '.join(found)}"
    )


def _attention(config: Mapping[str, Any], tp: int, group_size: int) -> list[LinearLayer]:
    hidden, depth = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"model config: no head_dim, and hidden_size {hidden} is not divisible by {heads} heads")
    head_dim = _size(config, "head_dim", hidden // heads)
    q = head_dim * _cut("num_attention_heads", heads, tp)
    if kv_heads >= tp:
        kv = head_dim * _cut("num_key_value_heads", kv_heads, tp)
    elif tp % kv_heads == 0:
        kv = head_dim  # each head is repeated on tp / kv_heads ranks
    else:
        raise ValueError(f"tp={tp}: num_key_value_heads {kv_heads} neither divides it nor is divisible by it")
    o_k = _cut_k("o_proj", heads * head_dim, tp, group_size)
    return [
        LinearLayer("qkv_proj", q + 2 * kv, hidden, depth),
        LinearLayer("q_proj", q, hidden, depth),
        LinearLayer("k_proj", kv, hidden, depth),
        LinearLayer("v_proj", kv, hidden, depth),
        LinearLayer("o_proj", hidden, o_k, depth),
    ]


def _latent_attention(config: Mapping[str, Any], tp: int, group_size: int) -> list[LinearLayer]:
    """MLA: queries, keys and values by way of short vectors, whose projections every rank has whole."""
    hidden, depth = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads, latent = _size(config, "num_attention_heads"), _size(config, "kv_lora_rank")
    nope, rope, v = (_size(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    local = _cut("num_attention_heads", heads, tp)
    if config.get("q_lora_rank") is None:
        queries = [LinearLayer("q_proj", local * (nope + rope), hidden, depth)]
    else:
        rank = _size(config, "q_lora_rank")
        queries = [
            LinearLayer("fused_qkv_a_proj", rank + latent + rope, hidden, depth),
            LinearLayer("q_a_proj", rank, hidden, depth),
            LinearLayer("q_b_proj", local * (nope + rope), rank, depth),
        ]
    return [
        *queries,
        LinearLayer("kv_a_proj_with_mqa", latent + rope, hidden, depth),
        LinearLayer("kv_b_proj", local * (nope + v), latent, depth),
        LinearLayer("o_proj", hidden, _cut_k("o_proj", heads * v, tp, group_size), depth),
    ]


def _mlp(config: Mapping[str, Any], prefix: str, inter: int, tp: int, group_size: int, count: int) -> list[LinearLayer]:
    hidden = _size(config, "hidden_size")
    part = _cut_k(f"{prefix}down_proj", inter, tp, group_size)
    return [
        LinearLayer(f"{prefix}gate_up_proj", 2 * part, hidden, count),
        LinearLayer(f"{prefix}gate_proj", part, hidden, count),
        LinearLayer(f"{prefix}up_proj", part, hidden, count),
        LinearLayer(f"{prefix}down_proj", hidden, part, count),
    ]


def _experts(
    config: Mapping[str, Any], experts: str, width: str, tp: int, ep: int, group_size: int, count: int
) -> list[Layer]:
    """Experts as one module, and as a layer for each projection of each expert."""
    total, hidden, inter = _size(config, experts), _size(config, "hidden_size"), _size(config, width)
    if total % ep:
        fits = ", ".join(str(each) for each in range(1, ep) if total % each == 0)
        raise ValueError(f"ep={ep}: {experts} {total} is not divisible by it; what fits: ep of {fits}")
    local, tp = total // ep, tp if ep == 1 else 1
    part = _cut_k("experts.down_proj", inter, tp, group_size)
    separate = _mlp(config, "experts.", inter, tp, group_size, count * local)[1:]
    return [ExpertLayer(local, hidden, part, _size(config, "num_experts_per_tok"), _gate(config), count), *separate]


def _gate(config: Mapping[str, Any]) -> Gate:
    if config["model_type"] == "gpt_oss":
        limit, alpha = (
            float(config.get(key) or value) for key, value in (("swiglu_limit", 7), ("swiglu_alpha", 1.702))
        )
        return Gate("swiglu_oai", "interleaved", limit, alpha)
    act = config.get("hidden_act", "silu")
    if act not in _GATES:
        raise ValueError(f"model config: hidden_act: expected one of {', '.join(_GATES)} for experts, got {act!r}")
    return Gate(_GATES[act])


def _qwen_moe(config: Mapping[str, Any], tp: int, ep: int, group_size: int, depth: int) -> list[Layer]:
    step = _size(config, "decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise ValueError(f"model config: mlp_only_layers: expected a list of integers, got {dense_layers!r}")
    routed = sum(1 for i in range(depth) if i not in dense_layers and (i + 1) % step == 0)
    layers: list[Layer] = []
    if routed < depth:
        layers += _mlp(config, "", _size(config, "intermediate_size"), tp, group_size, depth - routed)
    if routed:
        experts = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5 writes the latter
        layers += _experts(config, experts, "moe_intermediate_size", tp, ep, group_size, routed)
    if routed and config["model_type"] == "qwen2_moe":
        inter = _size(config, "shared_expert_intermediate_size")
        layers += _mlp(config, "shared_expert.", inter, tp, group_size, routed)
    return layers


def _deepseek_moe(config: Mapping[str, Any], tp: int, ep: int, group_size: int, depth: int) -> list[Layer]:
    first, step = config.get("first_k_dense_replace", 0), _size(config, "moe_layer_freq", 1)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"model config: first_k_dense_replace: expected an integer of at least 0, got {first!r}")
    routed = sum(1 for i in range(first, depth) if i % step == 0)
    layers: list[Layer] = []
    if routed < depth:
        layers += _mlp(config, "", _size(config, "intermediate_size"), tp, group_size, depth - routed)
    if routed:
        layers += _experts(config, "n_routed_experts", "moe_intermediate_size", tp, ep, group_size, routed)
        if config.get("n_shared_experts"):
            inter = _size(config, "n_shared_experts") * _size(config, "moe_intermediate_size")
            layers += _mlp(config, "shared_experts.", inter, tp, group_size, routed)
    return layers


def quantization(config: Mapping[str, Any]) -> Quantization | str | None:
    """What the config says of quantised weights and activations, or why that cannot be told; None: nothing.

    Known are GPTQ, AWQ and AutoRound with one setting for all layers, compressed-tensors with one group, of both
    widths, and other methods of 8-bit weights. Activations are those that `jitgemm.nn.load_` chooses.
    """
    section = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if section is None:
        return None
    try:
        method = "modelopt" if "quant_algo" in section else section["quant_method"].lower().replace("_", "-")
        if method == "compressed-tensors":
            return _compressed_tensors(section, method)
        if method in ("gptq", "awq", "auto-round"):
            return _gptq_or_awq(section, method)
        if method in _W8A8:
            return _w8a8(section, method)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        return f"{problem.args[0]!r} is missing" if isinstance(problem, KeyError) else str(problem)
    known = ", ".join(("compressed-tensors", "gptq", "awq", "auto-round", *_W8A8)).replace("-", "_")
    return f"quant_method: expected one of {known}, got {section['quant_method']!r}"


def _gptq_or_awq(section: Mapping[str, Any], method: str) -> Quantization:
    _expect("bits", section["bits"], 4)
    if section.get("dynamic") or section.get("extra_config"):
        raise ValueError("layers have settings of their own")
    group_size = section["group_size"]
    # A symmetric file's zero points are all 8, which makes signed codes.
    zero_point = section.get("zero_point", True) if method == "awq" else not section.get("sym", True)
    variants = ("permuted",) if section.get("desc_act") else ()
    return Quantization(method, 0 if group_size == -1 else group_size, bool(zero_point), None, variants)


def _w8a8(section: Mapping[str, Any], method: str) -> Quantization:
    block, static = section.get("weight_block_size"), section.get("activation_scheme") == "static"
    variants = ("static",) if static else ("block",) if block else ()
    if method == "modelopt":
        algorithm = str(section["quant_algo"]).upper()
        if algorithm not in _MODELOPT:
            got = section["quant_algo"]
            raise ValueError(f"quant_algo: expected {' or '.join(_MODELOPT)} of ModelOpt, got {got!r}")
        variants = _MODELOPT[algorithm]
    return Quantization(method, block[1] if block else 0, False, _W8A8[method], variants, 8, "fp32")


def _compressed_tensors(section: Mapping[str, Any], method: str) -> Quantization:
    groups = list(section["config_groups"].values())
    _expect("number of config_groups", len(groups), 1)
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    bits, type_, zero_point = weights["num_bits"], weights.get("type", "int"), weights.get("symmetric") is False
    if (bits, type_, zero_point) not in _CODES:
        raise ValueError(f"weights: num_bits {bits!r}, type {type_!r}, symmetric {not zero_point}")
    group_size = weights["group_size"] if weights["strategy"] == "group" else 0
    if bits == 8 and weights["strategy"] == "block":
        block = weights["block_structure"]
        group_size = int(block.split("x")[1]) if isinstance(block, str) else block[1]
    own = _CODES[bits, type_, zero_point]
    lhs, variants = own, ()
    if inputs:
        _expect("input_activations: num_bits", inputs["num_bits"], 8)
        lhs = "fp8" if inputs["type"] == "float" else "int8"
        _expect("input_activations: type", lhs, own or lhs)
        affine, static = lhs == "int8" and inputs.get("symmetric") is False, not inputs.get("dynamic")
        block = inputs.get("strategy") == "group"
        if block:
            _expect("input_activations: group_size", inputs.get("group_size"), LHS_GROUP)
            _expect("input_activations: static or not symmetric", affine or static, False)
        flags = (("affine", affine), ("static", static), ("block", block))
        variants = tuple(name for name, given in flags if given)
    return Quantization(method, group_size, zero_point, lhs, variants, bits)


def _expect(name: str, value: object, expected: object) -> None:
    if value != expected:
        raise ValueError(f"{name}: expected {expected!r}, got {value!r}")


def weight_group(group_size: int, k: int) -> int:
    """The group size a weight of `k` columns is packed with: 0 (per channel) when one group covers all of k."""
    return 0 if group_size >= k else group_size
