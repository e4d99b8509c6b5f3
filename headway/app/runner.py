"""Runs a process from its start to its end, with its banner, its progress line, and the watch on its target's files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import click

from headway.app.banner import banner
from headway.app.lifecycle import Service
from headway.app.model_plans import Given
from headway.app.signals import until_signalled
from headway.app.target_code import source_folder
from headway.app.wiring import Process, build
from headway.backends.process.host_memory import HostMemory
from headway.config import Settings
from headway.config.target import ModuleTarget, Target
from headway.errors import HeadwayError
from headway.model import Role
from headway.runtime.listening import check_descriptor_limit, descriptors
from headway.runtime.logger import get_logger
from headway.runtime.memory_reuse import kept_by_host, reuse_large_blocks
from headway.runtime.race import end, end_all
from headway.runtime.shared_files import FileWatcher, python_files

if TYPE_CHECKING:
    from headway.worker.pool import Workers

log = get_logger(__name__)

VARIABLE = "NOTIFY_SOCKET"

WRITE_LINE_EVERY = 0.5
"""Seconds between two writings of the progress line."""
SILENT = 2.0
"""Seconds before the log first reports progress where there is no terminal. Each later interval is twice as long as the last."""
MOST_NAMED = 4
_CLEAR = "\x1b[2K"


class ServiceManager:
    """Service manager that started this process, for example systemd. Without one, notices go nowhere.

    `NOTIFY_SOCKET` names its datagram socket. This removes the variable from the environment, so that no process of a target
    can speak for this one.
    """

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
    """Shows which workers are loading: on a line of the terminal, or in the log where standard error isn't a terminal. The
    cursor stays at the beginning of the line, so that a log line overwrites it. `stream` replaces standard error."""

    def __init__(self, pool: Workers, stream: TextIO | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._terminal = stream or sys.stderr
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        self._pause = WRITE_LINE_EVERY

    def begin(self) -> None:
        """Show progress at intervals until `end`."""
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
        with contextlib.suppress(OSError):  # A terminal that is gone needs no line.
            self._terminal.write(text)
            self._terminal.flush()


COLLECT_AFTER = (20_000, 20, 50)
"""Garbage collector thresholds once everything is up.

Requests make no reference cycles, so rare collections save time. Freezing what start-up made keeps each collection short.
"""


async def run(
    settings: Settings, role: Role, target: Given = "", reopen_log: Callable[[], bool] = lambda: False
) -> int:
    """Run a process of a role to its end, and return the exit code.

    `target` is the target of a process that runs batches, or the text that names it. For several models it is a mapping of
    targets for the models without one in the settings. `reopen_log` returns False if the log goes to no file.

    Raises:
        SettingError: a setting can't be met, for example because a port is taken.
        TargetError: the target can't be loaded or breaks the rules.
        BrokerUnavailable: the broker doesn't answer.
    """
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
            gc.freeze()
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
    """Return a watcher of the Python files in and below a target's folder, or None if the target has no such folder."""
    folder = source_folder(target)
    if folder is not None:
        return FileWatcher(partial(python_files, folder))
    hint = "A remote API has no files here."
    if isinstance(target, ModuleTarget):
        hint = "Start where its module lies, or name it as path/file.py:attr."
    log.warning("reload has nothing to watch", target=str(target), hint=hint)
    return None


async def _replace_on_change(service: Service, target: str, files: FileWatcher) -> None:
    """Replace the workers whenever a file has changed. If the new code fails to load, the old workers go on."""
    async for _ in files.changes():
        try:
            await service.replace_workers()
            log.info("target reloaded", target=target)
        except HeadwayError as exc:
            log.error("the changed target does not load; the last good one serves on", error=str(exc))


def announce(text: str) -> None:
    """Print `text`. A closed output or a full disk doesn't end the service."""
    try:
        click.echo(text)
    except OSError as exc:
        log.warning("the banner cannot be printed", error=str(exc))
        # The text left in the buffer would fail again at exit and change the exit code.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
