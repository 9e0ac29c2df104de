"""A kernel as text: rendered source, headers and options, and the key that they make. Knows no kernel, torch or GPU."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from jitgemm.jit.entry import SCHEMA
from jitgemm.jit.nvrtc import Compiled, NvrtcInfo, compile_cubin
from jitgemm.jit.sass import BadCubin, Yields, apply_yields

OPTIONS = ("-arch=sm_90a", "-std=c++17", "-default-device", "--ptxas-options=-v")


def function_name(label: str) -> str:
    """A kernel's name in a profile: "jitgemm_" and its label, with underscores for hyphens."""
    return f"jitgemm_{label.replace('-', '_')}"


@dataclass(frozen=True)
class KernelSource:
    """One kernel to look up or compile: all that decides its bytes, and what people call it.

    Attributes:
        label, spec: name and `KernelSpec.to_dict()`; kept in the entry, not part of the key.
        source, headers, options: as `nvrtc.compile_cubin` takes them.
        tighter: the same kernel with fewer registers in use, which takes the place of `source` where that spills and
            this spills less; "" for none. Only the compiler knows which kernels spill, and each version others.
        yields: yield hints to set in what it compiled, or None to leave ptxas's.
        warmup: the command that compiles it ahead of time, for the message when it is missing; not part of the key.
    """

    label: str
    spec: Mapping[str, object]
    source: str
    headers: Mapping[str, str]
    options: Sequence[str]
    yields: Yields | None = None
    warmup: str = ""
    tighter: str = ""

    @property
    def function(self) -> str:
        """The name of the kernel's function."""
        return function_name(self.label)

    def key(self, nvrtc: NvrtcInfo) -> str:
        """Hex sha256 of everything that decides its cubin's bytes when this NVRTC compiles it.

        Headers' order is no part of it; options' order is.
        """
        headers = [text for header in sorted(self.headers.items()) for text in header]
        counted = (str(len(self.headers)), *headers, str(len(self.options)), *self.options)
        built = "{}.{}".format(*nvrtc.version), nvrtc.build, str(self.yields)
        digest = hashlib.sha256()
        for text in (str(SCHEMA), self.source, self.tighter, *counted, *built):
            data = text.encode()
            # The leading length keeps ("ab", "c") and ("a", "bc") apart.
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def compile(self) -> Compiled:
        """Its cubin; raises CompileError. Warns where yield hints cannot be set, which cost time alone."""
        compiled = compile_cubin(self.source, self.headers, self.options, name=self.label)
        if compiled.spill_bytes and self.tighter:
            other = compile_cubin(self.tighter, self.headers, self.options, name=self.label)
            seconds = compiled.seconds + other.seconds
            better = other.spill_bytes < compiled.spill_bytes and not other.serialised
            compiled = replace(other if better else compiled, seconds=seconds)
        if self.yields is None:
            return compiled
        try:
            return replace(compiled, cubin=apply_yields(compiled.cubin, self.yields), built=compiled.cubin)
        except BadCubin as problem:
            message = f"kernel {self.label} runs without yield hints, a few percent slower: {problem}"
            warnings.warn(message, stacklevel=2)
            return compiled


@cache
def headers(first: str = "gemm/kernel") -> Mapping[str, str]:
    """Name, as included, to text of a kernel header and of all that it includes, in order of their names.

    Args:
        first: the header's name without its suffix, such as "gemm/kernel" of jitgemm/gemm/kernel.cuh.

    NVRTC gets them in memory: no path in source or key. Other headers have no part in a kernel's key.
    """
    package = Path(__file__).resolve().parent.parent
    for root in (package / "include", package.parent / "include"):
        if (root / "jitgemm").is_dir():
            texts: dict[str, str] = {}
            todo = [f"jitgemm/{first}.cuh"]
            while todo:
                name = todo.pop()
                if name not in texts:
                    texts[name] = (root / name).read_text(encoding="utf-8")
                    todo += re.findall(r"^#include <(jitgemm/[\w/]+\.cuh)>", texts[name], re.MULTILINE)
            return MappingProxyType(dict(sorted(texts.items())))
    raise FileNotFoundError(
        f"jitgemm's kernel headers are missing: neither {package}/include nor {package.parent}/include holds them"
    )
