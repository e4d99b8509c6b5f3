"""Reuse of memory: large freed blocks stay with the process, so that the next ones need no fresh pages.

A fresh page costs the kernel more than filling it: four fifths of the time to receive 5 MB and copy them once. By
default the C library gives large blocks back as soon as they are freed. When more than the bound is free at the end of
the heap, it gives all of that back at once, which takes as long again. So the bound lies above what usually comes
and goes: in a host, the outputs of several long answers.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

KEPT_BY_CHILD = 64 << 20
"""Bytes of free memory that stay with a process that runs a function, at most."""
_LEAST_KEPT, _MOST_KEPT, _PART = 64 << 20, 256 << 20, 16
"""A host keeps this share of its memory, within these bounds."""
_LARGEST = 32 << 20
"""Largest block that is reused, in bytes; glibc takes no larger bound."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def kept_by_host(memory: int) -> int:
    """Return how many bytes of free memory a host keeps that may use `memory` bytes; 0 if unknown."""
    return min(max(memory // _PART, _LEAST_KEPT), _MOST_KEPT)


def reuse_large_blocks(kept: int) -> None:
    """Let this process keep up to `kept` bytes of free memory, if its C library is glibc."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, kept)


def unfilled(size: int) -> bytearray:
    """Return an array of undefined bytes to be overwritten. To clear them first would cost as much as a copy."""
    make = _maker()
    found: bytearray = make(None, size)
    return found


@cache
def _maker() -> Any:
    import ctypes

    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.argtypes, make.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
    return make
