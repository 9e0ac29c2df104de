"""What a thread remembers: plans are found for tensors like those they were made for, and for no others; what was found
least lately goes first; and no more bytes are held than are counted."""

import gc
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared_calls import gemm_operands, without_driver

from jitgemm.gemm.launch import GemmLaunch
from jitgemm.runtime import launch
from jitgemm.runtime.launch import LaunchCache, Recent, same_layout_check


class RefusingGuards:
    """A constructor that has changed."""

    def __init__(self, *tensors, dynamic_dims_sizes):
        pass


class BlindGuards:
    """A check that has changed."""

    def __init__(self, *tensors, **options):
        pass

    def check(self, *tensors):
        return False


@pytest.fixture(params=["guards", None, RefusingGuards, BlindGuards], ids=str, autouse=True)
def every_way_of_comparing(request, monkeypatch):
    """PyTorch's own comparison, and what stands in for it where PyTorch has none, or another one."""
    if request.param == "guards":
        assert launch.TensorGuards is not None, "this PyTorch has none: look for another, calls take longer"
    else:
        monkeypatch.setattr(launch, "TensorGuards", request.param)


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
    fits = same_layout_check(matrix(), torch.ones(4))
    assert fits(matrix(), torch.ones(4))
    assert fits(matrix().fill_(7), torch.zeros(4))
    assert not fits(other(), torch.ones(4))
    assert not fits(torch.ones(4), matrix())


_SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@given(_SIZES, _SIZES, st.permutations([0, 1, 2]))
def test_only_shapes_and_strides_decide_among_plain_tensors(sizes, others, order):
    a, b = torch.zeros(sizes), torch.zeros(others)
    if b.dim() == 3:
        b = b.permute(*order)
    assert same_layout_check(a)(b) == (a.shape == b.shape and a.stride() == b.stride())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_tensor_that_requires_grad_is_like_no_other_and_one_of_inference_like_its_own(enabled):
    with torch.set_grad_enabled(enabled):
        fits = same_layout_check(torch.ones(4))
        assert fits(torch.ones(4)) and not fits(torch.ones(4, requires_grad=True))
    with torch.inference_mode():
        assert not fits(torch.ones(4)) and same_layout_check(torch.ones(4))(torch.ones(4))


def test_a_plan_is_found_by_its_key_and_its_tensors():
    cache = LaunchCache()
    narrow, wide = (matrix(), torch.ones(4)), (matrix(columns=64)[:, :32], torch.ones(4))
    assert cache.find_plan(("a",), narrow) is None
    cache.add_plan(("a",), narrow, "narrow")
    cache.add_plan(("a",), wide, "wide")
    cache.add_plan(("b",), narrow[:1], "one tensor")
    assert cache.find_plan(("a",), narrow) == "narrow" and cache.find_plan(("a",), wide) == "wide"
    assert cache.find_plan(("b",), narrow[:1]) == "one tensor"
    assert cache.find_plan(("b",), wide[:1]) is None and cache.find_plan(("c",), narrow) is None


def test_a_key_has_so_many_plans(monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS_PER_KEY", 2)
    cache = LaunchCache()
    for rows in (1, 2, 3):
        cache.add_plan("key", (matrix(rows),), rows)
    assert [cache.find_plan("key", (matrix(rows),)) for rows in (1, 2, 3)] == [None, 2, 3]


@dataclass
class Block:
    nbytes: int


def test_what_was_found_least_lately_goes_first(monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLAN_BYTES", 3 * launch.PLAN_BYTES)
    cache = LaunchCache()
    for key in "abc":
        cache.add_plan(key, (matrix(),), key)
    for number in range(100):  # a flood that a plan in use survives
        assert cache.find_plan("a", (matrix(),)) == "a"
        cache.add_plan(number, (matrix(),), number)
    assert cache.find_plan("b", (matrix(),)) is None and cache.find_plan("c", (matrix(),)) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=60))
def test_there_are_never_more_bytes_than_allowed(entries):
    cache = Recent(100)
    for key, nbytes in entries:
        cache.add(key, Block(nbytes))
        assert cache.values[key].nbytes == nbytes
        assert cache.nbytes == sum(block.nbytes for block in cache.values.values()) <= 100


def test_threads_share_no_plans():
    launch.this_thread.cache.add_plan("test", (matrix(),), "plan")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: launch.this_thread.cache.find_plan("test", (matrix(),)))
        assert found.result() is None
    assert launch.this_thread.cache.find_plan("test", (matrix(),)) == "plan"


def test_remembering_a_plan_keeps_no_tensor_alive():
    cache, tensor = LaunchCache(), matrix()
    cache.add_plan((), (tensor,), "plan")
    seen = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert seen() is None


# ---- the bytes that the limit counts are those that are held --------------------------------------------------------


def held_by(make, count: int) -> float:
    """Bytes that each of so many values holds."""
    make(0)
    gc.collect()
    tracemalloc.start()
    kept = [make(number) for number in range(1, count + 1)]
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == count
    return held / count


@pytest.mark.parametrize("every_way_of_comparing", ["guards"], indirect=True)  # which it does not depend on
def test_parameters_hold_the_bytes_that_they_count(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    cache, plan = LaunchCache(), GemmLaunch(operands)
    monkeypatch.setattr(launch.this_thread, "cache", cache)

    def launch_at(i: int) -> None:
        plan.run(tuple(range(i << 40, (i << 40) + 9)), True, operands.operands())
        launches.clear()

    measured = held_by(launch_at, 600)
    counted = cache.parameters.nbytes / len(cache.parameters.values)
    assert 0.8 * counted <= measured <= 1.1 * counted, (measured, counted)


@pytest.mark.parametrize("every_way_of_comparing", ["guards", None], indirect=True)
def test_plans_hold_the_bytes_that_they_count(monkeypatch):
    without_driver(monkeypatch)
    operands = gemm_operands()
    cache = LaunchCache()

    def remember(i: int) -> None:
        tensors = (operands.x, operands.x_scale, operands.out)
        cache.add_plan((i,), tensors, GemmLaunch(operands))

    measured = held_by(remember, 70)
    assert 0.5 * launch.PLAN_BYTES <= measured <= launch.PLAN_BYTES, measured
