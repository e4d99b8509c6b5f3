"""Alarm that wakes an event loop at an instant, to about 50 microseconds where the system can.

Timers of asyncio and uvloop are kept in whole milliseconds, which would put up to a millisecond of the
generator's own lateness into every latency it reports. Linux has a better clock in timerfd(2): a file
descriptor that becomes readable when the time has come. Elsewhere the loop's own timer serves.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class Alarm:
    """Calls `ring` once after each `arm`. Close it when done.

    Arguments:
        loop: the running loop.
        ring: function to call.
        precise: False to use the loop's own timer even where there is a better one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None], *, precise: bool = True) -> None:
        self._loop, self._ring = loop, ring
        self._timer = _Timer.open() if precise else None
        self._handle: asyncio.TimerHandle | None = None
        if self._timer is not None:
            loop.add_reader(self._timer.fileno, self._on_timer)

    def arm(self, seconds: float) -> None:
        """Ring in `seconds` from now, instead of when it was to ring before."""
        if self._timer is not None:
            self._timer.set(seconds)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(seconds, 0.0), self._ring)

    def close(self) -> None:
        """Never ring again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fileno)
            self._timer.close()
            self._timer = None

    def _on_timer(self) -> None:
        if self._timer is not None and self._timer.expired():
            self._ring()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _Timer:
    """A timerfd that goes off once per setting."""

    def __init__(self, library: Any, fileno: int) -> None:
        self.fileno = fileno
        self._settime = library.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._spec = _TimerSpec()
        self._value: Any = self._spec.value
        self._address = ctypes.addressof(self._spec)

    @classmethod
    def open(cls) -> _Timer | None:
        """A timer, or None where the system has none."""
        if sys.platform != "linux":
            return None
        library = ctypes.CDLL(None)
        fileno = library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        return cls(library, fileno) if fileno >= 0 else None

    def set(self, seconds: float) -> None:
        # A setting of zero would disarm it.
        nanoseconds = max(1, int(seconds * 1e9))
        self._value.seconds, self._value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        self._settime(self.fileno, 0, self._address, None)

    def expired(self) -> bool:
        """Whether it has gone off since it was last set. A second call says no."""
        try:
            os.read(self.fileno, 8)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.fileno)
