"""Quantising activations: the public call, its checks, and its `torch.library` op.

As `api.py` for GEMMs: one look-up by everything that decides legality and kernel, then a launch; only a miss imports
the layers below. CPU tensors run `reference_quantize.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.activations.kernel import MAX_K, MAX_PERMUTED_K, quantize_spec
from jitgemm.activations.reference import quantize_reference
from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES
from jitgemm.gemm.arguments import ALIGNMENT, MAX_ROWS, byte_extent
from jitgemm.runtime.dispatch import traced
from jitgemm.runtime.plans import Plans, present
from jitgemm.tensors import TYPE_NAMES, check_dtype, check_tensor, dtype_name

if TYPE_CHECKING:
    from jitgemm.activations.plan import QuantizePlan

SCHEMES = ("token", "tensor")

_plans = Plans()


def quantize_activations(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scheme: str = "token",
    affine: bool = False,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    silu_mul: bool = False,
    rms_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    permutation: torch.Tensor | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """8-bit activations for `gemm_w4a8_bf16_nt`, in one pass over x, on the current stream.

    ::

        y = x                                    or, in fp32 and not rounded to x's type,
            silu(x[:, :k]) * x[:, k:]            with silu_mul
            x * rms_norm / sqrt(mean(x^2) + eps) with rms_norm
        scale[i] = max(max |y[i]| / 448, 2^-126)                e4m3
                   max(max |y[i]| / 127, 2^-126)                int8
                   max((high - low) / 255, 2^-126)              int8 affine; high = max(y[i], 0), low = min(y[i], 0)
        zero[i]  = what stands for 0: -128 - low / scale or 127 - high / scale, chosen as ExecuTorch does
        q[i, j]  = round(y[i, p(j)] * (1 / scale[i])) + zero[i]  p = permutation; saturated at +-448, at -128 and 127

    All in fp32, each operation rounded to nearest even; codes too. The CPU gives the same bits, but for `silu_mul`
    (y within 2^-17 |y| + 2^-120) and `rms_norm` (y within 2^-17 |y| for k up to 2^16), whose codes may differ where y
    is as close to a tie. A row's result does not depend on the other rows, nor on m.

    Rows of zeros get codes that stand for 0, and scale 2^-126. A row whose y holds a NaN gets scale NaN, so that all
    its results are NaN, whatever the scheme; one that holds an infinity, or whose range or sum of squares is beyond
    fp32, too, except that static scales saturate infinities. In such rows codes stand for 0 (int8) or NaN (e4m3),
    with a dynamic scale all of them, with a static one those of NaN.

    Args:
        x: bfloat16, float16 or float32 [..., k], with silu_mul [..., 2k] with gate first; stride 1 along k, rows one
            stride apart, which is a multiple of 16 bytes; 16-byte aligned. k is a multiple of 32, at most 2^20, with a
            permutation 2^17. A row is read once if k is at most 32768 (16-bit x without silu_mul and rms_norm), 8192
            (fp32 with silu_mul) or 16384 (otherwise); longer ones are read again from the L2.
        dtype: float8_e4m3fn or int8.
        scheme: "token", a scale for each row, or "tensor", the scale that is given.
        affine: int8 with a zero point.
        scale: "tensor": fp32, one element, positive.
        zero: "tensor" and affine: int32, one element, -128..127.
        silu_mul: y = silu(gate) * up; not with rms_norm.
        rms_norm: weight [k], bfloat16, float16 or float32, contiguous, 16-byte aligned.
        eps: of RMSNorm.
        permutation: int32 [k], contiguous, 16-byte aligned; each of 0..k-1 once, which is not checked. A weight's
            `permutation`.
        out: (q, scale) or (q, scale, zero) to write to and return, shaped as below; q may have a row stride that is a
            multiple of 16 bytes.

    All on one device. On CUDA: compute capability 9.0.

    Returns:
        (q, scale), or (q, scale, zero) if affine: the `lhs` of a GEMM. q is [..., k] of dtype, scale fp32 [...] and
        zero int32 [...], for "tensor" too, where they are what was given but for NaN.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. Nothing was launched.
        CacheMissError: the kernel is missing, and a CUDA graph is being captured or JITGEMM_JIT=off.
        CompileError, DriverError, UnsupportedDeviceError: see `jitgemm.errors`.
    """
    if type(x) is not torch.Tensor:
        check_tensor("x", x)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {SCHEMES}, got {scheme!r}")
    static = scheme == "tensor"
    if torch.compiler.is_compiling() or traced(x, x):
        return _call_op(x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation, out)
    rows = x if x.dim() == 2 else _flat("x", x)
    if out is None:
        q, row_scale, row_zero = _run(rows, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation)
        return _shaped(x, q, row_scale, row_zero)
    checked = _check_out(out, x, dtype, affine, silu_mul)
    _run(rows, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation, checked)
    return out


def _run(
    x: torch.Tensor,
    dtype: torch.dtype,
    static: bool,
    affine: bool,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    silu_mul: bool,
    rms_norm: torch.Tensor | None,
    eps: float,
    permutation: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The call on x of two dimensions; `out` is checked. Returns (q, scale, zero or None)."""
    key = (
        x.shape, dtype, static, affine, silu_mul, eps, scale is None, zero is None, rms_norm is None,
        permutation is None, out is None,
    )  # fmt: skip
    tensors = present(x, scale, zero, rms_norm, permutation, None if out is None else out[0])
    try:
        plan = _plans.find(key, tensors)
    except TypeError:  # nothing that can be hashed: the checks say what
        plan = None
    if plan is None:
        check_quantize_arguments(x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation)
    m, k = x.shape[0], x.shape[1] // 2 if silu_mul else x.shape[1]
    if x.device.type == "cpu":
        return _run_on_cpu(x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation, out)
    if out is None:
        q, row_scale, row_zero = (
            torch.empty((m, k), dtype=dtype, device=x.device),
            torch.empty((m,), dtype=torch.float32, device=x.device),
            torch.empty((m,), dtype=torch.int32, device=x.device) if affine else None,
        )
    else:
        q, row_scale, row_zero = out
    if m == 0:
        return q, row_scale, row_zero
    if plan is None:
        plan = _make_plan(x, q, k, static, affine, silu_mul, rms_norm, eps, permutation)
        _plans.keep(key, tensors, plan)
    addresses = (
        x.data_ptr(),
        q.data_ptr(),
        row_scale.data_ptr(),
        0 if row_zero is None else row_zero.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        0 if rms_norm is None else rms_norm.data_ptr(),
        0 if permutation is None else permutation.data_ptr(),
    )
    if addresses != plan.addresses:
        if (addresses[0] | addresses[1] | addresses[6] | addresses[7]) % ALIGNMENT:
            _refuse_misaligned(x=x, out=q, rms_norm=rms_norm, permutation=permutation)
        if out is not None:
            _check_overlap(out, x=x, scale=scale, zero=zero, rms_norm=rms_norm, permutation=permutation)
    plan.launch(addresses)
    return q, row_scale, row_zero


def _make_plan(  # type: ignore[no-untyped-def]
    x, q, k, static, affine, silu_mul, rms_norm, eps, permutation
) -> QuantizePlan:
    from jitgemm.activations.plan import QuantizePlan

    spec = quantize_spec(
        k,
        TYPE_NAMES[x.dtype],
        TYPE_NAMES[q.dtype],
        affine=affine,
        static=static,
        silu_mul=silu_mul,
        rms_norm=rms_norm is not None,
        permuted=permutation is not None,
    )
    m = x.shape[0]
    with torch.cuda.device(x.device):
        return QuantizePlan(
            spec,
            x.get_device(),
            m=m,
            k=k,
            # One row's stride is never walked, and torch may report any value for it.
            x_row_bytes=x.stride(0) * x.element_size() if m > 1 else 0,
            q_row_bytes=q.stride(0) if m > 1 else 0,
            eps=eps,
            norm_weight_type=0 if rms_norm is None else DTYPES[TYPE_NAMES[rms_norm.dtype]].number,
        )


def _run_on_cpu(  # type: ignore[no-untyped-def]
    x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation, out
):
    if out is not None:
        _check_overlap(out, x=x, scale=scale, zero=zero, rms_norm=rms_norm, permutation=permutation)
    results = quantize_reference(
        x, dtype, scheme="tensor" if static else "token", affine=affine, scale=scale, zero=zero, silu_mul=silu_mul,
        rms_norm=rms_norm, eps=eps, permutation=permutation,
    )  # fmt: skip
    if out is None:
        return results
    for target, result in zip(out, results):
        if target is not None:
            target.copy_(result)
    return out


# ---- checks ----------------------------------------------------------------------------------------------------------


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows, without a copy."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: expected shape [..., k], got a scalar")
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name}: expected rows that are one stride apart, got shape {list(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}; make it contiguous"
        ) from None


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_neg():
        kind = "a lazily negated one" if tensor.layout == torch.strided else f"layout {tensor.layout}"
        raise TypeError(f"{name}: expected a plain strided tensor, got {kind}")


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"{name}: expected stride 1 along its columns, got strides {tuple(tensor.stride())}")
    unit = ALIGNMENT // tensor.element_size()
    if tensor.shape[0] > 1 and tensor.stride(0) % unit:
        raise ValueError(
            f"{name}: expected a row stride that is a multiple of {unit} elements ({ALIGNMENT} bytes), "
            f"got {tensor.stride(0)}"
        )
    if tensor.shape[0] > MAX_ROWS:
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {tensor.shape[0]}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def _check_parameter(
    name: str, value: object, device: torch.device, types: tuple[str, ...], elements: int, what: str
) -> None:
    """A contiguous tensor of so many elements, [k] or a single one of any shape."""
    tensor = check_tensor(name, value)
    check_dtype(name, tensor.dtype, types)
    _check_plain(name, tensor)
    if tensor.numel() != elements or (elements > 1 and tensor.dim() != 1):
        raise ValueError(f"{name}: expected {what}, got shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where x is, got one on {tensor.device}")


def check_quantize_arguments(
    x: torch.Tensor,
    dtype: torch.dtype,
    static: bool,
    affine: bool,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    silu_mul: bool,
    rms_norm: torch.Tensor | None,
    eps: float,
    permutation: torch.Tensor | None,
) -> None:
    """Raises TypeError or ValueError unless the inputs fit together; x has two dimensions. Looks at no values."""
    for name, flag in (("affine", affine), ("silu_mul", silu_mul)):
        _check_flag(name, flag)
    check_dtype("dtype", dtype, LHS_TYPES)
    if affine and dtype != torch.int8:
        raise ValueError(f"affine: expected dtype int8, got {dtype_name(dtype)}, which has no zero point")
    check_dtype("x", x.dtype, REAL_TYPES)
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"x: expected a CUDA or CPU tensor, got one on {x.device}")
    _check_plain("x", x)
    _check_rows("x", x)
    columns, limit = x.shape[1], MAX_K if permutation is None else MAX_PERMUTED_K
    k = columns // 2 if silu_mul else columns
    if silu_mul and columns % 64:
        raise ValueError(f"x: expected 2k columns with silu_mul, k a multiple of 32, got {columns}")
    if k < 32 or k % 32 or k > limit:
        suffix = "" if permutation is None else " with a permutation"
        raise ValueError(f"x: expected k to be a multiple of 32 from 32 to {limit}{suffix}, got {k}")

    for name, value, needed, why in (
        ("scale", scale, static, "scheme 'tensor'"),
        ("zero", zero, static and affine, "scheme 'tensor' with affine"),
    ):
        if needed and value is None:
            raise ValueError(f"{name}: expected one element for {why}, got None")
        if not needed and value is not None:
            raise ValueError(f"{name}: expected None unless for {why}, got a {type(value).__name__}")
    if scale is not None:
        _check_parameter("scale", scale, x.device, ("fp32",), 1, "one element")
    if zero is not None:
        _check_parameter("zero", zero, x.device, ("s32",), 1, "one element")
    if rms_norm is not None:
        if silu_mul:
            raise ValueError("rms_norm: expected None with silu_mul, got a weight")
        _check_parameter("rms_norm", rms_norm, x.device, REAL_TYPES, k, f"shape [{k}]")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a float, got {type(eps).__name__}")
    if not 0 <= eps < 3e38:
        raise ValueError(f"eps: expected a finite number that is not negative, got {eps}")
    if permutation is not None:
        _check_parameter("permutation", permutation, x.device, ("s32",), k, f"shape [{k}]")


def _check_out(
    out: object, x: torch.Tensor, dtype: torch.dtype, affine: bool, silu_mul: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q [m, k], scale [m], zero [m] or None) of the `out` argument."""
    expected = "(q, scale, zero)" if affine else "(q, scale)"
    if not isinstance(out, (tuple, list)) or len(out) != (3 if affine else 2):
        what = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected {expected}, got {what}")
    for i, tensor in enumerate(out):
        check_tensor(f"out[{i}]", tensor)
        if not torch.compiler.is_compiling():  # a tracer cannot ask
            _check_plain(f"out[{i}]", tensor)
        wanted = (dtype, torch.float32, torch.int32)[i]
        if tensor.dtype != wanted:
            raise TypeError(f"out[{i}]: expected {dtype_name(wanted)}, got {dtype_name(tensor.dtype)}")
        if tensor.device != x.device:
            raise ValueError(f"out[{i}]: expected a tensor on {x.device}, where x is, got one on {tensor.device}")
        if tensor.requires_grad:
            raise ValueError(f"out[{i}]: expected a tensor that does not require grad, got one that does")
    if x.dim() == 0:
        raise ValueError("x: expected shape [..., k], got a scalar")
    q, lead = out[0], tuple(x.shape[:-1])
    shape = (*lead, x.shape[-1] // 2 if silu_mul else x.shape[-1])
    if tuple(q.shape) != shape:
        raise ValueError(f"out[0]: expected shape {list(shape)}, got {list(q.shape)}")
    rows = _flat("out[0]", q)
    _check_rows("out[0]", rows)
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(
            f"out[0]: expected rows that do not overlap (row stride at least {rows.shape[1]}), got {rows.stride(0)}"
        )
    for i in range(1, len(out)):
        if tuple(out[i].shape) not in (lead, (*lead, 1)) or not out[i].is_contiguous():
            raise ValueError(
                f"out[{i}]: expected a contiguous tensor of shape {list(lead)} or {[*lead, 1]}, got {list(out[i].shape)} "
                f"with strides {tuple(out[i].stride())}"
            )
    return rows, out[1].view(-1), out[2].view(-1) if affine else None


def _refuse_misaligned(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}: expected an address that is a multiple of {ALIGNMENT} bytes, "
                f"got one that is {tensor.data_ptr() % ALIGNMENT} bytes past it"
            )


def _check_overlap(out: tuple[torch.Tensor | None, ...], **inputs: torch.Tensor | None) -> None:
    """Raises ValueError if the bytes that an output spans hold some of an input's, or of another output's."""
    spans = [(name, tensor) for name, tensor in inputs.items() if tensor is not None]
    for i, target in enumerate(out):
        if target is None:
            continue
        start = target.data_ptr()
        for name, tensor in spans:
            other = tensor.data_ptr()
            if start < other + byte_extent(tensor) and other < start + byte_extent(target):
                raise ValueError(f"out[{i}]: expected memory of its own, got a tensor that overlaps {name}")
        spans.append((f"out[{i}]", target))


def _shaped(  # type: ignore[no-untyped-def]
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Results of rows, as the shape of x has them."""
    if x.dim() != 2:
        lead = x.shape[:-1]
        q, scale = q.view(*lead, q.shape[1]), scale.view(lead)
        zero = None if zero is None else zero.view(lead)
    return (q, scale) if zero is None else (q, scale, zero)


# ---- torch.library ---------------------------------------------------------------------------------------------------

_library = torch.library.Library("jitgemm", "FRAGMENT")
_library.define(
    "quantize_activations(Tensor x, ScalarType dtype, bool static, bool affine, Tensor? scale, Tensor? zero, "
    "bool silu_mul, Tensor? rms_norm, float eps, Tensor? permutation) -> (Tensor, Tensor, Tensor)"
)


def _call_op(  # type: ignore[no-untyped-def]
    x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation, out
) -> tuple[torch.Tensor, ...]:
    for name, tensor in (("scale", scale), ("zero", zero), ("rms_norm", rms_norm), ("permutation", permutation)):
        if tensor is not None:
            check_tensor(name, tensor)
    check_dtype("dtype", dtype, LHS_TYPES)
    rows = _flat("x", x)
    targets = None if out is None else _check_out(out, x, dtype, affine, silu_mul)
    q, row_scale, row_zero = torch.ops.jitgemm.quantize_activations(
        rows, dtype, static, affine, scale, zero, silu_mul, rms_norm, float(eps), permutation
    )
    if targets is None:
        return _shaped(x, q, row_scale, row_zero if affine else None)
    for target, result in zip(targets, (q, row_scale, row_zero)):
        if target is not None:
            target.copy_(result)
    return tuple(out)


def _op(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, row_scale, row_zero = _run(*arguments)
    return q, row_scale, row_scale.new_empty(0, dtype=torch.int32) if row_zero is None else row_zero


def _fake_op(  # type: ignore[no-untyped-def]
    x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_quantize_arguments(x, dtype, static, affine, scale, zero, silu_mul, rms_norm, eps, permutation)
    m, k = x.shape[0], x.shape[1] // 2 if silu_mul else x.shape[1]
    return (
        x.new_empty((m, k), dtype=dtype),
        x.new_empty((m,), dtype=torch.float32),
        x.new_empty((m if affine else 0,), dtype=torch.int32),
    )


for _key in ("CUDA", "CPU"):
    _library.impl("quantize_activations", _op, _key)
torch.library.register_fake("jitgemm::quantize_activations", _fake_op, lib=_library)
