"""Schemes of compressed-tensors by name, as release 0.20.1 has them, as far as they can be read."""

from __future__ import annotations

from typing import Any


def args_of(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Of weights, or of inputs, in the library's words."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


_INT8, _E4M3_TOKEN = (args_of(8, kind, "token", dynamic=True) for kind in ("int", "float"))
MXFP4 = args_of(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
_MXFP8 = args_of(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
_NVFP4 = args_of(4, "float", "tensor_group", group_size=16)
_BLOCKS = args_of(8, "float", "block", block_structure=[128, 128])
PRESETS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    f"W{width}A{inputs}": (
        args_of(width, "int", "group", group_size=128),
        None if inputs == 16 else args_of(inputs, "int", "token", dynamic=True),
    )
    for inputs in (4, 8, 16)
    for width in range(2, min(inputs, 8) + 1)
} | {
    "UNQUANTIZED": (None, None),
    "W4A16_ASYM": (args_of(4, "int", "group", group_size=128, symmetric=False), None),
    "W8A8": (args_of(8, "int", "channel"), _INT8),
    "INT8": (args_of(8, "int", "channel"), _INT8),
    "W4AFP8": (args_of(4, "int", "group", group_size=128), _E4M3_TOKEN),
    "FP8": (args_of(8, "float", "tensor"), args_of(8, "float", "tensor")),
    "FP8_DYNAMIC": (args_of(8, "float", "channel"), _E4M3_TOKEN),
    "FP8_BLOCK": (_BLOCKS, args_of(8, "float", "group", group_size=128, dynamic=True)),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "MXFP4A16": (MXFP4, None),
    "MXFP4": (MXFP4, MXFP4 | {"dynamic": True}),
    "MXFP4XFP8": (MXFP4, args_of(8, "float", "group", group_size=128, dynamic=True)),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, _MXFP8 | {"dynamic": True}),
}
"""Weights and input activations."""
