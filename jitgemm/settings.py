"""The environment variables of jitgemm, each read when it is asked for and never at import.

The only module that reads them. Knows where the package lies, and nothing of torch, CUDA or kernels.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

VARIABLES: dict[str, str] = {
    "JITGEMM_CACHE_DIR": f"kernel cache folders, separated by {os.pathsep!r}: all are read, the first writable one is "
    "written (default: cache/ of the checkout, else the user cache folder)",
    "JITGEMM_JIT": "what a kernel missing from the cache means: on (compile, default), warn (compile and say so), "
    "off (an error that names the warm-up command)",
    "JITGEMM_DEBUG": "1: kernels are built with a spin limit in every barrier wait and trap instead of hanging",
    "JITGEMM_DUMP_DIR": "folder that also receives the source, log and cubin of everything compiled",
}
"""Name -> meaning of every variable that jitgemm reads."""

JIT_MODES = ("on", "warn", "off")


def cache_roots() -> list[Path]:
    """Kernel cache folders, in reading order. They need not exist.

    `JITGEMM_CACHE_DIR` when it names any; else `cache/` of the checkout the package runs from; else the user cache
    folder of this platform.
    """
    named = [part for part in os.environ.get("JITGEMM_CACHE_DIR", "").split(os.pathsep) if part.strip()]
    if named:
        return [Path(part).expanduser().absolute() for part in named]
    checkout = checkout_dir()
    if checkout is not None:
        return [checkout / "cache"]
    from platformdirs import user_cache_dir

    return [Path(user_cache_dir("jitgemm", appauthor=False))]


def jit_mode() -> str:
    """One of `JIT_MODES`. Raises ValueError for any other value of `JITGEMM_JIT`."""
    value = os.environ.get("JITGEMM_JIT", "").strip().lower() or "on"
    if value not in JIT_MODES:
        raise ValueError(f"JITGEMM_JIT: expected one of {', '.join(JIT_MODES)}, got {value!r}")
    return value


def debug() -> bool:
    """Whether kernels are built to trap after a spin limit. Raises ValueError for a value that is no yes or no."""
    value = os.environ.get("JITGEMM_DEBUG", "").strip().lower()
    if value in ("", "0", "off", "no", "false"):
        return False
    if value in ("1", "on", "yes", "true"):
        return True
    raise ValueError(f"JITGEMM_DEBUG: expected 0 or 1, got {value!r}")


def dump_dir() -> Path | None:
    """Folder for copies of what is compiled, or None. It need not exist."""
    value = os.environ.get("JITGEMM_DUMP_DIR", "").strip()
    return Path(value).expanduser().absolute() if value else None


@lru_cache(maxsize=1)
def checkout_dir() -> Path | None:
    """The checkout that the package runs from: the folder above, if its pyproject.toml names jitgemm; else None."""
    folder = Path(__file__).resolve().parent.parent
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    # A pattern, because tomllib came with Python 3.11 and site-packages may hold any stray file.
    return folder if re.search(r"""^name\s*=\s*["']jitgemm["']""", text, re.MULTILINE) else None
