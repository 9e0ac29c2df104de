"""Checkpoints: reading files, and one module for each format of a quantised weight.

::

    files               the tensors of a checkpoint: names, headers, data
    folder              which files of a folder are the model; its index and its config
    writing             safetensors files, written
    layouts             how a format stores a tensor: types and dimensions
    format              what a format is: a scheme, its tensors, reading; settings of a quantization_config
    formats             the registry: names, detection
    reader              a layer's header and data, whole or a rank's part
    load                the calls: `jitgemm.load`, and `read_layer`
    canonical           the layer before packing: cutting, joining, packing
    bits                codes out of words, kinds of zero point
    expressions         regular expressions of a config
    autoround           AutoRound's config in the words of other formats
    compressed_tensors  integers of 4 and 8 bits, FP8 and MXFP4
    compressed_tensors_config   presets, groups and targets, transforms
    quark               Quark's config, and its int4
    gptq                GPTQ v1 and v2
    awq                 AWQ gemm and gemv
    w4afp8              SGLang's and TensorRT-LLM's int4 for e4m3 activations
    w8a8                FP8 and INT8, in blocks, per row or per tensor
    mxfp4               MXFP4 of gpt-oss, DeepSeek-V4, Quark and ModelOpt
    nvfp4               NVFP4 of compressed-tensors and ModelOpt
    torchao             tinygemm and torchao's tensor subclasses
    qserve              QServe's two levels of scales
    executorch          ExecuTorch's operators
    bitblas             BitBLAS
"""

from __future__ import annotations

from jitgemm.checkpoint import autoround, awq, bitblas, compressed_tensors, executorch, formats, gptq, mxfp4, nvfp4
from jitgemm.checkpoint import qserve, quark, torchao, w4afp8, w8a8
from jitgemm.checkpoint.files import IN_MEMORY, Checkpoint
from jitgemm.checkpoint.load import read_layer

for _each in (
    compressed_tensors, w4afp8, w8a8, mxfp4, nvfp4, gptq, awq, quark, torchao, qserve, executorch, bitblas,
):  # fmt: skip
    formats.register(_each.FORMAT)
formats.DIALECTS += [autoround.translated, quark.translated]
IN_MEMORY.append(torchao.flattened)

__all__ = ["Checkpoint", "read_layer"]
