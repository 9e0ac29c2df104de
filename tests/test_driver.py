"""What is refused before anything is compiled or loaded: an NVRTC that the driver cannot follow, another GPU."""

import re
from types import SimpleNamespace

import pytest
import torch

from jitgemm.errors import UnsupportedDeviceError

driver = pytest.importorskip("jitgemm.driver", reason="needs cuda.bindings")
plan = pytest.importorskip("jitgemm.plan")


@pytest.mark.parametrize("nvrtc", [(12, 8), (12, 9), (13, 0)])
def test_nvrtc_of_the_drivers_major_version_or_older_is_fine(monkeypatch, nvrtc):
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 0))
    driver.check_nvrtc_against_driver(nvrtc)


def test_an_nvrtc_newer_than_the_driver_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 8))
    with pytest.raises(UnsupportedDeviceError, match=r"NVRTC 13\.0 .* driver \(CUDA 12\.8\) .*jitgemm\[cu12\]"):
        driver.check_nvrtc_against_driver((13, 0))


def test_nothing_is_compiled_for_a_driver_that_could_not_load_it(monkeypatch, tmp_path):
    from jitgemm.config import choose
    from jitgemm.device import DEVICES
    from jitgemm.spec import Problem, WeightFormat

    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "driver_version", lambda: (11, 8))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = choose(Problem(16, 64, 256, "s8", WeightFormat(128, False, "fp32")), DEVICES["h200"])
    with pytest.raises(UnsupportedDeviceError):
        plan.loaded_kernel(kernel, 0)
    assert not list(tmp_path.rglob("*.jgk"))


def test_a_gpu_of_another_generation_is_refused_by_name(monkeypatch):
    properties = SimpleNamespace(major=8, minor=0, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    plan.device_of.cache_clear()
    expected = r"cuda:3 is a NVIDIA A100 of compute capability 8\.0; .* need 9\.0"
    with pytest.raises(UnsupportedDeviceError, match=expected):
        plan.device_of(3)
    plan.device_of.cache_clear()


def test_the_argument_block_is_packed_in_the_size_that_the_kernel_checks():
    """`Args` in types.cuh asserts its own size when a kernel compiles; the plan must pack as many bytes."""
    from jitgemm.render import headers

    size = re.search(r"static_assert\(sizeof\(Args\) == (\d+)", headers()["jitgemm/types.cuh"])
    assert plan._ARGUMENTS.size == int(size[1])


def test_every_output_type_has_a_tensor_map_and_a_number():
    from jitgemm.arguments import OUT_DTYPES
    from jitgemm.spec import OUT_BYTES

    assert set(OUT_DTYPES.values()) == set(OUT_BYTES)
    for dtype, name in OUT_DTYPES.items():
        assert name in driver._ELEMENTS and OUT_BYTES[name] == dtype.itemsize
