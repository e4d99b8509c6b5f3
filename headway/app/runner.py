"""Runner of a process to its end: banner, garbage collector, and the watch on the target's file."""

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

import click

from headway.app.banner import banner
from headway.app.lifecycle import Service
from headway.app.model_plans import Given
from headway.app.progress import Progress
from headway.app.signals import until_signalled
from headway.app.target_code import source_folder
from headway.app.wiring import Process, build
from headway.backends.process.host_memory import HostMemory
from headway.config import Settings
from headway.config.target import ModuleTarget, Target
from headway.errors import HeadwayError
from headway.model import Role
from headway.runtime.file_watcher import FileWatcher, python_files
from headway.runtime.listening import check_descriptor_limit, descriptors
from headway.runtime.logger import get_logger
from headway.runtime.memory_reuse import kept_by_host, reuse_large_blocks
from headway.runtime.race import end, end_all

VARIABLE = "NOTIFY_SOCKET"


class ServiceManager:
    """Service manager that started this process: systemd, or another that knows its protocol; without one nothing is told.

    `NOTIFY_SOCKET` names its datagram socket. It is taken out of the environment, so that no process of a target can speak for
    this one.

    Arguments:
        environ: environment that may name it.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop(VARIABLE, "")

    def tell_ready(self) -> None:
        """Tell that the process serves."""
        self._tell("READY=1\nSTATUS=serving")

    def tell_stopping(self) -> None:
        """Tell that the process is on its way out."""
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
            log.warning("the service manager cannot be told", notice=notice.partition("\n")[0], error=str(exc))


log = get_logger(__name__)

COLLECT_AFTER = (20_000, 20, 50)
"""Garbage collector thresholds once everything is up.

Requests make no reference cycles: looking for them seldom saves time, and freezing what start-up made keeps each look
short.
"""


async def run(
    settings: Settings, role: Role, target: Given = "", reopen_log: Callable[[], bool] = lambda: False
) -> int:
    """Run a process of a role to its end. Returns the exit code.

    Arguments:
        settings: settings of the process.
        role: role of the process.
        target: target of a process that runs batches, or the text that names it; of several models those that have none in
            the settings, by model.
        reopen_log: opens the log anew; False when it goes to no file.

    Raises:
        SettingError: a setting cannot be met, for example a port that is taken.
        TargetError: the target cannot be loaded or breaks the rules.
        BrokerUnavailable: the broker does not answer.
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
    """Banner of a process that has started."""
    pool, settings = process.pool, process.settings
    port = process.public.port if process.public is not None else 0
    pace = pool.items_per_second if pool is not None else 0.0
    signature = pool.signature if pool is not None else None
    if len(process.plans) > 1:
        models = [(plan.settings, plan.target, plan.devices) for plan in process.plans.values()]
        return banner(
            settings, process.role, None, port, process.admin.port,
            signature=signature, models=models, descriptors=descriptors(),
        )  # fmt: skip
    own = next((plan.settings for plan in process.plans.values()), settings)
    return banner(
        own, process.role, process.target, port, process.admin.port, process.devices, pace, signature,
        descriptors=descriptors(),
    )  # fmt: skip


def _files_of(target: Target) -> FileWatcher | None:
    """Watcher of the Python files of a target: those in the folder of its file or package, and below."""
    folder = source_folder(target)
    if folder is not None:
        return FileWatcher(partial(python_files, folder))
    hint = "A remote API has no files here."
    if isinstance(target, ModuleTarget):
        hint = "Start where its module lies, or name it as path/file.py:attr."
    log.warning("reload has nothing to watch", target=str(target), hint=hint)
    return None


async def _replace_on_change(service: Service, target: str, files: FileWatcher) -> None:
    """Replace the workers whenever a file has changed. What does not load leaves the last good workers."""
    async for _ in files.changes():
        try:
            await service.replace_workers()
            log.info("target reloaded", target=target)
        except HeadwayError as exc:
            log.error("the changed target does not load; the last good one serves on", error=str(exc))


def announce(text: str) -> None:
    """Print `text` if somebody reads it. A service does not end because its reader has gone or a disk is full."""
    try:
        click.echo(text)
    except OSError as exc:
        log.warning("the banner cannot be printed", error=str(exc))
        # What is still in the buffer would fail once more at the end, and change the exit code.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
