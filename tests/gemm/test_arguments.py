"""What `gemm_w4a8_nt` and its bf16 form take and what they refuse.

Each refusal names the argument, what was expected and what came.

On CPU tensors, where every check but that of CUDA addresses runs too.
"""

from __future__ import annotations

import builders
import pytest
import torch
from prepared_calls import remembered
from torch._subclasses.fake_tensor import FakeTensorMode

import jitgemm
from jitgemm.gemm.exact import round_fp64

M, N, K = 5, 72, 96
POISON = -12345.0


class Call:
    """A legal call's arguments; tests replace one and see what happens. With `out` its output may have other types."""

    def __init__(self, dtype: str = "e4m3", m: int = M, out: torch.dtype | None = None):
        made = builders.affine_lhs(1, m, K, mean="positive") if dtype == "affine" else builders.lhs(1, m, K, dtype)
        self.x, self.x_scale, self.x_zero = (*made, None)[:3]
        self.rhs = builders.weight_parts(2, N, K, 32).packed
        self.out = torch.full((m, N), POISON, dtype=out or torch.bfloat16)
        self.bias: object = None
        self.gemm = jitgemm.gemm_w4a8_nt if out else jitgemm.gemm_w4a8_bf16_nt

    @property
    def lhs(self) -> tuple:
        return (self.x, self.x_scale) if self.x_zero is None else (self.x, self.x_scale, self.x_zero)

    def run(self) -> torch.Tensor:
        self.gemm(self.lhs, self.rhs, self.out, bias=self.bias)
        return self.out

    def expected(self) -> torch.Tensor:
        return jitgemm.gemm_w4a8_reference(self.lhs, self.rhs, bias=self.bias, out_dtype=self.out.dtype)

    def refused(self, error: type[Exception], argument: str, expected: str, got: str) -> None:
        """The call raises, says all three, and wrote nothing."""
        out = self.out
        before = out.clone() if isinstance(out, torch.Tensor) and out.device.type == "cpu" else None
        with pytest.raises(error) as caught:
            self.run()
        message = str(caught.value)
        assert type(caught.value) is error
        assert message.startswith(f"{argument}:"), message
        assert expected in message, message
        assert got in message.split("got", 1)[1], message
        if before is not None:
            assert builders.same_bits(out, before)


@pytest.fixture
def call() -> Call:
    return Call()


# ---- what is wrong with one tensor ----------------------------------------------------------------------------------

ARGUMENTS = {"x": "lhs[0] (x)", "x_scale": "lhs[1] (x_scale)", "x_zero": "lhs[2] (x_zero)"}
INT8, INT32, BF16 = torch.int8, torch.int32, torch.bfloat16
PER_TOKEN = f"[{M}], [{M}, 1] or one element"


def shapes(name: str, dtype: torch.dtype, expected: str, *wrong: tuple[int, ...]) -> list[tuple]:
    return [(name, torch.zeros(shape, dtype=dtype), ValueError, expected, str(list(shape))) for shape in wrong]


def rows(name: str, columns: int, dtype: torch.dtype, unit: int, expected: str, *strides: int) -> list[tuple]:
    """Of the wrong stride along k or n, of these strides from row to row, and of rows that overlap."""
    one, apart = torch.zeros(1, columns, dtype=dtype), "rows that do not overlap"
    near = torch.zeros(M * columns, dtype=dtype).as_strided((M, columns), (columns - unit, 1))
    return [
        (name, torch.zeros(columns, M, dtype=dtype).T, ValueError, "stride 1", f"(1, {M})"),
        *((name, torch.zeros(M, each, dtype=dtype)[:, :columns], ValueError, expected, str(each)) for each in strides),
        (name, one.expand(M, columns), ValueError, apart, "row stride 0"),
        (name, near, ValueError, apart, f"row stride {columns - unit}"),
    ]


WRONG = [
    *shapes("x", INT8, "[m, k]", (K,), (1, M, K), (M, K - 32), (M, K + 32), (K, M), (M, 0)),
    *rows("x", K, INT8, 16, "multiple of 16", K + 8, K + 1, K + 15),
    ("x", torch.zeros(M, 2 * K, dtype=INT8)[:, ::2], ValueError, "stride 1", f"({2 * K}, 2)"),
    ("x", torch.zeros(M, K, dtype=INT8, device="meta"), ValueError, "CUDA or CPU", "meta"),
    *shapes("x_scale", torch.float32, PER_TOKEN, (M - 1,), (M + 1,), (1, M), (M, 2), (M, 1, 1), (1, 1, 1), (0,), (M, K // 32)),
    ("x_scale", torch.ones(M, 1, device="meta"), ValueError, "on cpu", "meta"),
    *shapes("x_zero", INT32, PER_TOKEN, (M - 1,), (M + 1,), (1, M), (M, 2), (M, 1, 1), (1, 1, 1), (0,)),
    ("x_zero", torch.zeros(M, 1, dtype=INT32, device="meta"), ValueError, "on cpu", "meta"),
    ("rhs", builders.weight_parts(2, N, K, 32).packed.to("meta"), ValueError, "on cpu", "meta"),
    *shapes("out", BF16, "expected shape [", (M - 1, N), (M + 1, N), (M, N + 8), (M, N - 8), (N, M), (M * N,), (1, M, N), (0, N)),
    *rows("out", N, BF16, 8, "multiple of 8 elements (16 bytes)", N + 1, N + 4, N + 7),
    ("out", torch.zeros(M, N, dtype=BF16).requires_grad_(), ValueError, "does not require grad", "one that does"),
    ("out", torch.zeros(M, N, dtype=BF16, device="meta"), ValueError, "on cpu", "meta"),
    *shapes("bias", torch.float32, f"[{N}]", (), (1,), (N - 8,), (N + 8,), (1, N), (N, 1), (M,)),
    ("bias", torch.zeros(2 * N)[::2], ValueError, "contiguous", "(2,)"),
    ("bias", torch.zeros(1).expand(N), ValueError, "contiguous", "(0,)"),
    ("bias", torch.zeros(N, device="meta"), ValueError, "on cpu", "meta"),
]  # fmt: skip
"""The argument, what is in its place, and the error with what it expected and got."""


@pytest.mark.parametrize(("name", "value", "error", "expected", "got"), WRONG, ids=[f"{w[0]}: {w[4]}" for w in WRONG])
def test_what_is_wrong_with_a_tensor_is_named(name, value, error, expected, got):
    call = Call("affine" if name == "x_zero" else "e4m3")
    setattr(call, name, value)
    call.refused(error, ARGUMENTS.get(name, name), expected, got)


# ---- lhs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lhs", "got"),
    [
        ((torch.zeros(M, K, dtype=torch.int8),), "tuple of 1"),
        ([torch.zeros(M, K, dtype=torch.int8)] * 4, "list of 4"),
        (torch.zeros(2, K, dtype=torch.int8), "Tensor"),
    ],
    ids=["one", "four", "tensor-of-two-rows"],
)
def test_lhs_must_be_a_pair_or_three(call, lhs, got):
    message = rf"^lhs: expected a pair \(x, x_scale\), or \(x, x_scale, x_zero\), got {got}$"
    with pytest.raises(TypeError, match=message):
        jitgemm.gemm_w4a8_bf16_nt(lhs, call.rhs, call.out)


@pytest.mark.parametrize("dtype", ["e4m3", "s8"])
@pytest.mark.parametrize("pad", [16, 32, 112])
def test_x_may_be_a_slice_of_rows_and_columns(dtype, pad):
    call = Call(dtype)
    whole = torch.zeros(2 * M, K + pad, dtype=torch.int8).view(call.x.dtype)
    whole[::2, 16 : 16 + K] = call.x
    expected = call.expected()
    call.x = whole[::2, 16 : 16 + K]
    assert builders.same_bits(call.run(), expected)


def test_one_row_may_have_any_row_stride():
    call = Call("s8", m=1)
    expected = call.expected()
    call.x = torch.cat([call.x, call.x], dim=1)[:, :K].as_strided((1, K), (7, 1))
    call.out = torch.empty(N, dtype=torch.bfloat16).as_strided((1, N), (3, 1))
    assert builders.same_bits(call.run().contiguous(), expected)


# ---- x_zero -------------------------------------------------------------------------------------------------------


def test_only_int8_has_zero_points():
    affine = Call("affine")
    affine.x = affine.x.float().to(torch.float8_e4m3fn)
    affine.refused(TypeError, "lhs[0] (x)", "int8 with lhs[2] (x_zero)", "float8_e4m3fn")


def test_zero_points_need_the_sums_of_the_weight_s_rows():
    affine = Call("affine")
    rhs = affine.rhs
    affine.rhs = rhs.with_tensors(rhs.blocks, rhs.channel_scale, None, rhs.permutation)
    affine.refused(ValueError, "rhs", "a weight with row_sum, which lhs[2] (x_zero) needs", "one without")
    # A call without zero points does not.
    affine.x_zero = None
    assert builders.same_bits(affine.run(), affine.expected())


# ---- rhs ----------------------------------------------------------------------------------------------------------


def test_arguments_are_checked_against_the_weight_of_this_call(call):
    """A legal call prepares nothing that lets a call with another weight through."""
    call.run()
    call.rhs = builders.weight_parts(3, N, K + 32, 32).packed
    call.refused(ValueError, "lhs[0] (x)", f"{K + 32} columns", f"[{M}, {K}]")
    call.rhs = builders.weight_parts(3, N + 8, K, 32).packed
    call.refused(ValueError, "out", f"{N + 8} columns", f"[{M}, {N}]")


@pytest.mark.parametrize(("packed_for", "given_"), [("e4m3", "s8"), ("s8", "e4m3")])
def test_a_weight_packed_for_one_type_of_activations_refuses_the_other(packed_for, given_):
    names = {"e4m3": "float8_e4m3fn", "s8": "int8"}
    call = Call(given_)
    call.rhs = builders.weight_parts(2, N, K, 32, codes=packed_for).packed
    call.refused(
        TypeError, "lhs[0] (x)", f"{names[packed_for]}, for which rhs was packed (lhs_dtype of pack_w4)", names[given_]
    )
    call.x, call.x_scale = builders.lhs(1, M, K, packed_for)
    assert builders.same_bits(call.run(), call.expected())


# ---- out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.int32])
def test_out_must_be_bf16_fp16_or_fp32(dtype):
    call = Call("s8", out=torch.bfloat16)
    call.out = torch.zeros(M, N).to(dtype)
    call.refused(TypeError, "out", "bfloat16, float16 or float32", str(dtype).removeprefix("torch."))


OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("lhs_dtype", ["e4m3", "s8"])
@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_the_result_is_rounded_once_to_the_type_of_out(dtype, lhs_dtype):
    call = Call(lhs_dtype, out=dtype)
    call.bias = builders.bias(5, N, torch.float32)
    exact = jitgemm.gemm_w4a8_reference(call.lhs, call.rhs, bias=call.bias, out_dtype=torch.float64)
    assert call.run().dtype == dtype
    assert builders.same_bits(call.out, round_fp64(exact, dtype))


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_out_of_every_type_may_be_a_column_slice(dtype):
    call = Call("s8", out=dtype)
    expected = call.expected()
    whole = torch.full((M + 2, N + 24), POISON, dtype=dtype)
    poison = whole[0, 0].clone()
    call.out = whole[1:-1, 8 : 8 + N]
    assert builders.same_bits(call.run().contiguous(), expected)
    call.out.fill_(poison)
    assert bool((whole == poison).all())


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 4)])
def test_out_must_have_a_row_stride_of_whole_16_bytes(dtype, unit):
    call = Call("s8", out=dtype)
    expected = call.expected()
    for pad in range(1, unit):
        call.out = torch.zeros(M, N + pad, dtype=dtype)[:, :N]
        call.refused(ValueError, "out", f"multiple of {unit} elements (16 bytes)", str(N + pad))
    call.out = torch.zeros(M, N + unit, dtype=dtype)[:, :N]
    assert builders.same_bits(call.run().contiguous(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_may_require_grad_and_out_stays_without(call, dtype):
    call.bias = torch.nn.Parameter(builders.bias(5, N, dtype))
    call.x_scale = torch.nn.Parameter(call.x_scale)
    call.run()
    assert not call.out.requires_grad and call.out.grad_fn is None
    call.run()  # the same out again


# ---- devices ------------------------------------------------------------------------------------------------------


def test_two_gpus_do_not_mix(call):
    rhs = call.rhs
    with FakeTensorMode(allow_non_fake_inputs=True):
        call.x = torch.empty(M, K, dtype=torch.int8, device="cuda:0")
        call.x_scale = torch.empty(M, device="cuda:1")
        call.out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda:0")
        call.refused(ValueError, "lhs[1] (x_scale)", "on cuda:0", "cuda:1")
        call.x_scale = torch.empty(M, device="cuda:0")
        call.rhs = rhs
        call.refused(ValueError, "rhs", "on cuda:0", "cpu")


# ---- overlap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_first", [False, True])
def test_interleaved_column_slices_do_not_overlap(call, out_first):
    """x and out side by side in the rows of one buffer: their byte ranges cross, their bytes do not."""
    expected = call.expected()
    rows = torch.zeros(M, 16 + K + 2 * N, dtype=torch.uint8)
    first = 2 * N if out_first else 0
    x = rows[:, first : first + K].view(call.x.dtype)
    out_at = 0 if out_first else K + 16
    call.out = rows[:, out_at : out_at + 2 * N].view(torch.bfloat16)
    x.copy_(call.x)
    call.x = x
    assert builders.same_bits(call.run().contiguous(), expected)
    assert builders.same_bits(x.contiguous(), Call().x)


def test_column_slices_that_share_a_column_overlap(call):
    rows = torch.zeros(M, K + 2 * N, dtype=torch.uint8)
    call.x = rows[:, :K].view(torch.int8)
    call.out = rows[:, K - 16 : K - 16 + 2 * N].view(torch.bfloat16)
    call.refused(ValueError, "out", "memory of its own", "overlaps lhs[0] (x)")


def test_scales_beside_the_output_do_not_overlap(call):
    rows = torch.zeros(M, N + 8, dtype=torch.bfloat16)
    x_scale = rows[:, N : N + 2].view(torch.float32)
    x_scale.copy_(torch.arange(1.0, M + 1)[:, None])
    call.x_scale, call.out = x_scale, rows[:, :N]
    expected = call.expected()
    assert builders.same_bits(call.run().contiguous(), expected)


# ---- no tokens ----------------------------------------------------------------------------------------------------


def test_no_tokens_is_still_checked():
    call = Call("s8", m=0)
    call.out = torch.zeros(1, N, dtype=torch.bfloat16)
    call.refused(ValueError, "out", f"[0, {N}]", f"[1, {N}]")
    call = Call("s8", m=0)
    call.bias = torch.zeros(N + 8)
    call.refused(ValueError, "bias", f"[{N}]", f"[{N + 8}]")


# ---- addresses: CUDA only -------------------------------------------------------------------------------------------


def test_cpu_tensors_need_no_alignment(call):
    expected = call.expected()
    x = torch.zeros(M * K + 1, dtype=torch.int8)[1:].view(call.x.dtype).view(M, K)
    x.copy_(call.x)
    call.x = x
    call.out = torch.zeros(M * N + 1, dtype=torch.bfloat16)[1:].view(M, N)
    assert builders.same_bits(call.run().clone(), expected)


@pytest.mark.parametrize(
    ("attribute", "argument", "unit"),
    [
        ("x", "lhs[0] (x)", 16),
        ("out", "out", 16),
        ("blocks", "rhs.blocks", 16),
        ("channel_scale", "rhs.channel_scale", 4),
    ],
)
def test_what_a_launch_has_addresses_of_must_be_aligned(monkeypatch, attribute, argument, unit):
    """The GPU's rule without one, in a first call and in one with a plan."""
    _, launches = remembered(monkeypatch)
    rhs = builders.weight_parts(2, N, K, builders.PER_CHANNEL).packed
    given = dict(zip(("x", "x_scale"), builders.lhs(1, M, K, "s8"))) | {"x_zero": None, "blocks": rhs.blocks}
    given |= {"channel_scale": rhs.channel_scale, "row_sum": rhs.row_sum, "out": torch.zeros(M, N).bfloat16()}
    tensor, size = given[attribute], given[attribute].element_size()
    shifted = torch.zeros(tensor.nbytes + size, dtype=torch.uint8)[size:].view(tensor.dtype).view(tensor.shape)
    rest = None, N, K, rhs.format.name, False
    for legal in (1, 2):
        with pytest.raises(ValueError) as caught:
            torch.ops.jitgemm.gemm_w4a8_nt(*(given | {attribute: shifted}).values(), *rest)
        assert str(caught.value).startswith(f"{argument}: expected an address that is a multiple of {unit} bytes")
        torch.ops.jitgemm.gemm_w4a8_nt(*given.values(), *rest)
        assert len(launches) == legal


def test_a_kernel_that_is_no_label_raises_on_the_cpu_too():
    lhs, out = builders.lhs(1, 4, 128, "s8"), torch.empty(4, 64, dtype=torch.bfloat16)
    weight = builders.weight_parts(3, 64, 128, 32).packed
    with pytest.raises(ValueError, match="^kernel: expected a label such as .*, got 'nonsense'"):
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out, kernel="nonsense")
    experts = jitgemm.pack_w4(torch.ones(2, 64, 128, dtype=torch.int8), torch.ones(2, 64, 1), group_size=128)
    with pytest.raises(ValueError, match="^kernel: expected a label such as .*, got 'nonsense'"):
        jitgemm.m_grouped_gemm_w4a8_bf16_nt_contiguous(
            lhs, experts, out, torch.tensor([0, 2, 4], dtype=torch.int32), kernel="nonsense"
        )
