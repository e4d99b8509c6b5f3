"""Due instants of the requests of a load test, and an alarm that wakes an event loop at each, to about 50 µs where the system can.

Timers of asyncio and uvloop are kept in whole milliseconds, which would put up to a millisecond of the
generator's own lateness into every latency it reports. Linux has a better clock in timerfd(2): a file
descriptor that becomes readable when the time has come. Elsewhere the loop's own timer serves.
"""

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
    """Instants of a trace file in seconds; read anew, line by line, each time it is iterated.

    Arguments:
        path: a CSV file as `headway.core.arrivals` describes it.
        setting: name in errors of the setting that the path came from.
    """

    def __init__(self, path: Path, setting: str = "--arrivals") -> None:
        self._path, self._setting = path, setting

    def __iter__(self) -> Iterator[float]:
        """Yield the instants.

        Raises:
            SettingError: the file cannot be read, or is no trace.
        """
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
    """The due instants of a load test, in seconds from its start, until its duration is over.

    Raises:
        SettingError: the arrivals are a trace that cannot be read.
    """
    if spec.arrivals == "poisson":
        stream = poisson(spec.rate, random.Random(spec.seed))  # noqa: S311 - the same seed, the same load
    elif spec.arrivals == "uniform":
        stream = uniform(spec.rate)
    else:
        stream = replay(TraceFile(Path(spec.arrivals)), spec.rate)
    return takewhile(float(spec.duration).__gt__, stream)


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
