"""Marks that several files of tests have."""

from __future__ import annotations

import pytest
from emulator.launch import COMPILER

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
"""Emulates a kernel, on a machine that g++ or clang++ compiles."""
