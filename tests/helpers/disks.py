"""Folders whose disk has a size."""

from __future__ import annotations

import resource
from contextlib import contextmanager


@contextmanager
def disk_of(size: int):
    """Files may grow to `size` bytes: a write beyond fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
