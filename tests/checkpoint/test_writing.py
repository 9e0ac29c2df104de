"""Writing checkpoints: safetensors files, and compressed-tensors' tensors, which its reader and its library read."""

from __future__ import annotations

import builders
import pytest
import torch
from disks import disk_of
from safetensors.torch import load_file, save_file

from jitgemm.checkpoint.bits import pack_words, unpack_bytes, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.checkpoint.compressed_tensors import FORMAT
from jitgemm.checkpoint.compressed_tensors_config import for_layer, written_config, written_group
from jitgemm.checkpoint.load import read_layer
from jitgemm.checkpoint.writing import stored_in, write_safetensors

TENSORS = {
    "b.weight": torch.arange(15, dtype=torch.bfloat16).view(5, 3),
    "a.weight": torch.arange(7, dtype=torch.int8),
    "c.shape": torch.tensor([5, 3]),
    "d.codes": torch.arange(6.0).to(torch.float8_e4m3fn),
    "e.none": torch.empty(0, 4),
    "f.one": torch.tensor(2.5),
}


def test_a_file_holds_what_safetensors_would_write(tmp_path):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    assert write_safetensors(ours, TENSORS) == ours.stat().st_size
    save_file(TENSORS, theirs, {"format": "pt"})
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys() and all(builders.same_bits(found[name], expected[name]) for name in found)
    for name, each in stored_in(ours).items():
        assert each.start % TENSORS[name].dtype.itemsize == 0  # aligned


def test_tensors_of_another_file_are_copied_byte_for_byte(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    stored = stored_in(tmp_path / "a.safetensors")
    write_safetensors(
        tmp_path / "b.safetensors", {"new": torch.ones(3)} | {f"x.{name}": stored[name] for name in stored}
    )
    found = load_file(tmp_path / "b.safetensors")
    assert all(builders.same_bits(found[f"x.{name}"], tensor) for name, tensor in TENSORS.items())
    assert found["new"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [4, 20, 150, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path, size):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"expected a safetensors file, got {path}: "):
        stored_in(path)


def test_a_write_that_fails_names_the_file_and_leaves_the_one_before(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.zeros(1)})
    with disk_of(1000), pytest.raises(OSError, match=f"'{path}'"):
        write_safetensors(path, {"x": torch.zeros(1000)})
    assert load_file(path)["x"].tolist() == [0] and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("bits, unpack", [(4, unpack_nibbles), (8, unpack_bytes)])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_are_unpacked_to_the_same_codes_with_zeros_behind(bits, unpack, dim):
    codes = torch.randint(0, 1 << bits, (13, 21), generator=builders.generator(1)).to(torch.uint8)
    words = pack_words(codes, dim, bits)
    assert words.dtype == torch.int32 and words.is_contiguous()
    found = unpack(words, dim)
    assert torch.equal(found.narrow(dim, 0, codes.shape[dim]), codes)
    assert not found.narrow(dim, codes.shape[dim], found.shape[dim] - codes.shape[dim]).any()


CASES = {
    "int4": (dict(bits=4, group_size=32), {}),
    "zero points": (dict(bits=4, group_size=32, symmetric=False), {"zero_point": True}),
    "one group": (dict(bits=4, group_size=128), {}),
    "int8": (dict(bits=8, inputs="int"), {"bits": 8, "codes": "s8", "group_size": 0, "scale_type": "fp32"}),
    "e4m3": (dict(bits=8), {"bits": 8, "codes": "e4m3", "group_size": 0, "scale_type": "fp32"}),
}


def layer_of(case: str, n: int = 24, k: int = 96) -> tuple[CanonicalWeight, dict]:
    """A random layer, and the group of a config that describes it."""
    said, parts = CASES[case]
    said = {"inputs": "float"} | said
    made = builders.weight_parts(3, n, k, **{"group_size": said.get("group_size", 0)} | parts)
    code = "int4" if said["bits"] == 4 else case
    size = min(made.group_size, k)
    return CanonicalWeight(made.q, made.scale, made.zero, group_size=size, code=code), written_group(["Linear"], **said)


@pytest.mark.parametrize("case", CASES)
def test_the_reader_makes_the_same_weight_of_what_is_written(case):
    weight, group = layer_of(case)
    config = written_config([group], ["lm_head"])
    tensors = {f"a.{suffix}": tensor for suffix, tensor in FORMAT.write(weight, FORMAT.written(config, "a")).items()}
    found = read_layer(tensors, "a", device="cpu", config=config)
    assert (found.code, min(found.group_size, found.k)) == (weight.code, weight.group_size)
    for name in ("q", "scale", "zero"):
        expected, got = getattr(weight, name), getattr(found, name)
        assert (expected is None) == (got is None) and (got is None or builders.same_bits(got, expected)), name


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_own_library_decompresses_what_is_written(case):
    library = pytest.importorskip("compressed_tensors")
    weight, group = layer_of(case, k=96 if case != "one group" else 128)
    config = written_config([group], [])
    tensors = FORMAT.write(weight, FORMAT.written(config, "a"))
    scheme = library.quantization.QuantizationScheme.model_validate(group)
    kind = library.compressors.BaseCompressor.get_value_from_registry(group["format"])
    found = kind.decompress(tensors, scheme)["weight"]
    expected = weight.dequantize()
    assert torch.equal(found.to(expected.dtype), expected.to(found.dtype).to(expected.dtype))


def test_a_weight_that_is_not_what_the_config_says_is_named():
    weight, _ = layer_of("int4")
    for other, got in (("zero points", "True"), ("e4m3", "e4m3")):
        scheme = FORMAT.written(written_config([layer_of(other)[1]], []), "a")
        with pytest.raises(ValueError, match=f"expected code, group size and zero points .*{got}.*, got .'int4', 32"):
            FORMAT.write(weight, scheme)
    scheme = FORMAT.written(written_config([layer_of("int4")[1]], []), "a")
    ordered = CanonicalWeight(weight.q, weight.scale, group_size=32, permutation=torch.arange(96, dtype=torch.int32))
    with pytest.raises(ValueError, match="expected neither offsets nor an activation order"):
        FORMAT.write(ordered, scheme)
    weight, group = layer_of("zero points")
    sixteen = CanonicalWeight(weight.q, weight.scale, torch.full_like(weight.zero, 16), group_size=32)
    with pytest.raises(ValueError, match=r"expected zero points 0\.\.15, got 16"):
        FORMAT.write(sixteen, FORMAT.written(written_config([group], []), "a"))


def test_a_config_of_two_widths_has_a_format_for_each_group():
    eight, four = written_group(["m.v_proj"], 8, "float"), written_group([r"re:.*\.[vo]_proj$"], 4, "float", 128)
    config = written_config([eight, four], ["lm_head"])
    assert config["format"] == "mixed-precision"
    for layer, format, bits in (("m.v_proj", "float-quantized", 8), ("m.o_proj", "pack-quantized", 4)):
        found = for_layer(config, layer)
        assert (found["format"], found["weights"]["num_bits"]) == (format, bits)
    assert written_config([four], [])["format"] == "pack-quantized"
