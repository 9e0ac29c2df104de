"""Every codec as every tool writes it: read exactly; and in a file that is not so, the part that is not is named."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import builders
import dialects
import pytest
import torch
from safetensors.torch import save_file

from jitgemm.checkpoint import Checkpoint, read_layer
from jitgemm.checkpoint.reader import layer_header, read_header
from jitgemm.nn import PackedLinear
from jitgemm.nn.load.layer_source import OF_BESIDE, LayerSource

CASES = dialects.cases()
of_every_case = pytest.mark.parametrize("case", CASES.values(), ids=[" ".join(filter(None, key)) for key in CASES])


def read(case: dialects.Case, config: Any, **tensors: torch.Tensor) -> torch.Tensor:
    """In fp64; headers are looked at first, as by a model's load."""
    source = case.source | {f"{dialects.LAYER}.{suffix}": tensor for suffix, tensor in tensors.items()}
    layer_header(Checkpoint(source, config), dialects.LAYER)
    return read_layer(source, dialects.LAYER, device="cpu", config=config).dequantize().double()


@of_every_case
def test_the_weight_is_the_definition_s_and_packed_as_it_is(case):
    weight = read_layer(case.source, dialects.LAYER, device="cpu", config=case.config)
    expected = case.weight.float().double()  # scales that are products are rounded once
    assert torch.equal(weight.dequantize().double(), expected)
    assert torch.equal(weight.pack().dequantize().double(), expected)


def test_the_table_of_the_docs_has_these_pairs_and_no_others():
    text = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    lines = text.partition("## Who writes what")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head, _, *table = rows
    found = {
        (codec.partition(":")[0].strip("*"), tool)
        for codec, *cells in table
        for tool, cell in zip(head[1:], cells)
        if cell
    }
    assert found == {(codec, tool) for codec, tool, _ in CASES}


WRONG = (torch.complex64, torch.float64, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e5m2)
SAME = {
    ("weight_shape", torch.int32),
    ("g_idx", torch.int64),
    ("weight_zeros", torch.int64),
    ("weight_zeros", torch.int16),
}
"""Integers of another width, which are read."""


@pytest.mark.parametrize("bits", [True, False], ids=["bits", "numbers"])
@of_every_case
def test_a_tensor_of_another_dtype_is_named_before_anything_is_converted(case, bits):
    for suffix, tensor in (case.tensors | {"bias": torch.ones(dialects.N), "input_scale": dialects.ONE}).items():
        for dtype in WRONG:
            if dtype == tensor.dtype or (suffix, dtype) in SAME or (suffix == "bias" and dtype == torch.float64):
                continue
            if not bits:
                other = tensor.float().to(dtype)
            elif dtype.itemsize == tensor.dtype.itemsize and dtype != torch.bool:
                other = tensor.contiguous().view(dtype)
            else:
                continue
            with pytest.raises(ValueError, match=rf"\b({'|'.join({suffix, *case.tensors})})\b"):
                read(case, case.config, **{suffix: other})


def others(tensor: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """In a tensor's place: none, one of a row or a column less, and two of them."""
    yield None
    if tensor.dim():
        yield from (tensor[:-1], tensor[..., :-1])
    yield tensor[None].expand(2, *tensor.shape).contiguous()


@of_every_case
def test_what_is_missing_or_does_not_fit_is_named_and_no_other_weight_of_this_size_is_read(case):
    for suffix, tensor in case.tensors.items():
        for other in others(tensor):
            source = {name: each for name, each in case.tensors.items() if name != suffix}
            changed = replace(case, tensors=source | ({} if other is None else {suffix: other}))
            try:
                found = read(changed, case.config)
            except ValueError as error:
                assert re.search(rf"\b({'|'.join(case.tensors)}|format|s1_szeros)\b", str(error)), (suffix, error)
                continue
            same = found.shape == case.weight.shape
            assert not same or torch.equal(found, case.weight.float().double()), suffix


def with_nan(tensor: torch.Tensor, suffix: str) -> torch.Tensor | None:
    """Its first value is no number; None where the type has only numbers, and for scales that are not used."""
    if tensor.dtype == torch.uint8 and "scale" in suffix:  # e8m0
        tensor = tensor.view(torch.float8_e8m0fnu)
    if not tensor.dtype.is_floating_point or suffix == "input_global_scale":
        return None
    found = tensor.clone(memory_format=torch.contiguous_format)
    found.view(-1)[0] = torch.nan
    return found


@of_every_case
def test_what_is_no_number_is_named(case):
    for suffix, tensor in case.tensors.items():
        other = with_nan(tensor, suffix)
        if other is None:
            continue
        with pytest.raises(ValueError, match=rf"\b(q|offset|scale|input_scale|{'|'.join(case.tensors)}): expected"):
            read(case, case.config, **{suffix: other.view(tensor.dtype)})


def settings(config: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of all that a config holds."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield (*at, name), value
        yield from settings(value, (*at, name))


def with_setting(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy that holds another value there."""
    holder = copied = copy.deepcopy(config)
    for each in path[:-1]:
        holder = holder[each]
    holder[path[-1]] = value
    return copied


KINDS: tuple[Any, ...] = ("x", 7, True, False, 1.5, -3, ["x"], [None], [1], [], {"x": 1}, {"x": {"y": []}}, {})


@of_every_case
def test_a_setting_of_another_kind_is_named_or_changes_no_weight(case):
    for path, value in settings(case.config):
        name = next(
            (each for at, each in (("down", "_config|dynamic"), ("lm_head", "extra_config")) if at in path[-1]),
            path[-1],
        )
        for other in KINDS:
            if isinstance(other, type(value)) or (isinstance(value, int) and isinstance(other, int)) or value is None:
                continue
            try:
                found = read(case, with_setting(case.config, path, other))
            except (ValueError, TypeError) as error:
                assert re.search(name if "|" in name else re.escape(name), str(error)), (path, other, error)
            else:
                assert torch.equal(found, case.weight.float().double()), (path, other)


OF_OTHERS = {"input_activations", "input_tensors", "global_quant_config", "*down_proj", "*up_proj", "extra_config"}


@of_every_case
def test_a_group_size_that_the_tensors_contradict_is_named(case):
    for path, value in settings(case.config):
        if path[-1] != "group_size" or OF_OTHERS & {*path} or isinstance(value, list):
            continue
        for other in {16, 64, 128, -1} - ({value, -1} if value in (None, 0, dialects.K) else {value}):
            with pytest.raises(ValueError, match=r"group_size|scales?\b.* expected"):
                read(case, with_setting(case.config, path, other))


BESIDE = [
    f"{of}_{what}" for of in ("k", "v", "q", "kv", "prob", "output", "k_cache") for what in ("scale", "zero_point")
]
BESIDE += ["kv_cache_scaling_factor", "k_global_scale", "v_scale_inv", "softmax_scale"]


@of_every_case
def test_scales_of_caches_attention_and_outputs_say_nothing_of_a_weight(case):
    beside = dict.fromkeys(BESIDE, torch.ones(1))
    assert torch.equal(read(case, case.config, **beside), case.weight.float().double())
    source = case.source | {f"{dialects.LAYER}.{suffix}": tensor for suffix, tensor in beside.items()}
    layer = LayerSource.find(Checkpoint(source, case.config), dialects.LAYER, activation=_of(case))
    assert {each.rpartition(".")[2] for each, why in layer.unused.items() if why == OF_BESIDE} == set(BESIDE)
    with pytest.raises(ValueError, match="smooth_scale"):
        read(case, case.config, smooth_scale=torch.ones(dialects.K))


def _of(case: dialects.Case) -> str:
    """Activations that the weight meets."""
    code = layer_header(Checkpoint(case.source, case.config), dialects.LAYER).scheme.code
    return "int8" if code == "int8" else "e4m3"


INPUTS: dict[str, dict[str, Any]] = {
    "per tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True},
    "static without its scale": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "asymmetric": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False},
    "groups of 32": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    "of 12 bits": {"num_bits": 12, "type": "int", "strategy": "token", "dynamic": True},
    "of another type": {"num_bits": 8, "type": "complex", "strategy": "token", "dynamic": True},
    "integers": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "floats": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
OF_CONFIG = [key for key, case in CASES.items() if "config_groups" in (case.config or {})]


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("key", OF_CONFIG, ids=" ".join)
def test_the_activation_that_an_error_advises_is_one_that_loads(key, inputs):
    case = CASES[key]
    groups = {"g": case.config["config_groups"]["group_0"] | {"input_activations": INPUTS[inputs]}}
    load = partial(
        PackedLinear.from_checkpoint, case.source, dialects.LAYER, config=case.config | {"config_groups": groups}
    )
    try:
        layer = load(device="cpu")
    except ValueError as error:
        (advised,) = re.findall(r"activation='(\w+)'", str(error))
        layer = load(device="cpu", activation=advised)
    assert torch.equal(layer.weight.dequantize().double(), case.weight.float().double())


MX = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": True}
OF_QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "scale_format": "e8m0"}


def of_quark(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"layer_quant_config": {"*": said["layer_quant_config"]["*.mlp.*"] | {"input_tensors": OF_QUARK}}}


def of_compressed_tensors(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"config_groups": {"g": said["config_groups"]["group_0"] | {"input_activations": MX}}}


OF_MX = {
    "compressed-tensors": of_compressed_tensors, "Quark": of_quark, "ModelOpt": dict, "DeepSeek": dict,
    "AutoRound": lambda said: said | {"act_bits": 8, "act_data_type": "mx_fp_rceil"},
}  # fmt: skip
"""The tools' words for inputs in MXFP8, which ModelOpt's and SGLang's name of the weights means."""
MX_CASES = [key for key in CASES if key[1] in OF_MX and key[2] == "" and key[0] in ("MXFP4", "MXFP8", "NVFP4")]
MX_CASES = [key for key in MX_CASES if key[1] != "ModelOpt" or key[0] == "MXFP8"]


@pytest.mark.parametrize("key", MX_CASES, ids=" ".join)
def test_inputs_in_mxfp8_have_a_scale_for_128_k_and_a_warning_says_so(key):
    case = CASES[key]
    load = partial(
        PackedLinear.from_checkpoint, case.source, dialects.LAYER, config=OF_MX[key[1]](case.config), device="cpu"
    )
    with pytest.warns(
        UserWarning, match="the checkpoint's MXFP8 inputs are .* each token and 128 k, e4m3_block; activ"
    ):
        layers = [load()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.append(load(activation="e4m3"))
    assert [layer.activation for layer in layers] == ["e4m3_block", "e4m3"]
    for layer in layers:
        assert layer.input_scale is None and torch.equal(
            layer.weight.dequantize().double(), case.weight.float().double()
        )


def test_what_other_errors_advise_works():
    case = CASES["INT4", "AutoRound", "as AWQ"]
    with pytest.raises(ValueError, match="act_bits: expected 16, got 8; give a config without it, and choose"):
        read(case, case.config | {"act_bits": 8})
    without = {name: value for name, value in case.config.items() if name != "act_bits"}
    assert PackedLinear.from_checkpoint(case.source, dialects.LAYER, config=without, activation="e4m3", device="cpu")
    case = CASES["INT4", "GPTQ", "AWQ gemm"]
    with pytest.raises(ValueError, match="a config with zero_point: true takes them as they are"):
        read(case, case.config | {"zero_point": False})
    assert torch.equal(read(case, case.config | {"zero_point": True}), case.weight)


class Counted(Checkpoint):
    """A checkpoint that counts the bytes that are read."""

    bytes = 0

    def read(self, *arguments):
        tensor = super().read(*arguments)
        self.bytes += tensor.nbytes
        return tensor


def read_whole(key: tuple[str, str, str], dim: str) -> bool:
    """Whether a rank reads the whole layer to cut it."""
    (_, tool, form), ordered = key, "g_idx" in CASES[key].tensors
    own_order = tool in ("torchao", "ExecuTorch", "BitBLAS", "QServe") or form == "AWQ gemv"
    return own_order or ("blocks" in form if dim == "n" else ordered)


@pytest.mark.parametrize("dim", ["n", "k"])
@pytest.mark.parametrize("key", CASES, ids=" ".join)
def test_a_rank_s_part_is_the_shard_of_the_layer_and_read_alone(tmp_path, key, dim):
    case = CASES[key]
    tensors = case.source | {f"{dialects.LAYER}.bias": torch.arange(dialects.N).bfloat16()}
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    for opened in (tensors, [tmp_path / "a.safetensors"]):
        source = Counted(opened, case.config)
        whole = read_layer(source, dialects.LAYER, device="cpu")
        everything, header = source.bytes, layer_header(source, dialects.LAYER)
        for rank in range(2):
            source.bytes = 0
            part = read_header(source, header, torch.device("cpu"), cut=(dim, rank, 2))
            expected = whole.shard(dim, rank, 2)
            for field in fields(part):
                got, wanted = getattr(part, field.name), getattr(expected, field.name)
                if isinstance(wanted, torch.Tensor):
                    assert builders.same_bits(got, wanted), field.name
                else:
                    assert got == wanted, field.name
            assert (source.bytes > 0.55 * everything) == read_whole(key, dim)
