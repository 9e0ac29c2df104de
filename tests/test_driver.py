"""Loading and launching as far as no GPU is needed: what is refused before, what is loaded once, what is launched."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from jitgemm.activations.kernel import MAX_PERMUTED_K, quantize_spec
from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import CacheMissError, UnsupportedDeviceError
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import smem_bytes
from jitgemm.runtime.device import device_of
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES

driver = pytest.importorskip("jitgemm.runtime.driver", reason="needs cuda.bindings")
plan = pytest.importorskip("jitgemm.gemm.plan")
loaded = pytest.importorskip("jitgemm.runtime.kernels")
quantize_plan = pytest.importorskip("jitgemm.activations.plan")


@pytest.mark.parametrize("nvrtc", [(12, 8), (12, 9), (13, 0)])
def test_nvrtc_of_the_drivers_major_version_or_older_is_fine(monkeypatch, nvrtc):
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 0))
    driver.check_nvrtc_against_driver(nvrtc)


def test_an_nvrtc_newer_than_the_driver_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 8))
    with pytest.raises(UnsupportedDeviceError, match=r"NVRTC 13\.0 .* driver \(CUDA 12\.8\) .*jitgemm\[cu12\]"):
        driver.check_nvrtc_against_driver((13, 0))


def gemm_spec():
    return choose(Problem(16, 64, 256, "s8", WeightFormat(128, False, "fp32")), DEVICES["h200"])


def quantizer_spec():
    return quantize_spec(4096, "bf16", "s8", permuted=True)


def test_nothing_is_compiled_for_a_driver_that_could_not_load_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "driver_version", lambda: (11, 8))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for load, spec in ((plan.loaded_kernel, gemm_spec()), (quantize_plan.loaded_quantizer, quantizer_spec())):
        with pytest.raises(UnsupportedDeviceError):
            load(spec, 0)
    assert not list(tmp_path.rglob("*.jgk"))


def test_what_is_not_loaded_is_refused_during_capture_with_the_call_to_make_before(monkeypatch):
    monkeypatch.setattr(loaded, "kernels", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CacheMissError, match=r"-g128-.* being captured: call the GEMM once with these shapes before"):
        plan.loaded_kernel(gemm_spec(), 0)
    with pytest.raises(CacheMissError, match=r"quantize-bf16-s8.* call quantize_activations once with these arguments"):
        quantize_plan.loaded_quantizer(quantizer_spec(), 0)


def test_a_kernel_is_loaded_once_a_device_whatever_threads_ask(monkeypatch):
    loads = []

    def load_kernel(cubin, name, *, device, smem_bytes):
        loads.append((cubin, name, device, smem_bytes))
        return driver.LoadedKernel(name, None, device)

    monkeypatch.setattr(loaded, "kernels", {})
    monkeypatch.setattr(loaded.cache, "get_or_compile", lambda source: (SimpleNamespace(cubin=source.label), 1))
    monkeypatch.setattr(driver, "check_nvrtc_against_driver", lambda nvrtc: None)
    monkeypatch.setattr(driver, "load_kernel", load_kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gemm, quantizer = gemm_spec(), quantizer_spec()
    with ThreadPoolExecutor(4) as pool:
        for device in (0, 1):
            for load, spec in ((plan.loaded_kernel, gemm), (quantize_plan.loaded_quantizer, quantizer)):
                first, *others = pool.map(load, [spec] * 16, [device] * 16)
                assert all(kernel is first for kernel in others)
    assert loads == [
        (spec.label, name, device, smem)
        for device in (0, 1)
        for spec, name, smem in (
            (gemm, "jitgemm_w4a8", smem_bytes(gemm)),
            (quantizer, "jitgemm_quantize", MAX_PERMUTED_K),
        )
    ]


@pytest.mark.parametrize("maps", [(), (128, 256)])
def test_a_launch_passes_its_maps_and_then_its_argument_block(monkeypatch, maps):
    launches = []

    def launch(config, function, parameters, extra):
        grid, block = (config.gridDimX, config.gridDimY), (config.blockDimX, config.blockDimY, config.blockDimZ)
        *passed, arguments = (ctypes.c_void_p * (len(maps) + 1)).from_address(parameters)
        shape = grid, block, config.sharedMemBytes, config.numAttrs, int(config.hStream)
        launches.append((shape, function, tuple(passed), ctypes.string_at(arguments, 5)))
        return (driver.cu.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver.cu, "cuLaunchKernelEx", launch)
    kernel = driver.LoadedKernel("function", None, 0)
    prepared = driver.Launch(kernel, grid=7, block=(32, 8), smem_bytes=4096)
    for arguments, stream, dependent in ((b"\1\0\0\0\2", 11, True), (b"\3\4\5\6\7", 12, False)):
        prepared.run(driver.Parameters(arguments, [(None, place) for place in maps]), stream, dependent)
    assert launches == [
        (((7, 1), (32, 8, 1), 4096, attributes, stream), "function", maps, arguments)
        for arguments, stream, attributes in ((b"\1\0\0\0\2", 11, 1), (b"\3\4\5\6\7", 12, 0))
    ]


def test_a_gpu_of_another_generation_is_refused_by_name(monkeypatch):
    properties = SimpleNamespace(major=8, minor=0, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device_of.cache_clear()
    expected = r"cuda:3 is a NVIDIA A100 of compute capability 8\.0; .* need 9\.0"
    with pytest.raises(UnsupportedDeviceError, match=expected):
        device_of(3)
    device_of.cache_clear()


def test_the_argument_block_is_packed_in_the_size_that_the_kernel_checks():
    """`Args` in gemm/types.cuh asserts its own size when a kernel compiles; the plan must pack as many bytes."""
    from jitgemm.jit.source import headers

    size = re.search(r"static_assert\(sizeof\(Args\) == (\d+)", headers()["jitgemm/gemm/types.cuh"])
    assert plan._ARGUMENTS.size == int(size[1])


def test_every_output_type_has_a_tensor_map():
    assert set(REAL_TYPES) <= set(driver._ELEMENTS)
