"""Loading and launching as far as no GPU is needed: what is refused before, what is loaded once, what is launched."""

import ctypes
import functools
import gc
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from arguments_of_kernels import CODES, struct_of

from jitgemm.activations.arguments import activation_of
from jitgemm.activations.kernel import MAX_PERMUTED_K, quantize_spec
from jitgemm.activations.run import QuantizeCall
from jitgemm.activations.scheme import Gate, Prologue
from jitgemm.dtypes import DTYPES, REAL_TYPES
from jitgemm.errors import CacheMissError, UnsupportedDeviceError
from jitgemm.jit.source import function_name
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import smem_bytes
from jitgemm.runtime.device import device_of
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.weight import ready

pytest.importorskip("cuda.bindings")
from prepared_calls import gemm_operands, quantizer_inputs, without_driver

from jitgemm.activations import plan as quantizers
from jitgemm.gemm import launch as gemms
from jitgemm.gemm import partial, ranks
from jitgemm.gemm import run as gemm_run
from jitgemm.moe import exchange
from jitgemm.moe import plan as experts
from jitgemm.runtime import driver, loaded
from jitgemm.runtime import launch as launching


def test_an_nvrtc_newer_than_the_driver_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 8))
    for older in ((11, 8), (12, 8), (12, 9)):  # of its major version
        driver.check_nvrtc_against_driver(older)
    with pytest.raises(UnsupportedDeviceError, match=r"NVRTC 13\.0 .* driver \(CUDA 12\.8\) .*'cuda-python==12"):
        driver.check_nvrtc_against_driver((13, 0))


def gemm_spec():
    return choose(Problem(16, 64, 256, "s8", WeightFormat(128, False, "fp32")), DEVICES["h200"])


def quantizer_spec():
    return quantize_spec(4096, "bf16", "s8", permuted=True)


def test_nothing_is_compiled_for_a_driver_that_could_not_load_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "driver_version", lambda: (11, 8))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for load, spec in ((gemms.KERNELS.load, gemm_spec()), (quantizers.KERNELS.load, quantizer_spec())):
        with pytest.raises(UnsupportedDeviceError):
            load(spec, 0)
    assert not list(tmp_path.rglob("*.jgk"))


def test_what_is_not_loaded_is_refused_during_capture_with_the_call_to_make_before(monkeypatch):
    monkeypatch.setattr(loaded, "kernels", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CacheMissError, match=r"-g128-.* being captured: call the GEMM once with these shapes before"):
        gemms.KERNELS.load(gemm_spec(), 0)
    with pytest.raises(CacheMissError, match=r"quantize-bf16-s8.* call quantize_activations once with these arguments"):
        quantizers.KERNELS.load(quantizer_spec(), 0)


def test_a_kernel_is_loaded_once_a_device_whatever_threads_ask(monkeypatch):
    loads = []

    def load_kernel(cubin, name, *, device, smem_bytes):
        loads.append((cubin, name, device, smem_bytes))
        return driver.LoadedKernel(name, None, device)

    monkeypatch.setattr(loaded, "kernels", {})
    entry = functools.partial(SimpleNamespace, slow_build=False)
    monkeypatch.setattr(loaded.cache, "get_or_compile", lambda source: (entry(cubin=source.label), 1))
    monkeypatch.setattr(driver, "check_nvrtc_against_driver", lambda nvrtc: None)
    monkeypatch.setattr(driver, "load_kernel", load_kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gemm, quantizer = gemm_spec(), quantizer_spec()
    with ThreadPoolExecutor(4) as pool:
        for device in (0, 1):
            for load, spec in ((gemms.KERNELS.load, gemm), (quantizers.KERNELS.load, quantizer)):
                first, *others = pool.map(load, [spec] * 16, [device] * 16)
                assert all(kernel is first for kernel in others)
    assert loads == [
        (spec.label, name, device, smem)
        for device in (0, 1)
        for spec, name, smem in (
            (gemm, function_name(gemm.label), smem_bytes(gemm)),
            (quantizer, function_name(quantizer.label), MAX_PERMUTED_K),
        )
    ]


@pytest.mark.parametrize("maps", [(), (b"a" * 128, b"b" * 128)], ids=len)
def test_a_launch_passes_its_maps_and_then_its_argument_block(monkeypatch, maps):
    launches = []

    def launch(config, function, parameters, extra):
        grid, block = (config.gridDimX, config.gridDimY), (config.blockDimX, config.blockDimY, config.blockDimZ)
        *passed, arguments = (ctypes.c_void_p * (len(maps) + 1)).from_address(parameters)
        shape = grid, block, config.sharedMemBytes, config.numAttrs, int(config.hStream)
        passed = tuple(ctypes.string_at(each, 128) for each in passed)
        launches.append((shape, function, passed, ctypes.string_at(arguments, 5)))
        return (driver.cu.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(driver.cu, "cuLaunchKernelEx", launch)
    kernel = driver.LoadedKernel("function", None, 0)
    prepared = driver.LaunchConfig(kernel, grid=7, block=(32, 8), smem_bytes=4096)
    for arguments, stream, dependent in ((b"\1\0\0\0\2", 11, True), (b"\3\4\5\6\7", 12, False)):
        prepared.run(driver.Parameters(arguments, maps), stream, dependent)
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


# ---- argument blocks, field by field --------------------------------------------------------------------------------


ARGUMENT_BLOCKS = [
    pytest.param("jitgemm/gemm/types.cuh", "Args", gemms.ARGUMENTS, id="gemm"),
    pytest.param("jitgemm/gemm/ranks.cuh", "RanksArgs", ranks.RANKS_ARGUMENTS, id="ranks"),
    pytest.param("jitgemm/gemm/finish.cuh", "FinishArgs", partial.FINISH_ARGUMENTS, id="finish"),
    pytest.param("jitgemm/quantize/types.cuh", "QuantizeArgs", quantizers.ARGUMENTS, id="quantiser"),
    pytest.param("jitgemm/moe/route.cuh", "RouteArgs", experts.ROUTE_ARGUMENTS, id="route"),
    pytest.param("jitgemm/moe/route_quantize.cuh", "RouteQuantizeArgs", experts.ROUTE_QUANTIZE_ARGUMENTS, id="both"),
    pytest.param("jitgemm/moe/combine.cuh", "CombineArgs", experts.COMBINE_ARGUMENTS, id="combine"),
    pytest.param("jitgemm/moe/gather.cuh", "GatherArgs", experts.GATHER_ARGUMENTS, id="gather"),
    pytest.param("jitgemm/moe/dispatch.cuh", "DispatchArgs", exchange.DISPATCH_ARGUMENTS, id="dispatch"),
    pytest.param("jitgemm/moe/collect.cuh", "CollectArgs", exchange.COLLECT_ARGUMENTS, id="collect"),
]


@pytest.mark.parametrize(("header", "name", "block"), ARGUMENT_BLOCKS)
def test_argument_blocks_have_the_fields_of_the_header(header, name, block):
    fields = struct_of(header, name)
    offset = 0
    for (field, code), (expected, (kind, at)) in zip(block.fields.items(), fields.items(), strict=True):
        assert (field, code, offset) == (expected, CODES[kind], at)
        offset += struct.calcsize("<" + code)
    assert offset == block._struct.size


def fields_in(packed: bytes, fields: dict[str, tuple[str, int]]) -> dict[str, float]:
    return {name: struct.unpack_from("<" + CODES[kind], packed, at)[0] for name, (kind, at) in fields.items()}


def test_a_gemm_s_tensors_and_sizes_reach_the_fields_of_their_names(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    plan = gemms.GemmLaunch(operands)
    plan.launch(operands)
    [(dependent, (x_map, last_x_map, out_map, block))] = launches
    assert dependent  # the weight is ready
    x, x_scale, x_zero, weight, out, bias = operands[:6]
    fields = fields_in(block, struct_of("jitgemm/gemm/types.cuh", "Args"))
    tensors = {
        "lhs": x, "records": weight.blocks, "channel_scale": weight.channel_scale, "lhs_scale": x_scale, "bias": bias,
        "lhs_zero": x_zero, "row_sum": weight.row_sum,
    }  # fmt: skip
    assert fields == {name: tensor.data_ptr() for name, tensor in tensors.items()} | {
        "lhs_stride": x.stride(0), "lhs_scale_stride": 1, "lhs_zero_stride": 1, "m": x.shape[0], "n": weight.n,
        "k": weight.k, "channel_scale_type": DTYPES["fp16"].number, "bias_type": DTYPES["bf16"].number,
        "last_rows": x.shape[0], "chunk_blocks": 0, "chunk_rows": 0,
    }  # fmt: skip
    mapped = [int.from_bytes(each, "little") for each in (x_map, last_x_map, out_map)]
    assert mapped == [x.data_ptr(), x.data_ptr(), out.data_ptr()]
    # `operands`, which the checks of addresses read, is in the same order.
    assert [tensor.data_ptr() for tensor in operands.operands()[:7]] == list(fields.values())[:7]


def test_what_a_gemm_does_without_is_null(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands(group_size=32, affine=False)._replace(bias=None)
    gemms.GemmLaunch(operands).launch(operands)
    fields = fields_in(launches[0][1][-1], struct_of("jitgemm/gemm/types.cuh", "Args"))
    assert [name for name, value in fields.items() if not value] == [
        "channel_scale", "bias", "lhs_zero", "row_sum", "lhs_zero_stride", "bias_type", "chunk_blocks", "chunk_rows",
    ]  # fmt: skip


def test_records_in_an_inference_tensor_are_read_after_the_kernel_before(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    tensors = [getattr(operands.weight, name) for name in ("blocks", "channel_scale", "row_sum", "permutation")]
    with torch.inference_mode():
        weight = operands.weight.with_tensors(tensors[0].clone(), *tensors[1:])
    for each in (weight, weight.packed):
        gemms.GemmLaunch(operands).launch(operands._replace(weight=each))
    assert [dependent for dependent, _ in launches] == [False, False]


def launched_by_op(launches, operands) -> bool:
    """Whether the op's GEMM is launched dependently."""
    x, x_scale, x_zero, weight, out, bias = operands[:6]
    parts = weight.blocks, weight.channel_scale, weight.row_sum
    of_op = gemm_run.gemm_of_op(x, x_scale, x_zero, *parts, out, bias, weight.n, weight.k, weight.format.name, False)
    gemms.GemmLaunch(of_op).launch(of_op)
    return launches[-1][0]


@pytest.mark.parametrize("by_op", [True, False])
def test_a_call_launches_dependently_behind_the_records_that_a_weight_ready(monkeypatch, by_op):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    weight, plan = operands.weight, gemms.GemmLaunch(operands)

    def dependent() -> bool:
        if by_op:
            return launched_by_op(launches, operands)
        plan.launch(operands)
        return launches[-1][0]

    assert dependent()
    weight.blocks.add_(0)
    assert not dependent()
    weight.mark_ready()
    assert dependent()
    # Of the weight the tensor is what counts: it outlives the object, and another object may mark it ready.
    again = operands._replace(weight=weight.packed)
    operands = weight = plan = None
    assert launched_by_op(launches, again)


@pytest.mark.parametrize("way", ["clone", "view", "detach", "data"])
def test_an_op_waits_for_records_that_no_weight_ready(monkeypatch, way):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    blocks = operands.weight.blocks
    if way == "data":  # other memory, under a version that stays
        blocks.data = blocks.clone()
        other = blocks
    else:
        other = {"clone": blocks.clone, "view": lambda: blocks.view_as(blocks), "detach": blocks.detach}[way]()
    packed = operands.weight.packed._replace(blocks=other)
    assert not launched_by_op(launches, operands._replace(weight=packed))


def test_an_address_that_a_ready_weight_had_says_nothing(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    packed, storage = operands.weight.packed, operands.weight.blocks.untyped_storage()
    address = packed.blocks.data_ptr()
    shape = packed.blocks.shape
    operands = operands._replace(weight=None)
    packed = packed._replace(blocks=None)
    gc.collect()
    assert all(each().data_ptr() != address for each, _ in ready._noted.values())  # gone with its tensor
    other = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)  # as the allocator might give it again
    assert other.data_ptr() == address
    assert not launched_by_op(launches, operands._replace(weight=packed._replace(blocks=other)))


def test_an_op_s_expert_is_ready_as_its_whole_is(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands(affine=False)
    whole = type(operands.weight).stacked(2, lambda e: operands.weight)
    expert = operands._replace(weight=whole[1])
    assert launched_by_op(launches, expert)
    whole.blocks.add_(0)
    assert not launched_by_op(launches, expert)


def test_a_quantiser_s_tensors_and_sizes_reach_the_fields_of_their_names(monkeypatch):
    launches = without_driver(monkeypatch)
    inputs = quantizer_inputs()
    outputs, k = inputs.new_outputs(), inputs.x.shape[1]
    operands = replace(inputs, out=outputs).operands()
    inputs.prepare(operands).run_tensors(*operands)
    [(dependent, (block,))] = launches
    assert dependent
    q, scale, zero = outputs
    fields = fields_in(block, struct_of("jitgemm/quantize/types.cuh", "QuantizeArgs"))
    before = inputs.prologue
    tensors = {
        "x": inputs.x, "q": q, "scale": scale, "zero": zero, "given_scale": inputs.scale, "given_zero": inputs.zero,
        "norm_weight": before.norm, "permutation": before.permutation, "row_count": None, "row_index": None,
        "residual": before.residual, "sum": before.residual_out,
    }  # fmt: skip
    assert fields == {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()} | {
        "x_row_bytes": 2 * k, "q_row_bytes": k, "m": inputs.x.shape[0], "k": k, "eps": before.eps,
        "norm_weight_type": DTYPES["bf16"].number, "gate_limit": float("inf"), "gate_alpha": 1.0, "scale_row_stride": 0,
        "scale_block_stride": 0, "residual_row_bytes": 4 * k, "sum_row_bytes": 6 * k, "given_stride": 0,
        "rows_of_count": 0,
    }  # fmt: skip
    given = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
    assert given == list(fields.values())[: len(given)]


def test_a_gate_s_numbers_and_its_count_of_rows_reach_the_fields_of_their_names(monkeypatch):
    launches = without_driver(monkeypatch)
    count, gate = torch.ones(1, dtype=torch.int32), Gate("swiglu_oai", "interleaved", 7.0, 1.5)
    inputs = QuantizeCall(
        torch.randn(5, 128), activation_of(torch.int8, "token", False), Prologue(gate=gate), row_count=count
    )
    outputs = inputs.new_outputs()
    operands = replace(inputs, out=outputs).operands()
    inputs.prepare(operands).run_tensors(*operands)
    fields = fields_in(launches[0][1][0], struct_of("jitgemm/quantize/types.cuh", "QuantizeArgs"))
    numbers = {"gate_limit": 7.0, "gate_alpha": 1.5, "m": 5, "k": 64, "row_count": count.data_ptr(), "rows_of_count": 5}
    assert numbers.items() <= fields.items()


@pytest.mark.parametrize("quantiser", [False, True])
def test_addresses_that_come_again_are_neither_checked_nor_prepared_again(monkeypatch, quantiser):
    without_driver(monkeypatch)
    if quantiser:
        inputs = quantizer_inputs()
        calls = [inputs.operands() for _ in range(3)]
        launch = inputs.prepare(calls[0]).run_tensors
    else:
        operands = gemm_operands()
        calls = [(operands._replace(out=torch.empty_like(operands.out)),) for _ in range(3)]
        launch = gemms.GemmLaunch(operands).launch
    checked = []
    monkeypatch.setattr(launching, "check_addresses", lambda pointers, tensors: checked.append(tensors))
    for call in calls * 2:
        launch(*call)
    assert len(checked) == len(calls)


def test_an_overlap_is_refused_at_new_addresses(monkeypatch):
    launches = without_driver(monkeypatch)
    operands = gemm_operands()
    plan = gemms.GemmLaunch(operands)
    inside = operands.weight.blocks.view(-1)[: operands.out.nbytes].view(torch.bfloat16).view_as(operands.out)
    with pytest.raises(ValueError, match="out: expected memory of its own, got a tensor that overlaps rhs.blocks"):
        plan.launch(operands._replace(out=inside))
    assert launches == []


def test_every_output_type_has_a_tensor_map():
    assert set(REAL_TYPES) <= set(driver._ELEMENTS)
