"""Due times of a load test's requests, and an alarm that wakes the event loop at each, to about 50 µs on Linux.

Timers of asyncio and uvloop have whole milliseconds. They would add up to a millisecond of the generator's own lateness to every
latency that it reports. Linux has timerfd(2), a file descriptor that becomes readable when the time has come. Elsewhere, the loop's
own timer has to do."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from headway.core.arrivals import instants, poisson, replay, uniform
from headway.errors import SettingError
from headway.load.spec import LoadSpec

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class TraceFile:
    """Times in seconds of a CSV file that `headway.core.arrivals` describes. Each iteration reads it anew."""

    def __init__(self, path: Path, setting: str = "--arrivals") -> None:
        self._path, self._setting = path, setting

    def __iter__(self) -> Iterator[float]:
        """Yield the times. Raises SettingError if the file cannot be read, or is no trace."""
        shown = str(self._path)
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as lines:
                yield from instants(lines, shown, self._setting)
        except OSError as exc:
            reason = f"cannot be read: {exc.strerror}"
            hint = "Use poisson, uniform, or the path of a trace in CSV."
            raise SettingError(self._setting, shown, reason, hint) from None
        except UnicodeDecodeError:
            raise SettingError(self._setting, shown, "is not UTF-8 text", "Save it as UTF-8.") from None


def due_times(spec: LoadSpec) -> Iterator[float]:
    """Yield the due times of a load test, in seconds from its start, until its duration is over. Raises SettingError."""
    if spec.arrivals == "poisson":
        stream = poisson(spec.rate, random.Random(spec.seed))  # noqa: S311 - the same seed, the same load
    elif spec.arrivals == "uniform":
        stream = uniform(spec.rate)
    else:
        stream = replay(TraceFile(Path(spec.arrivals)), spec.rate)
    return takewhile(float(spec.duration).__gt__, stream)


class Alarm:
    """Calls `ring` once after each `arm`. Close it when done. `precise` False uses the loop's own timer in any case."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None], *, precise: bool = True) -> None:
        self._loop, self._ring = loop, ring
        self._timer = _Timer.open() if precise else None
        self._handle: asyncio.TimerHandle | None = None
        if self._timer is not None:
            loop.add_reader(self._timer.fileno, self._on_timer)

    def arm(self, seconds: float) -> None:
        """Ring in `seconds` from now, and not when it was to ring before."""
        if self._timer is not None:
            self._timer.set(seconds)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(seconds, 0.0), self._ring)

    def close(self) -> None:
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
        if sys.platform != "linux":
            return None
        library = ctypes.CDLL(None)
        fileno = library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        return cls(library, fileno) if fileno >= 0 else None

    def set(self, seconds: float) -> None:
        # Zero would disarm it.
        nanoseconds = max(1, int(seconds * 1e9))
        self._value.seconds, self._value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        self._settime(self.fileno, 0, self._address, None)

    def expired(self) -> bool:
        try:
            os.read(self.fileno, 8)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.fileno)
