"""A layer of a checkpoint before packing, whole or a rank's part: its header, then its data. Knows no kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgemm.checkpoint import formats
from jitgemm.checkpoint.canonical import PART_MULTIPLES, CanonicalWeight, TensorInfo
from jitgemm.checkpoint.files import Checkpoint, Part
from jitgemm.checkpoint.format import INPUT, INPUT_SCALES, OUTPUT, Format, Scheme, Sizes, check_beside
from jitgemm.checkpoint.layouts import Dim, N


class _Found(dict[str, Any]):
    """A layer's tensors, or their headers, by suffix. A format that asks for another one gets a ValueError."""

    def __init__(self, format: Format, found: Mapping[str, Any]):
        super().__init__(found)
        self._format = format.name

    def __missing__(self, suffix: str) -> Any:
        raise ValueError(f"{suffix}: expected the tensor for format {self._format}, found none")


@dataclass(frozen=True)
class LayerHeader:
    """What config and headers say of a layer, all checked that can be checked without its data.

    Attributes:
        prefix: the layer's name.
        names: {what stands behind the prefix: full name} of its tensors, those under other prefixes included.
        format, scheme: the format that reads it, and what config, headers and its file's metadata say.
        sizes: see `Sizes`.
        matrices: for each of the scheme's transforms the full name of its matrix; None for one that no file need hold.
    """

    prefix: str
    names: Mapping[str, str]
    format: Format
    scheme: Scheme
    sizes: Sizes
    matrices: Sequence[str | None] = ()


def target_device(device: torch.device | str | int | None) -> torch.device:
    """Where tensors go: the current GPU, or the CPU where there is none, unless the caller says. Raises ValueError for
    a GPU where PyTorch finds none."""
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is here, got {target}, and PyTorch finds no GPU")
    return target


def layer_header(
    checkpoint: Checkpoint, prefix: str, expert: int | None = None, format: str | None = None, k: int | None = None
) -> LayerHeader:
    """Format, config and sizes of a layer, from headers alone.

    Args:
        k: columns of the weight as the model has it, if known: for formats whose tensors leave open whether a byte is
            one code or two, which find it as in_features in their config.

    Raises:
        ValueError: there is no such layer, or headers and config show that it cannot be read.
    """
    names = checkpoint.layer(prefix)
    if not names:
        otherwise = formats.stored_otherwise(checkpoint.config, checkpoint.layer(f"{prefix}.weight").values())
        none = f"prefix: expected a layer's name, found no tensor {prefix + '.*' if prefix else '*'}"
        raise ValueError(otherwise or none)
    infos: dict[str, Any] = {suffix: checkpoint.info(name) for suffix, name in names.items()}
    shape = None
    if "weight_shape" in infos and infos["weight_shape"].dim() == 1:  # numbers, which say what no header does
        shape = checkpoint.read(names["weight_shape"], torch.device("cpu"))
    if expert is not None:
        if shape is not None:  # of all experts: [E, n, k] or [n, k]
            del infos["weight_shape"], names["weight_shape"]
            shape = shape[-2:]
        infos = _of_expert(infos, expert)
    layer, first, *others = (name.rstrip("._") for name in (prefix, *checkpoint.in_file(prefix)))
    config = formats.translated(checkpoint.config, first)
    reader = formats.find(infos, config, first) if format is None else formats.by_name(format)
    for suffix, name in reader.elsewhere(layer).items():
        if suffix not in names and name in checkpoint:
            names[suffix], infos[suffix] = name, checkpoint.info(name)
    headers = _Found(reader, infos if shape is None else infos | {"weight_shape": shape})
    if described := reader.described(checkpoint.metadata(next(iter(names.values()))), first):
        config = {**described, **(config or {})}
    scheme = scheme_of(reader, config, first, headers)
    for other in others:
        if (its := scheme_of(reader, formats.translated(checkpoint.config, other), other, headers)) != scheme:
            joined = f"{first!r} and {other!r}, whose rows are joined"
            raise ValueError(f"quantization_config: expected one scheme of {joined}, got {scheme} and {its}")
    sizes = reader.sizes(headers, scheme)
    check_beside(headers)
    if sizes.k is None and k is not None:
        scheme = replace(scheme, settings={"in_features": k, **scheme.settings})
    if "bias" in names and any(transform.location == OUTPUT for transform in scheme.transforms):
        raise ValueError(f"bias: expected none with {scheme.transforms[-1]}, got one")
    matrices = [transform.stored_as(checkpoint, prefix, sizes) for transform in scheme.transforms]
    return LayerHeader(prefix, names, reader, scheme, sizes, matrices)


def scheme_of(format: Format, config: Mapping[str, Any] | None, prefix: str, headers: Mapping[str, Any]) -> Scheme:
    """`Format.scheme` of a layer that is quantised. Raises ValueError, naming the setting, if the config lacks it."""
    if (reason := format.left_out(config, prefix)) is not None:
        raise ValueError(reason)
    return format.scheme(config, prefix, headers)


def read_header(
    checkpoint: Checkpoint, header: LayerHeader, device: torch.device, expert: int | None = None,
    cut: tuple[str, int, int] | None = None,
) -> CanonicalWeight:  # fmt: skip
    """The layer that the header describes, or its part of (dim, rank, world), as `CanonicalWeight.shard` cuts it. Where
    that is a part of each of its tensors, no more of them is read. Raises ValueError for values that cannot be, or a
    layer that cannot be cut so."""
    dim, rank, world = cut or ("n", 0, 1)
    parts = parts_of_rank(header, dim, rank, world) if expert is None else None
    names, of = dict(header.names), parts or {}
    if parts is not None and dim == "k" and rank > 0:
        names.pop("bias", None)  # which rank 0 adds
    read = {suffix: checkpoint.read(name, device, expert, of.get(suffix)) for suffix, name in names.items()}
    if parts is not None and "weight_shape" in read:
        n, k = read["weight_shape"].tolist()
        read["weight_shape"] = read["weight_shape"].new_tensor([n // world, k] if dim == "n" else [n, k // world])
    weight = header.format.read(_Found(header.format, read), header.scheme)
    static = next((read[name].reshape(1).float() for name in INPUT_SCALES if name in read), None)
    inputs = header.scheme.inputs
    static = None if inputs is not None and inputs.num_bits == 4 else static  # theirs, and not of 8 bits
    weight = replace(weight, bias=read.get("bias"), input_scale=static, **_turned(checkpoint, header, weight, device))
    _check_values(weight)
    if weight.note:
        checkpoint.warn(weight.note)
    return weight.shard(dim, rank, world) if parts is None else weight


def _turned(
    checkpoint: Checkpoint, header: LayerHeader, weight: CanonicalWeight, device: torch.device
) -> dict[str, Any]:
    """What its layer does to inputs and results at run time, as `CanonicalWeight` has it. Raises ValueError for a
    matrix of another size or of other values than the config says."""
    turned, k = [], header.sizes.k or weight.k
    rotation = header.scheme.rotation(k)
    for transform, name in zip(header.scheme.transforms, header.matrices, strict=True):
        stored, size = None, k if transform.location == INPUT else header.sizes.n
        if name is not None:
            stored = checkpoint.read(name, device)
        elif rotation:
            break  # nothing to compare
        turned.append((transform.location, transform.matrix(stored, size, device)))
    return {"rotation": rotation} if rotation else {"turned": tuple(turned)}


def _check_values(weight: CanonicalWeight) -> None:
    """Raises ValueError for scales, offsets and codes that are no finite numbers, and for an input scale that is not
    positive. Scales of 0 are legal: a group of zeros has one."""
    for name in ("scale", "offset", "input_scale", "row_scale", *(("q",) if weight.q.is_floating_point() else ())):
        values = getattr(weight, name)
        if values is None:
            continue
        wanted = "finite numbers"
        if name == "scale":
            wrong, wanted, values = weight.ops.no_scales(values)
        elif name == "input_scale":
            wrong, wanted = ~values.isfinite() | (values <= 0), "a positive, finite number"
        else:
            wrong = (values.view(torch.uint8) & 0x7F) == 0x7F if name == "q" else ~values.isfinite()
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name}: expected {wanted}, got {float(values[tuple(at)])} at {at}")


def parts_of_rank(header: LayerHeader, dim: str, rank: int, world: int) -> dict[str, Part] | None:
    """{suffix: what to read of it} for a rank's part of a layer; what is not named is read whole. None where all
    tensors have to be read, to be cut by `CanonicalWeight.shard`, which says what cannot be."""
    layout = header.format.tensors(header.scheme) if header.format.cuts else {}
    total, size = {"n": header.sizes.n, "k": header.sizes.k}.get(dim), header.sizes.group_size
    ordered = dim == "k" and any("g_idx" in suffix for suffix in header.names)
    if world == 1 or not 0 <= rank < world or total is None or size is None or ordered:
        return None
    per_group = size if dim == "k" and size < total else 1
    rotation = header.scheme.rotation(header.sizes.k)
    multiple = rotation if rotation and dim == "k" else PART_MULTIPLES[dim]
    uneven = total % (world * math.lcm(multiple, per_group)) or (header.scheme.transforms and not rotation)
    if uneven or not layout or not all(each.known for each in layout.values()):
        return None
    count, parts = total // world, {}
    for suffix in header.names:
        for axis, each in enumerate((N,) if suffix == "bias" else layout[suffix].dims if suffix in layout else ()):
            if not isinstance(each, Dim) or each.of not in (dim, "G" if per_group > 1 else dim):
                continue
            elements = each.per * (per_group if each.of == "G" else 1)
            if count % elements:
                return None
            parts[suffix] = Part(axis, rank * count // elements, count // elements)
    return parts


def _of_expert(infos: Mapping[str, TensorInfo], expert: int) -> dict[str, TensorInfo]:
    """What the tensors look like when the first dimension is gone."""
    counts = {info.shape[:1] for info in infos.values()}
    if len(counts) != 1 or counts == {()}:
        shapes = ", ".join(f"{suffix} {list(info.shape)}" for suffix, info in infos.items())
        raise ValueError(f"expert: expected tensors with one number of experts as their first size, got {shapes}")
    (count,) = counts.pop()
    if not 0 <= expert < count:
        raise ValueError(f"expert: expected 0..{count - 1}, got {expert}")
    return {suffix: TensorInfo(info.shape[1:], info.dtype) for suffix, info in infos.items()}
