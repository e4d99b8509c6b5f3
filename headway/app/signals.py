"""Reactions of a process to signals.

    SIGTERM, SIGINT    drain and end; a second one ends the drain
    SIGHUP             reopen the log; read keys, issuers, the input policy and certificates again. If the terminal that
                       the process logs to was closed, which causes the same signal: drain and end
    SIGUSR1, SIGUSR2   nothing

Before the process is up, and during its shutdown, SIGHUP only reopens the log.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from headway.app.lifecycle import Service
from headway.runtime.logger import get_logger
from headway.runtime.race import TIDIES, end, race

log = get_logger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT)
_IDLE = (signal.SIGUSR1, signal.SIGUSR2)
_STDERR = 2


def ignore_until_ready() -> None:
    """Ignore all signals but those that end a process, until `until_signalled` handles them."""
    for number in (signal.SIGHUP, *_IDLE):
        signal.signal(number, signal.SIG_IGN)


async def until_signalled(
    service: Service,
    ready: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
    reopen_log: Callable[[], bool] = lambda: False,
) -> None:
    """Start, call `ready`, serve until SIGTERM or SIGINT, call `stopping`, and drain. A second signal ends the drain.

    Signals are ignored afterwards, because a late signal must not change the exit code. `reopen_log` returns False if the log
    goes to no file. Raises HeadwayError if the service fails to start.
    """
    first, second = asyncio.Event(), asyncio.Event()
    hangups = _Hangups(service, reopen_log, first.set)

    def on_signal(number: signal.Signals) -> None:
        service.ends(f"told to by {number.name}{', twice' if first.is_set() else ''}")
        (second if first.is_set() else first).set()

    for number in _ENDING:
        _listen(number, partial(on_signal, number))
    _listen(signal.SIGHUP, hangups.came)
    for number in _IDLE:
        _listen(number, partial(_say_nothing_is_done, number))
    try:
        if await _unless(first, service.start()):
            hangups.up = True
            ready()
            await first.wait()
            hangups.up = False
            stopping()
            log.info("draining")
            if not await _unless(second, service.drain()):
                log.info("a second signal: ending at once")
    finally:
        await hangups.end()
        await service.stop()
        for number in (*_ENDING, signal.SIGHUP, *_IDLE):
            signal.signal(number, signal.SIG_IGN)


def _listen(number: signal.Signals, react: Callable[[], None]) -> None:
    """Have the running loop react to a signal. `loop.add_signal_handler` isn't used, because removing its handler restores the
    default action for an instant, in which a signal would kill the process."""
    loop = asyncio.get_running_loop()
    signal.signal(number, lambda *_: loop.call_soon_threadsafe(react))


class _Hangups:
    """Reaction to SIGHUP. `up` is True from the start of serving to the start of the shutdown."""

    def __init__(self, service: Service, reopen_log: Callable[[], bool], end: Callable[[], None]) -> None:
        self.up = False
        self._service = service
        self._reopen_log = reopen_log
        self._end = end
        self._on_terminal = os.isatty(_STDERR)
        self._asked = 0
        self._task: asyncio.Task[None] | None = None

    def came(self) -> None:
        if self._on_terminal and not os.isatty(_STDERR):
            self._service.ends("its terminal was closed")
            self._end()
            return
        reopened = self._reopen_log()
        log.info("SIGHUP", log="opened anew" if reopened else "goes to no file", files="read again" if self.up else "")
        if self.up:
            self._asked += 1
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._reread())

    async def end(self) -> None:
        await end(self._task)

    async def _reread(self) -> None:
        """Read the files again, once for all signals that came before the reading began."""
        while self._asked:
            self._asked = 0
            try:
                await self._service.reread()
            except Exception:
                log.exception("reading the files again failed")


def _say_nothing_is_done(number: signal.Signals) -> None:
    log.info(f"{number.name} does nothing; SIGHUP opens the log anew and reads files again, SIGTERM ends")


async def _unless(signalled: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it if the signal comes first. Return True if it finished."""
    done, _ = await race(work, signalled.wait(), tidies=TIDIES)
    if done is not None:
        done.result()
    return done is not None
