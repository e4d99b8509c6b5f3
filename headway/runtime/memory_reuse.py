"""Memory reuse. The process keeps large freed blocks, so that later blocks need no fresh pages.

Fresh pages account for four fifths of the time to receive and copy 5 MB. By default, the C library gives back large blocks as
soon as they are freed, and the free end of the heap once it exceeds a threshold. So in a host, this threshold must exceed
the size of several long answers.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

KEPT_BY_CHILD = 64 << 20  # Maximum size in bytes of free memory that a process with a target keeps.
_LEAST_KEPT, _MOST_KEPT, _PART = 64 << 20, 256 << 20, 16  # A host keeps a 16th of its memory, within bounds.
_LARGEST = 32 << 20  # Size in bytes of the largest block to reuse, which is the maximum that glibc allows.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def kept_by_host(memory: int) -> int:
    """Return how many bytes of free memory a host keeps. `memory` is the number of bytes that it may use, or 0 if unknown."""
    return min(max(memory // _PART, _LEAST_KEPT), _MOST_KEPT)


def reuse_large_blocks(kept: int) -> None:
    """Let this process keep up to `kept` bytes of free memory. Does nothing unless the C library is glibc."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, kept)


def unfilled(size: int) -> bytearray:
    """Return an uninitialised bytearray. Clearing it would cost as much as a copy."""
    array: bytearray = _maker()(None, size)
    return array


@cache
def _maker() -> Any:
    import ctypes

    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.argtypes, make.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
    return make
