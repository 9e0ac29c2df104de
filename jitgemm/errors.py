"""Exceptions that jitgemm raises besides ValueError and TypeError. Knows nothing of torch, CUDA or the disk."""

from __future__ import annotations


class JitGemmError(RuntimeError):
    """Base of every error that is not a wrong argument."""


class CompileError(JitGemmError):
    """NVRTC is missing, or did not compile a kernel.

    Attributes:
        log: NVRTC's program log, ptxas output included.
        source_path: where the rendered source was kept, or None when it could not be written.
    """

    def __init__(self, message: str, *, log: str = "", source_path: str | None = None):
        super().__init__(message)
        self.log = log
        self.source_path = source_path


class CacheMissError(JitGemmError):
    """A kernel is not in the cache and may not be compiled now (JITGEMM_JIT=off, or a CUDA graph is being captured)."""


class DriverError(JitGemmError):
    """A CUDA driver call returned an error code, or cannot be made, as CUDA's bindings for Python are missing.

    Attributes:
        code: the code's name, such as CUDA_ERROR_INVALID_VALUE; "" without bindings.
    """

    def __init__(self, message: str, *, code: str):
        super().__init__(message)
        self.code = code


class UnsupportedDeviceError(JitGemmError):
    """The GPU, its driver or the NVRTC at hand cannot run these kernels."""
