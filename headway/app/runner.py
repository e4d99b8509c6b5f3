"""Runs a process until a signal ends it. Shows progress and the banner, and reloads changed targets.

    SIGTERM, SIGINT    drain and exit; a second signal ends the drain
    SIGHUP             reopen the log, and reread keys, issuers, the input policy and certificates. If the process
                       logs to a terminal, closing the terminal sends this signal; the process then drains and exits
    SIGUSR1, SIGUSR2   nothing

During startup and shutdown, SIGHUP only reopens the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, MutableMapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

import click

from headway.app.backends import source_folder
from headway.app.banner import banner
from headway.app.lifecycle import Service
from headway.app.model_plans import Given
from headway.app.wiring import Process, build
from headway.backends.process.host_memory import HostMemory
from headway.config import Settings
from headway.config.target import ModuleTarget, Target
from headway.errors import HeadwayError
from headway.model import Role
from headway.runtime.listening import check_descriptor_limit, descriptors
from headway.runtime.logger import get_logger
from headway.runtime.memory_reuse import kept_by_host, reuse_large_blocks
from headway.runtime.race import TIDIES, end, end_all, race
from headway.runtime.shared_files import FileWatcher, python_files

if TYPE_CHECKING:
    from headway.worker.pool import Workers

log = get_logger(__name__)

VARIABLE = "NOTIFY_SOCKET"

WRITE_LINE_EVERY = 0.5  # Seconds between two updates of the progress line.
SILENT = 2.0  # Without a terminal: seconds until the first message in the log. Each further pause is twice as long.
MOST_NAMED = 4
_CLEAR = "\x1b[2K"


class ServiceManager:
    """The service manager that started this process, such as systemd; without one, notices are dropped. `NOTIFY_SOCKET`
    names its datagram socket. The constructor removes this variable from the environment, so that target processes can't
    send notices."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop(VARIABLE, "")

    def tell_ready(self) -> None:
        self._tell("READY=1\nSTATUS=serving")

    def tell_stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=draining")

    def _tell(self, notice: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(notice.encode(), address)
        except OSError as exc:
            log.warning("the service manager cannot be notified", notice=notice.partition("\n")[0], error=str(exc))


class Progress:
    """Shows which workers are loading: on a line of the terminal, or in the log if standard error isn't a terminal. The cursor stays
    at the start of the line, so that log lines overwrite it. `stream` replaces standard error."""

    def __init__(self, pool: Workers, stream: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._terminal = stream or sys.stderr
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        self._pause = WRITE_LINE_EVERY

    def begin(self) -> None:
        live = self._terminal.isatty()
        self._pause = WRITE_LINE_EVERY if live else SILENT
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._tick if live else self._log)

    def end(self) -> None:
        """Remove the line. Safe to call more than once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._shown:
            self._shown = False
            self._write(_CLEAR)

    def _loading(self) -> dict[str, float]:
        starts = {batcher.slot.worker: batcher.starting.since for batcher in self._pool.batchers}
        return {worker: since for worker, since in starts.items() if since is not None}

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WRITE_LINE_EVERY, self._tick)
        if loading := self._loading():
            names = ", ".join(list(loading)[:MOST_NAMED])
            more = f" and {len(loading) - MOST_NAMED} more" if len(loading) > MOST_NAMED else ""
            self._shown = True
            self._write(f"{_CLEAR}loading {names}{more} … {self._clock() - min(loading.values()):.0f} s\r")

    def _log(self) -> None:
        self._pause *= 2
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._log)
        if loading := self._loading():
            seconds = round(self._clock() - min(loading.values()), 1)
            log.info("still loading", workers=len(loading), seconds=seconds)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # The terminal may be closed.
            self._terminal.write(text)
            self._terminal.flush()


COLLECT_AFTER = (20_000, 20, 50)  # Garbage collector thresholds: high, because requests create no reference cycles.


async def run(
    settings: Settings, role: Role, target: Given = "", reopen_log: Callable[[], bool] = lambda: False
) -> int:
    """Run a process in a role until a signal ends it, and return the exit code. `target` is the `given` of `make_plans`;
    empty if it isn't needed. `reopen_log` returns False if the log doesn't go to a file. Raises the same errors as
    `headway.serve`."""
    reuse_large_blocks(kept_by_host(HostMemory(monotonic).limit()))
    manager = ServiceManager()
    process = build(settings, role, target)
    check_descriptor_limit(sum(len(plan.devices.ids) for plan in process.plans.values()))
    targets = [plan.target for plan in process.plans.values()] if settings.reload else []
    watched = {str(target): files for target in targets if (files := _files_of(target)) is not None}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(end_all)
        progress = Progress(process.pool) if process.pool is not None else None
        if progress is not None:
            progress.begin()
            stack.callback(progress.end)

        def ready() -> None:
            if progress is not None:
                progress.end()
            gc.collect()
            gc.freeze()  # Later collections then skip the objects created during startup.
            gc.set_threshold(*COLLECT_AFTER)
            announce(shown(process))
            manager.tell_ready()
            for target, files in watched.items():
                watcher = asyncio.create_task(_replace_on_change(process.service, target, files))
                stack.push_async_callback(end, watcher)

        await until_signalled(process.service, ready, manager.tell_stopping, reopen_log)
    return 0


def shown(process: Process) -> str:
    """Return the banner of a started process."""
    pool, plans = process.pool, list(process.plans.values())
    port, admin_port = 0 if process.public is None else process.public.port, process.admin.port
    pace, signature = (0.0, None) if pool is None else (pool.items_per_second, pool.signature)
    alone = len(plans) == 1
    settings, target = (plans[0].settings, plans[0].target) if alone else (process.settings, None)
    models = [] if alone else [(plan.settings, plan.target, plan.devices) for plan in plans]
    return banner(
        settings, process.role, target, port, admin_port, process.devices, pace, signature, models, descriptors()
    )


def _files_of(target: Target) -> FileWatcher | None:
    folder = source_folder(target)
    if folder is not None:
        return FileWatcher(partial(python_files, folder))
    hint = "A remote API has no files here."
    if isinstance(target, ModuleTarget):
        hint = "Start in the folder of its module, or name it as path/file.py:attr."
    log.warning("reload has nothing to watch", target=str(target), hint=hint)
    return None


async def _replace_on_change(service: Service, target: str, files: FileWatcher) -> None:
    """Replace the workers whenever a file changes. If the new code fails to load, the old workers keep serving."""
    async for _ in files.changes():
        try:
            await service.replace_workers()
            log.info("target reloaded", target=target)
        except HeadwayError as exc:
            log.error("the changed target does not load; the previous workers keep serving", error=str(exc))


def announce(text: str) -> None:
    """Print `text`. The service keeps running if the output is closed or the disk is full."""
    try:
        click.echo(text)
    except OSError as exc:
        log.warning("the banner cannot be printed", error=str(exc))
        # Otherwise, flushing the rest at exit would fail again and change the exit code.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


_ENDING = (signal.SIGTERM, signal.SIGINT)
_IDLE = (signal.SIGUSR1, signal.SIGUSR2)
_STDERR = 2


def ignore_until_ready() -> None:
    """Ignore all signals except those that end a process, until `until_signalled` handles them."""
    for number in (signal.SIGHUP, *_IDLE):
        signal.signal(number, signal.SIG_IGN)


async def until_signalled(
    service: Service,
    ready: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
    reopen_log: Callable[[], bool] = lambda: False,
) -> None:
    """Start, call `ready`, serve until SIGTERM or SIGINT, call `stopping`, and drain. A second signal ends the drain.
    Afterwards, signals are ignored, because a late one must not change the exit code. `reopen_log` returns False if the log
    doesn't go to a file. Raises HeadwayError if the service fails to start."""
    first, second = asyncio.Event(), asyncio.Event()
    hangups = _Hangups(service, reopen_log, first.set)

    def on_signal(number: signal.Signals) -> None:
        service.ends(f"got {number.name}{', twice' if first.is_set() else ''}")
        (second if first.is_set() else first).set()

    for number in _ENDING:
        _listen(number, partial(on_signal, number))
    _listen(signal.SIGHUP, hangups.came)
    for number in _IDLE:
        does = "does nothing; SIGHUP reopens the log and rereads files, SIGTERM ends the process"
        _listen(number, partial(log.info, f"{number.name} {does}"))
    try:
        if await _unless(first, service.start()):
            hangups.up = True
            ready()
            await first.wait()
            hangups.up = False
            stopping()
            log.info("draining")
            if not await _unless(second, service.drain()):
                log.info("got a second signal: ending immediately")
    finally:
        await hangups.end()
        await service.stop()
        for number in (*_ENDING, signal.SIGHUP, *_IDLE):
            signal.signal(number, signal.SIG_IGN)


def _listen(number: signal.Signals, react: Callable[[], None]) -> None:
    # Not loop.add_signal_handler: removing its handler briefly restores the default action, and then a signal would kill us.
    loop = asyncio.get_running_loop()
    signal.signal(number, lambda *_: loop.call_soon_threadsafe(react))


class _Hangups:
    """Handles SIGHUP. `up` is True while the process is serving, but not during startup and shutdown."""

    def __init__(self, service: Service, reopen_log: Callable[[], bool], end: Callable[[], None]) -> None:
        self.up = False
        self._service = service
        self._reopen_log = reopen_log
        self._end = end
        self._on_terminal = os.isatty(_STDERR)
        self._signals = 0
        self._task: asyncio.Task[None] | None = None

    def came(self) -> None:
        if self._on_terminal and not os.isatty(_STDERR):
            self._service.ends("its terminal was closed")
            self._end()
            return
        reopened = self._reopen_log()
        log.info("SIGHUP", log="reopened" if reopened else "not a file", files="read again" if self.up else "")
        if self.up:
            self._signals += 1
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._reread())

    async def end(self) -> None:
        await end(self._task)

    async def _reread(self) -> None:
        while self._signals:
            self._signals = 0  # All signals that came before this point share one reading.
            try:
                await self._service.reread()
            except Exception:
                log.exception("rereading the files failed")


async def _unless(signalled: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it if `signalled` is set first. Return True if it finished."""
    done, _ = await race(work, signalled.wait(), tidies=TIDIES)
    if done is not None:
        done.result()
    return done is not None
