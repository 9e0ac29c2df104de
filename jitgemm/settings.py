"""The environment variables of jitgemm, each read when it is asked for and never at import.

The only module that reads them. Knows where the package lies, and nothing of torch, CUDA or kernels.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

VARIABLES: dict[str, str] = {
    "JITGEMM_CACHE_DIR": f"kernel cache folders, separated by {os.pathsep!r}: all are read, the first writable one is "
    "written (default: cache/ of the checkout, then the user cache folder)",
    "JITGEMM_JIT": "what a kernel missing from the cache means: on (compile, default), warn (compile and say so), "
    "off (an error that names the warm-up command)",
    "JITGEMM_DEBUG": "1: kernels are built with a spin limit in every barrier wait and trap instead of hanging; "
    "the runs of m_indices are checked on the GPU, which waits for it",
    "JITGEMM_EXCHANGE_TIMEOUT_S": "seconds that a GPU waits for another rank in exchange='nvlink' until it stops with "
    "a message (default: 60; 0: for ever)",
    "JITGEMM_YIELDS": "0: machine code stays as NVRTC built it, without jitgemm's yield hints; such kernels have "
    "keys of their own",
    "JITGEMM_DUMP_DIR": "folder that also receives the source, log and cubin of everything compiled, and the cubin as "
    "NVRTC built it",
}
"""Name -> meaning of every variable that jitgemm reads."""

JIT_MODES = ("on", "warn", "off")
_NO, _YES = ("0", "off", "no", "false"), ("1", "on", "yes", "true")


def cache_roots() -> list[Path]:
    """Kernel cache folders, in reading order. They need not exist; there may be none.

    `JITGEMM_CACHE_DIR` when it names any, without folders that cannot be resolved (`~nosuch`), with a warning. Else
    `cache/` of the checkout the package runs from, then the user cache folder of this platform, if there is a home.
    """
    named = [part.strip() for part in _read("JITGEMM_CACHE_DIR").split(os.pathsep) if part.strip()]
    if named:
        folders = [_folder(part, "JITGEMM_CACHE_DIR") for part in named]
    else:
        from platformdirs import user_cache_dir

        checkout = checkout_dir()
        folders = [checkout and checkout / "cache"]
        with suppress(RuntimeError):  # there is no home; older versions return a path that starts with ~
            folders.append(_folder(user_cache_dir("jitgemm", appauthor=False)))
    return [folder for folder in folders if folder is not None]


@cache
def _folder(text: str, variable: str = "") -> Path | None:
    """The folder that a text names, or None, with a warning that names the variable, if any. A relative one stays where
    it was when first asked for, whatever the working folder becomes."""
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such home; the working folder was deleted
        if variable:
            warnings.warn(f"{variable}: folder {text!r} is left out: {error}", stacklevel=3)
        return None


def jit_mode() -> str:
    """One of `JIT_MODES`. Raises ValueError for any other value of `JITGEMM_JIT`."""
    value = _read("JITGEMM_JIT").lower() or "on"
    if value not in JIT_MODES:
        raise ValueError(f"JITGEMM_JIT: expected one of {', '.join(JIT_MODES)}, got {value!r}")
    return value


def debug() -> bool:
    """Whether kernels are built to trap after a spin limit. Raises ValueError for a value that is no yes or no."""
    return _flag("JITGEMM_DEBUG", default=False)


def exchange_timeout_s() -> int:
    """Seconds that kernels wait for other ranks; 0 is for ever. Raises ValueError for anything but 0 to 86400."""
    value = _read("JITGEMM_EXCHANGE_TIMEOUT_S") or "60"
    if not value.isascii() or not value.isdigit() or int(value) > 86400:
        raise ValueError(f"JITGEMM_EXCHANGE_TIMEOUT_S: expected a whole number of seconds, 0 to 86400, got {value!r}")
    return int(value)


def yields() -> bool:
    """Whether yield hints are set in machine code. Raises ValueError for a value that is no yes or no."""
    return _flag("JITGEMM_YIELDS", default=True)


def dump_dir() -> Path | None:
    """Folder for copies of what is compiled, or None. It need not exist."""
    value = _read("JITGEMM_DUMP_DIR")
    return _folder(value, "JITGEMM_DUMP_DIR") if value else None


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _flag(name: str, default: bool) -> bool:
    value = _read(name).lower()
    if value and value not in (*_NO, *_YES):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value in _YES if value else default


@lru_cache(maxsize=1)
def checkout_dir() -> Path | None:
    """The checkout that the package runs from: the folder above, if its pyproject.toml names jitgemm; else None."""
    folder = Path(__file__).resolve().parent.parent
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    # A pattern: site-packages may hold any stray file, broken ones too.
    return folder if re.search(r"""^name\s*=\s*["']jitgemm["']""", text, re.MULTILINE) else None
