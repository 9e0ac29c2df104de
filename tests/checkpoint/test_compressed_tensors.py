"""compressed-tensors: from the format's definition, and its presets and transforms against the library itself."""

from __future__ import annotations

import re

import builders
import checkpoints
import pytest
import torch
import two_level
from files_compressed_tensors import LAYER, config, int_quantized, pack_quantized, scheme
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

import jitgemm.checkpoint.compressed_tensors as module
import jitgemm.nn
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.checkpoint.compressed_tensors_config import for_layer, written_config, written_group
from jitgemm.checkpoint.load import load, read_layer
from jitgemm.nn import load_
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.weight.rotation import rotated, sylvester

FORMATS = {"pack-quantized": pack_quantized, "int-quantized": int_quantized}


# --- from the definition ---


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 8).map(lambda x: 8 * x),
    groups=st.integers(1, 4),
    format=st.sampled_from(builders.ALL_FORMATS),
    layout=st.sampled_from(sorted(FORMATS)),
    ordered=st.booleans(),
)
@settings_of(max_examples=30, deadline=None)
def test_any_layer_packs_to_the_definition_s_weights(seed, n, groups, format, layout, ordered):
    group_size, zero_point, scale_type = format
    k = groups * (group_size or 32)
    parts = builders.weight_parts(seed, n, k, group_size, zero_point=zero_point, scale_type=scale_type)
    tensors, g_idx = FORMATS[layout](parts), None
    if ordered:
        g_idx = torch.arange(parts.scale.shape[1]).repeat_interleave(k // parts.scale.shape[1])
        g_idx = g_idx[torch.randperm(k, generator=builders.generator(seed))]
        tensors[f"{LAYER}.weight_g_idx"] = g_idx.int()
    expected = checkpoints.dequantized(parts.q, parts.scale, parts.zero, g_idx).float()
    weight = load(tensors, LAYER, device="cpu")
    columns = torch.arange(k) if weight.permutation is None else weight.permutation.long()
    assert torch.equal(weight.dequantize(), expected[:, columns])


PARTS, ZEROS = (builders.weight_parts(11, 16, 256, 64, zero_point=zero_point) for zero_point in (False, True))
ROWS, COLUMNS = builders.weight_parts(3, 12, 64, 32, zero_point=True), builders.weight_parts(3, 16, 60, 0)


@pytest.mark.parametrize("parts, tensors, settings", [
    (ROWS, pack_quantized(ROWS), None),  # zero points of rows that fill no whole word: a rank's part may be read uncut
    (COLUMNS, pack_quantized(COLUMNS), None),  # codes of columns that fill none
    (ZEROS, pack_quantized(ZEROS, zero="int8"), None),  # zero points of old files, one a byte
    (PARTS, {"weight_zero_point": torch.zeros((16, 4), dtype=torch.int8)}, config(scheme(group_size=64))),
    (PARTS, {"weight_g_idx": torch.full((256,), -1, dtype=torch.int32)}, None),  # an activation order that was never set
    (PARTS, {}, config(scheme(group_size=64, targets=["re:other.*"]))),  # a single group needs no matching name
    (PARTS, {}, config(scheme(group_size=64) | {"format": "pack-quantized"}, format="mixed-precision")),
    *((PARTS, {}, config(scheme(group_size=64, inputs=inputs))) for inputs in (
        {"num_bits": 4, "strategy": "token"}, {"num_bits": 8, "strategy": "group"})),
])  # fmt: skip
def test_what_is_said_beside_the_codes_changes_no_weight(parts, tensors, settings):
    if parts is PARTS:
        tensors = pack_quantized(parts) | {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    found = read_layer(tensors, LAYER, device="cpu", config=settings)
    assert torch.equal(found.dequantize(), parts.dequantize_fp64().float()) and found.permutation is None
    assert (found.zero is None) == (parts.zero is None)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
@pytest.mark.parametrize("zero_point", [False, True])
def test_one_scale_for_the_whole_tensor(shape, zero_point):
    parts = builders.weight_parts(7, 16, 128, 0, zero_point=zero_point)
    tensors = int_quantized(parts)
    for name in ("weight_scale", "weight_zero_point")[: 1 + zero_point]:
        tensors[f"{LAYER}.{name}"] = tensors[f"{LAYER}.{name}"][0, 0].reshape(shape)
    weight = load(tensors, LAYER, device="cpu", config=config(scheme("tensor", symmetric=not zero_point)))
    zero = parts.zero[:1].expand(16, 1) if zero_point else None
    expected = checkpoints.dequantized(parts.q, parts.scale[:1].expand(16, 1), zero)
    assert torch.equal(weight.dequantize(), expected.float())


# --- what is refused ---


def transforms(*apply, **group):
    return {"config_groups": {"R": {"type": "hadamard", "apply": list(apply)} | group}}


def turned(location="input", kind="hadamard", head_dim=128, targets="re:.*down_proj$", inverse=False, **group):
    """A config with one transform."""
    apply = {"targets": targets, "location": location, "inverse": inverse}
    return config(transform_config=transforms(apply, type=kind, head_dim=head_dim, **group))


def refused(tensors, settings=None):
    with pytest.raises(ValueError) as error:
        load(tensors, LAYER, device="cpu", config=settings)
    return str(error.value)


@pytest.mark.parametrize("settings, message", [
    (config(scheme(num_bits=2)), "weights: expected num_bits 4 or 8 and type 'int' or 'float', got 2 and 'int'"),
    (config(scheme(type="float")), "weights: expected strategy group and group_size 32, as MXFP4 has, .*got 'group' and 128"),
    (config(scheme("tensor_group", type="float")), "as MXFP4 has, .*got 'tensor_group' and None \\(NVFP4's tensors are"),
    (config(scheme(type="float", group_size=32, symmetric=False)), "weights: expected symmetric: true with type 'float'"),
    (config(scheme(type="float", group_size=32)), "weight_packed: expected uint8 \\[n, k / 2\\], got int32"),
    (config(scheme("block")), "weights: expected strategy group, channel, tensor, got 'block'"),
    (config(scheme("tensor_group")), "weights: expected strategy group, channel, tensor, got 'tensor_group'"),
    (config(scheme(group_size=64)), "weight_scale: expected 4 columns for k = 256 and group_size 64, got 2"),
    (config(scheme("channel")), "weight_scale: expected 1 columns for k = 256"),
    (config(scheme(symmetric=False)), "weight_zero_point: expected the tensor, as the config says"),
    (config(format="marlin-24"), "format: expected pack-quantized, int-quantized, .*got 'marlin-24'"),
    (config(ignore=["re:.*down_proj"]), "ignore: expected no target that matches the quantised layer"),
    (config(ignore=["lm_head", 3]), r"ignore: expected a list of names, got \['lm_head', 3\]"),
    (config(ignore=["re:("]), r"targets: expected a regular expression, got '\('"),
    (config(scheme() | {"targets": "Linear"}), "targets: expected a list of names, got 'Linear'"),
    (config(config_groups=None), "config_groups: expected one whose targets match"),
    (config(config_groups={"MXFP6A8": ["Linear"]}), "config_groups: expected a scheme, or one of the presets .*, got 'MXFP6A8'"),
    (config(config_groups={"W8A4": ["Linear"]}), "config_groups: expected a scheme, or one of the presets .*, got 'W8A4'"),
    (config(scheme(zip=4)), "weights: expected only num_bits, .*, got also zip"),
    (config(scheme(dynamic=True)), "weights: expected dynamic: false, got True"),
    (config(scheme(actorder="group")), "weight_g_idx: expected the tensor, as the config says actorder 'group'"),
    (config(scheme(targets=["re:.*up_proj"]), scheme(targets=["re:.*gate_proj"])), "config_groups: expected one"),
    (turned("middle"), "transform_config: expected one transform at model.layers.0.mlp.down_proj's middle, got R's"),
    (turned("q_attn"), "transform_config: expected one orthogonal matrix at q_attn and k_cache, where it cancels"),
    (turned(kind="dct"), "transform_config: expected type hadamard or random-hadamard or random-matrix .*, got 'dct'"),
    (turned(randomize=True), "transform_config: expected .* randomize: false, got 'hadamard' and True of R"),
    (turned(head_dim=0), "transform_config: expected a positive integer as head_dim, got 0 of R"),
    (turned(head_dim=True), "transform_config: expected a positive integer as head_dim, got True of R"),
    (turned(zip=1), "transform_config: expected only type, apply, .*, got zip in R"),
    (turned(kind="random-hadamard"), r"expected one matrix of transform R \(random-hadamard\) of blocks of 128 .* found none"),
    (turned(requires_grad=True), "expected one matrix of transform R .* at the input in the file, found none"),
    (turned(head_dim=96), "transform_config: expected a power of two for transform R .* of blocks of 96 at the input, got 96"),
    (turned(head_dim=64), "transform_config: expected no matrix that kernels do not multiply .*, got one of 64 at the input"),
    (turned("output", head_dim=16), "transform_config: expected no matrix that kernels do not multiply .*, got one of 16 at the output"),
    (turned(head_dim=512), "head_dim: expected a divisor of 256, got 512 of transform R"),
    (
        config(transform_config=transforms(*({"targets": "Linear", "location": "input"},) * 2)),
        "transform_config: expected one transform at model.layers.0.mlp.down_proj's input, got R's, too",
    ),
    (config(transform_config={"config_groups": {"R": 5}}), "transform_config: expected groups of schemes to apply, got R: 5"),
])  # fmt: skip
def test_settings_that_are_not_supported_are_refused(settings, message):
    assert re.search(message, refused(pack_quantized(builders.weight_parts(13, 16, 256, 128)), settings))


def test_transforms_that_are_in_the_weight_already_or_of_other_layers_do_no_harm():
    parts = builders.weight_parts(13, 16, 256, 128)
    harmless = transforms(
        {"targets": ["Linear"], "location": "weight_input"},
        {"targets": ["re:.*o_proj"], "location": "input"},
        {"targets": ["Linear"], "location": "input", "ignore": ["re:.*down_proj"]},
        {"targets": ["Linear"], "location": "input", "ignore": "re:.*down_proj"},
        {"targets": ["re:.*"], "location": "q_attn"},
        {"targets": ["re:.*"], "location": "k_cache"},
    )
    settings = config(transform_config=harmless)
    weight = load(pack_quantized(parts), LAYER, device="cpu", config=settings)
    assert torch.equal(weight.dequantize(), parts.dequantize_fp64().float()) and weight.rotation == 0


@pytest.mark.parametrize("group", [{}, {"head_dim": 128}, {"inverse": True}])
def test_an_input_that_kernels_rotate_is_rotated(group):
    """Without head_dim blocks are all columns, 128 here. The inverse of Sylvester's matrix is the same."""
    k = 256 if "head_dim" in group else 128
    parts = builders.weight_parts(13, 16, k, 128)
    tensors, settings = pack_quantized(parts), turned(**{"head_dim": None} | group)
    weight, dense = load(tensors, LAYER, device="cpu", config=settings), parts.dequantize_fp64().float()
    assert weight.rotation == 128 and torch.equal(weight.dequantize(), dense)
    assert torch.equal(read_layer(tensors, LAYER, device="cpu", config=settings).dequantize(), rotated(dense))
    matrix = sylvester(128, torch.device("cpu"))
    held = tensors | {f"{LAYER}.R_input.weight": matrix}
    assert load(held, LAYER, device="cpu", config=settings).rotation == 128
    for wrong in (-matrix, matrix[:64, :64]):
        with pytest.raises(ValueError, match=r"expected Sylvester's matrix \[128, 128\] of transform R .*, got"):
            load(tensors | {f"{LAYER}.R_input.weight": wrong}, LAYER, device="cpu", config=settings)


def test_blocks_of_columns_that_are_rotated_together_stay_together():
    parts = builders.weight_parts(13, 16, 512, 32)
    tensors, settings = pack_quantized(parts), turned() | {"config_groups": {"g": scheme(group_size=32)}}
    for dim, rank in (("n", 1), ("k", 0), ("k", 1)):
        weight = load(tensors, LAYER, device="cpu", config=settings, tp_dim=dim, tp_rank=rank, tp_size=2)
        expected = parts.dequantize_fp64().float().chunk(2, "nk".index(dim))[rank]
        assert weight.rotation == 128 and torch.equal(weight.dequantize(), expected)
    with pytest.raises(ValueError, match="tp_size: .* columns to be a multiple of 128, which are rotated together"):
        load(tensors, LAYER, device="cpu", config=settings, tp_dim="k", tp_rank=1, tp_size=8)


LEVELS = written_config([written_group(["Linear"], 4, "int", scheme="two-level")], [])


@given(seed=st.integers(0, 2**31), n=st.integers(1, 6).map(lambda x: 8 * x), k=st.sampled_from((64, 128, 256, 384)),
       most=st.sampled_from((1, 17, 127)), zeros=st.booleans())  # fmt: skip
@settings_of(max_examples=15, deadline=None)
def test_two_levels_are_found_again_in_groups_with_fp32_scales(seed, n, k, most, zeros):
    parts = two_level.parts(seed, n, k, most=most, dtype=torch.bfloat16)
    zero = parts.zero.clamp(max=15)
    q = two_level.fitting(parts.q, *(parts.over_k(each).to(torch.uint8) for each in (parts.factor, zero)))
    scale = parts.scale.clone()
    scale[:: 5 if zeros else n + 1] = 0  # rows of zeros
    weight = jitgemm.pack_w4_two_level(q, parts.factor, zero, scale)
    tensors = module.FORMAT.write(unpacked(weight), module.FORMAT.written(LEVELS, LAYER))
    tensors = {f"{LAYER}.{suffix}": each for suffix, each in tensors.items()}
    for dtype, code in ((torch.int8, "two_level"), (torch.float8_e4m3fn, "int4")):
        found = load(tensors, LAYER, device="cpu", config=LEVELS, lhs_dtype=dtype)
        assert found.format.code == code and torch.equal(found.dequantize(), weight.dequantize())
    part = load(
        tensors, LAYER, device="cpu", config=LEVELS, lhs_dtype=torch.int8, tp_dim="n", tp_rank=0, tp_size=n // 8
    )
    assert torch.equal(part.dequantize(), weight.dequantize()[:8])


@pytest.mark.parametrize(
    "change", ["a mantissa of 24 bits", "a factor of 128", "integers of 9 bits", "a negative scale"]
)
def test_groups_that_two_levels_do_not_hold_stay_groups(change):
    q, zero = torch.randint(0, 16, (8, 256), dtype=torch.uint8), torch.full((8, 2), 4, dtype=torch.uint8)
    factor = torch.tensor([[3.0, 5.0]]).repeat(8, 1)
    factor[3, 1] = {"a mantissa of 24 bits": 5.000001, "a factor of 128": 384.0, "integers of 9 bits": 90.0}.get(
        change, -5.0
    )
    parts = CanonicalWeight(q, factor / 64, zero)
    tensors = module.FORMAT.write(parts, module.FORMAT.written(LEVELS, LAYER))
    tensors = {f"{LAYER}.{name}": each for name, each in tensors.items()}
    found = load(tensors, LAYER, device="cpu", config=LEVELS, lhs_dtype=torch.int8)
    assert found.format.code == "int4" and torch.equal(found.dequantize(), parts.dequantize())


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_other_transforms_are_dequantised_with_a_warning(bias):
    """The file holds one matrix for two layers, of which one has it at its result."""
    parts = {name: builders.weight_parts(seed, 64, 64, 32) for seed, name in enumerate(NAMES)}
    apply = [{"targets": "up", "location": "input"}, {"targets": ["down"], "location": "output", "inverse": True}]
    told = config(scheme(group_size=32), transform_config=transforms(*apply, type="random-hadamard"))
    matrix = torch.randint(0, 2, (64, 1)) * 2 - 1.0
    matrix = matrix * sylvester(64, torch.device("cpu"))
    tensors = pack_quantized(parts["up"], "up") | pack_quantized(parts["down"], "down") | {"up.R_input.weight": matrix}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(64, 64, bias=bias and name == "down") for name in NAMES})
    if bias:
        tensors["down.bias"] = torch.zeros(64)
        with pytest.raises(ValueError, match="bias: expected none with transform R .* at the output, got one"):
            load_(model, tensors, config=told)
        return
    with pytest.warns(UserWarning, match="dequantised: transform R .random-hadamard. of all of it at the input"):
        report = load_(model, tensors, config=told)
    assert list(report) == [] and report.ignored["up.R_input.weight"] == "a transform's matrix"
    x = torch.randn(5, 64)
    up, down = (parts[name].dequantize_fp64().float() for name in NAMES)
    assert torch.allclose(model["up"](x), (x @ matrix / 8) @ up.T, atol=1e-5)
    assert torch.allclose(model["down"](x), (x @ down.T) @ matrix.T / 8, atol=1e-5)
    with pytest.raises(ValueError, match="expected one matrix of transform R .*, found up.R_input.weight"):
        load_(model, tensors | {"x.R_output.weight": matrix}, config=told)


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-matrix"])
@pytest.mark.parametrize("head_dim", [128, 64, None])
def test_layers_compute_what_the_library_s_own_transforms_do(library, kind, head_dim):
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 128, bias=False) for name in NAMES}).double()
    inputs = {"R": ("down", "input", "weight_input"), "U": ("up", "weight_output", "output")}
    groups = {
        name: {"type": kind, "head_dim": head_dim, "precision": "torch.float64", "apply": [
            {"targets": [target], "location": first}, {"targets": [target], "location": second, "inverse": True}]}
        for name, (target, first, second) in inputs.items()
    }  # fmt: skip
    apply_transform_config(model, TransformConfig(config_groups=groups))
    parts = {name: builders.weight_parts(seed, 128, 256, 128) for seed, name in enumerate(NAMES)}
    tensors = {}
    for name in NAMES:
        model[name].weight.data.copy_(parts[name].dequantize_fp64())
        tensors |= pack_quantized(parts[name], name)
    held = {name: each.detach() for name, each in model.state_dict().items() if "_input" in name or "_output" in name}
    assert held.keys() == {"down.R_input.weight", "up.U_output.weight"}
    x, told = torch.randn(5, 256, dtype=torch.double), config(transform_config={"config_groups": groups})
    for name in NAMES:
        layer = read_layer(tensors | held, name, device="cpu", config=told)
        expected = model[name](x)
        assert (x @ layer.dequantize().double().T - expected).norm() < 1e-5 * expected.norm()
        packs = (name, kind, head_dim) == ("down", "hadamard", 128)
        assert layer.rotation == (128 if packs else 0) and bool(layer.turned) != packs


@pytest.mark.parametrize("name, tensor, message", [
    ("weight_packed", torch.zeros((16, 128), dtype=torch.uint8), r"expected int32, or num_bits 4 and type 'float'"),
    ("weight_packed", torch.zeros((16, 64), dtype=torch.int32), r"for weight_shape \[16, 256\], got \[16, 64\]"),
    ("weight_shape", torch.tensor([16, 264]), r"for weight_shape \[16, 264\], got \[16, 32\]"),
    ("weight_zero_point", torch.zeros((16, 2), dtype=torch.int32), r"expected int32 \[2, 2\], packed along n"),
    ("weight_zero_point", torch.zeros((2, 2)), "weight_zero_point: expected int32, packed, or int8, got float32"),
    ("weight_zero_point", torch.full((16, 2), 8, dtype=torch.int8), r"expected 4-bit values -8\.\.7, got 8\.\.8"),
    ("weight_zero_point", torch.ones((16, 4), dtype=torch.int8), r"expected \[16, 2\] as weight_scale"),
    ("weight_g_idx", torch.zeros(128, dtype=torch.int32), r"weight_g_idx: expected shape \[256\], got \[128\]"),
    ("weight_g_idx", torch.zeros(256, dtype=torch.int32), "g_idx: expected 128 columns in group 0, got 256"),
    ("weight", torch.ones((16, 256)), "weight: expected only weight_packed, weight_shape, .* got also weight"),
    ("input_scale", torch.ones(2), "input_scale: expected one element"),
    ("input_zero_point", torch.ones(1), None),
    ("weight_zero_point", torch.ones((16, 2), dtype=torch.int8), "expected zeros, as the config says symmetric: true"),
])  # fmt: skip
def test_tensors_that_contradict_each_other_are_refused(name, tensor, message):
    tensors = pack_quantized(builders.weight_parts(14, 16, 256, 128)) | {f"{LAYER}.{name}": tensor}
    if name == "input_zero_point":
        tensors[f"{LAYER}.input_scale"] = torch.ones(1)
        message = "input_zero_point: expected 0"
    settings = config() if "symmetric" in message else None
    assert re.search(message, refused(tensors, settings))
    eight = int_quantized(builders.weight_parts(15, 16, 256, 128))
    eight[f"{LAYER}.weight"][3, 5] = 8
    assert re.search(r"weight: expected 4-bit values -8\.\.7 .*got -8\.\.8", refused(eight))


# --- files that are stored otherwise ---

NAMES = ("up", "down")


def model_and_tensors():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 16, bias=False) for name in NAMES})
    return model, {f"{name}.weight": model[name].weight.detach().clone() for name in NAMES}


@pytest.mark.parametrize("format", ["sparse-bitmask", "sparse-24-bitmask"])
def test_a_sparse_file_is_named_as_such_and_nothing_is_advised_that_leaves_weights_random(format):
    model, tensors = model_and_tensors()
    del tensors["down.weight"]
    tensors |= {f"down.weight.{name}": torch.zeros(4) for name in ("bitmask", "compressed", "shape")}
    told = {"quant_method": "compressed-tensors", "sparsity_config": {"format": format}}
    with pytest.raises(ValueError, match=f"sparsity_config: expected format 'dense', got '{format}'") as error:
        load_(model, tensors, config=told)
    assert "allow_missing" not in str(error.value) and "down.weight" in str(error.value)
    with pytest.raises(ValueError, match=f"got '{format}'"):
        load(tensors, "down", device="cpu", config=told)


@pytest.mark.parametrize("told", [{"format": "dense", "quantization_status": "frozen"}, {"format": "fakequant"}])
def test_an_uncompressed_file_is_named_as_such_and_its_floats_load_without_strict(told):
    model, tensors = model_and_tensors()
    tensors |= {f"{name}.weight_scale": torch.ones(16, 2) for name in NAMES}
    with pytest.raises(ValueError, match=f"the file was saved uncompressed .format '{told['format']}'"):
        load_(model, tensors, config=config(**told))
    with pytest.raises(ValueError, match="the file was saved uncompressed"):
        load(tensors, "up", device="cpu", config=config(**told))
    with pytest.warns(UserWarning, match="converted no layer"):
        load_(model, tensors, config=config(**told), strict=False)
    assert jitgemm.nn.quantize_(model) == [*NAMES]


def test_a_transform_at_run_time_of_a_layer_in_floats_is_named_too():
    model, tensors = model_and_tensors()
    told = config(transform_config=transforms({"targets": ["Linear"], "location": "input", "ignore": ["up"]}))
    with pytest.raises(ValueError, match="down: transform_config: expected none of a layer in floats, got transform R"):
        load_(model, tensors, config=told)


# --- which group of settings a layer has ---


def layers_scheme(settings, name):
    try:
        return for_layer(settings, name)
    except ValueError as error:
        return {"refusal": str(error)}


def test_exact_targets_come_before_expressions_and_those_before_classes():
    settings = config(
        scheme(group_size=32, targets=["Linear"]),
        scheme(group_size=64, targets=["re:.*down_proj"]),
        scheme(group_size=128, targets=[LAYER, "vision.down_proj"]),  # before and behind "re:" in the alphabet
    )
    sizes = [
        layers_scheme(settings, name)["weights"]["group_size"]
        for name in (LAYER, "vision.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj")
    ]
    assert sizes == [128, 128, 64, 32]


# --- against the library ---


@pytest.fixture
def library():
    """compressed-tensors with the interface of its release 0.20."""
    return pytest.importorskip("compressed_tensors", minversion="0.20")


def test_presets_are_the_librarys(library):
    """All that can be read; the others raise by name."""
    from compressed_tensors.quantization import quant_scheme

    for name in quant_scheme.PRESET_SCHEMES:
        told = layers_scheme(config(config_groups={name: ["Linear"]}), LAYER)
        if name.startswith("MXFP6"):
            assert f"got {name!r}" in told["refusal"]
            continue
        theirs = quant_scheme.preset_name_to_scheme(name, ["Linear"]).model_dump()
        for part in ("weights", "input_activations"):
            ours, expected = told[part], theirs[part]
            assert (ours is None) == (expected is None)
            keys = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure")
            assert [(ours or {}).get(key) for key in keys] == [(expected or {}).get(key) for key in keys], name
