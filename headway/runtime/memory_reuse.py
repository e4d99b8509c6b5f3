"""Reuse of memory: large blocks that are freed stay with the process, so that the next ones need no fresh pages.

A fresh page costs the kernel more than filling it: of 5 MB that are received and copied once, four fifths of the time. By
default the C library gives blocks of this size back as soon as they are freed. When more than the bound is free at the end of
the heap, it gives all of that back at once, which holds up the process for as long again, so the bound lies above what comes
and goes: of a host, the outputs of several long answers.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

KEPT_BY_CHILD = 64 << 20
"""Most bytes of free memory that stay with a process that runs a function."""
_LEAST_KEPT, _MOST_KEPT, _PART = 64 << 20, 256 << 20, 16
"""Bounds of what stays with a host, which is this part of its memory between them."""
_LARGEST = 32 << 20
"""Largest block that is reused, in bytes; glibc takes no larger bound."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def kept_by_host(memory: int) -> int:
    """Return the most bytes of free memory that stay with a host, which may use `memory` bytes of it; 0: it is not known."""
    return min(max(memory // _PART, _LEAST_KEPT), _MOST_KEPT)


def reuse_large_blocks(kept: int) -> None:
    """Have this process reuse large blocks of memory, `kept` bytes at most, where its C library is glibc."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, kept)


def unfilled(size: int) -> bytearray:
    """Return the array of so many bytes, for whoever writes all of them: what they are is not said. To clear them first costs as much as a copy."""
    make = _maker()
    found: bytearray = make(None, size)
    return found


@cache
def _maker() -> Any:
    import ctypes

    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.argtypes, make.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
    return make
