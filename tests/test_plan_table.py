"""The look-up of a hot call: plans are found for tensors like those they were made for, and for no others."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitgemm.runtime import plans as plan_table
from jitgemm.runtime.plans import Plans, like, present


@pytest.fixture(params=["guards", "python"], autouse=True)
def either_way_of_comparing(request, monkeypatch):
    """PyTorch's own comparison, and what stands in for it where PyTorch has none."""
    if request.param == "python":
        monkeypatch.setattr(plan_table, "TensorGuards", None)
    else:
        assert plan_table.TensorGuards is not None, "this PyTorch has none: look for another, calls take longer"


def matrix(rows=4, columns=32, dtype=torch.int8) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


OTHERS = {
    "a shape": lambda: matrix(rows=5),
    "more dimensions": lambda: matrix()[None],
    "a stride": lambda: matrix(columns=64)[:, :32],
    "the order of dimensions": lambda: matrix(32, 4).t(),
    "a dtype": lambda: matrix(dtype=torch.uint8),
    "a device": lambda: torch.zeros(4, 32, dtype=torch.int8, device="meta"),
    "a Parameter": lambda: torch.nn.Parameter(matrix(), requires_grad=False),
    "a subclass": lambda: matrix().as_subclass(type("Sub", (torch.Tensor,), {})),
    "lazily negated": lambda: torch._neg_view(matrix()),
    "sparse": lambda: matrix().to_sparse(),
    "no tensor": lambda: "matrix",
    "None": lambda: None,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_differs_in_one_way_is_not_alike(other):
    fits = like(matrix(), torch.ones(4))
    assert fits(matrix(), torch.ones(4))
    assert fits(matrix().fill_(7), torch.zeros(4))
    assert not fits(other(), torch.ones(4))
    assert not fits(torch.ones(4), matrix())


def test_inference_tensors_are_not_like_others():
    fits = like(matrix())
    with torch.inference_mode():
        made = matrix()
        assert not fits(made)
        assert like(made)(matrix())


_SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@given(_SIZES, _SIZES, st.permutations([0, 1, 2]))
def test_only_shapes_and_strides_decide_among_plain_tensors(sizes, others, order):
    a, b = torch.zeros(sizes), torch.zeros(others)
    if b.dim() == 3:
        b = b.permute(*order)
    assert like(a)(b) == (a.shape == b.shape and a.stride() == b.stride())


def test_a_plan_is_found_by_its_key_and_its_tensors():
    plans = Plans()
    narrow, wide = (matrix(), torch.ones(4)), (matrix(columns=64)[:, :32], torch.ones(4))
    assert plans.find(("a",), narrow) is None
    plans.keep(("a",), narrow, "narrow")
    plans.keep(("a",), wide, "wide")
    plans.keep(("b",), narrow[:1], "one tensor")
    assert plans.find(("a",), narrow) == "narrow" and plans.find(("a",), wide) == "wide"
    assert plans.find(("b",), narrow[:1]) == "one tensor"
    assert plans.find(("b",), wide[:1]) is None and plans.find(("c",), narrow) is None


def test_the_oldest_plans_go_first(monkeypatch):
    monkeypatch.setattr(plan_table, "MAX_KEYS", 2)
    monkeypatch.setattr(plan_table, "MAX_ALIKE", 2)
    plans = Plans()
    for key in "abc":
        for rows in (1, 2, 3):
            plans.keep((key,), (matrix(rows),), f"{key}{rows}")
    kept = {key: [plans.find((key,), (matrix(rows),)) for rows in (1, 2, 3)] for key in "abc"}
    assert kept == {"a": [None] * 3, "b": [None, "b2", "b3"], "c": [None, "c2", "c3"]}


def test_threads_share_no_plans():
    plans = Plans()
    plans.keep((), (matrix(),), "plan")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(plans.find, (), (matrix(),)).result() is None
    assert plans.find((), (matrix(),)) == "plan"


def test_keeping_a_plan_keeps_no_tensor_alive():
    plans, tensor = Plans(), matrix()
    plans.keep((), (tensor,), "plan")
    seen = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert seen() is None


def test_present_leaves_out_what_is_none():
    tensor = matrix()
    assert present(None, tensor, None) == (tensor,)
