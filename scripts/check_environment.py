"""Exit 0 if this Python can run jitgemm; else say what is missing on stderr and exit 1.

--tests: its tests too. --libraries: those of them too that need the libraries of the extra of this name.

Imports what is used instead of comparing lists of packages: a Python counts when it works, however it was set up.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

REQUIRED = [
    "torch",
    "filelock",
    "platformdirs",
    "rich",
    "safetensors.torch",
    "typer",
    "cuda.bindings.driver",
    "cuda.bindings.nvrtc",
]
TESTS = ["pytest", "hypothesis"]
LIBRARIES = ["accelerate", "compressed_tensors", "torchao", "transformers"]


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - a Python on the path may be any
        print(f"Python {sys.version.split()[0]} is older than 3.11", file=sys.stderr)
        return 1
    tests = TESTS if "--tests" in sys.argv[1:] else []
    libraries = LIBRARIES if "--libraries" in sys.argv[1:] else []
    for name in REQUIRED + tests + libraries:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{sys.executable}: cannot import {name}: {error}", file=sys.stderr)
            return 1
    try:
        from jitgemm.jit.nvrtc import nvrtc_info

        nvrtc_info()
    except Exception as error:
        print(f"{sys.executable}: NVRTC: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
