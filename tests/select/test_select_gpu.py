"""The selector's picture of a device against the GPU at hand."""

from __future__ import annotations

import pytest
import torch

from jitgemm.gemm.launch import KERNELS
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.spec import smem_bytes
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.select.devices import _DRIVER_NAMES, DEVICES
from jitgemm.select.legal import launched_clusters, legal_kernels

pytestmark = pytest.mark.gpu


def test_the_gpu_at_hand_has_the_table_s_figures_or_what_the_driver_reports():
    found, name = device_of(0), torch.cuda.get_device_name(0)
    if name in _DRIVER_NAMES:
        assert found == DEVICES[_DRIVER_NAMES[name]]
    else:
        assert found.name == name and 5e5 < found.hbm_bytes_per_us < 1e7 and found.tensor_ops_per_us > 1e8


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("ctas_per_sm", [1, 2])
def test_as_many_clusters_are_launched_as_the_driver_holds_and_about_as_many_predicted(size, ctas_per_sm):
    device = device_of(0)
    kernels = legal_kernels("e4m3", WeightFormat(128, False, "bf16", "e4m3"), device)
    some = [spec for spec in kernels if (spec.split_k, spec.ctas_per_sm) == (size, ctas_per_sm)]
    if not some:
        pytest.skip("no such kernel")
    spec = some[len(some) // 2]
    kernel = KERNELS.load(spec, 0)
    resident = driver.resident_clusters(kernel, size, spec.threads, smem_bytes(spec))
    assert 1 <= resident * size <= device.num_sms * ctas_per_sm
    launched = launched_clusters(spec, 10**6, device.num_sms, resident)
    predicted = launched_clusters(spec, 10**6, device.num_sms, device.resident_clusters(size, ctas_per_sm))
    assert abs(launched - predicted) * size <= 0.1 * device.num_sms
