"""Puts a process together: the only place that chooses adapters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import typer

from headway import reload
from headway.backends.http import HttpBackend
from headway.backends.process import ProcessBackend
from headway.batcher import Batcher, Limits
from headway.brokers.memory import DeadLetterBox, MemoryBroker
from headway.config import Settings
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.queue import QueueLimits
from headway.errors import HeadwayError
from headway.gateway import Gateway, new_id
from headway.http import admin, public
from headway.http.door import Door
from headway.identity.keys_file import KeysFile
from headway.identity.open import OpenIdentity
from headway.lifecycle import Service, until_signalled
from headway.model import Slot
from headway.ports import Backend, Identity
from headway.tally import Tally
from headway.target import FileTarget, RemoteTarget, Target, parse_target

log = structlog.get_logger(__name__)

COLLECT_AFTER = (20_000, 20, 50)
"""Garbage collector thresholds once everything is up. Requests make no reference cycles: looking for them
seldom saves time, and freezing what start-up made keeps each look short."""
BREAKER_THRESHOLD = 5
"""Batches in a row that fail before a backend gets a rest."""
BREAKER_COOLDOWN = 0.5
"""Seconds of the first such rest."""


async def serve(settings: Settings, target_text: str) -> int:
    """Run `headway serve` to its end; returns the exit code.

    Raises:
        SettingError: a setting cannot be met, for example a port that is taken.
        TargetError: the target cannot be loaded or breaks the rules.
    """
    target = parse_target(target_text)
    clock = time.monotonic
    tally, dead = Tally(), DeadLetterBox()
    limits = QueueLimits(
        tiers=len(settings.tier_names),
        max_batch=settings.max_batch_size,
        reserved_share=settings.reserved_share,
        max_queue=settings.max_queue,
    )
    broker = MemoryBroker({settings.model: limits}, dead, tally, clock, random.random)
    gateway = Gateway(settings, [settings.model], broker, tally, clock)
    batchers = make_batchers(settings, target, broker, tally, clock)
    identity = make_identity(settings)
    public_door = Door.public(settings, gateway, identity, public.build(gateway, broker), new_id, tally)
    admin_door = Door.admin(settings, admin.build(gateway, broker, dead, clock), new_id, tally)
    service = Service(settings, broker, gateway, batchers, [public_door, admin_door])
    async with contextlib.AsyncExitStack() as stack:

        def ready() -> None:
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            announce(banner(settings, target, public_door.port, admin_door.port))
            if settings.reload:
                watcher = asyncio.create_task(_replace_on_change(service, target))
                stack.push_async_callback(_end, watcher)

        await until_signalled(service, ready)
    return 0


def make_batchers(
    settings: Settings, target: Target, broker: MemoryBroker, tally: Tally, clock: Callable[[], float]
) -> list[Batcher]:
    """One batcher for each slot. Slots of one remote API share its breaker; a GPU process has its own."""
    policy = policies.build(settings.policy, None if settings.max_wait_ms is None else settings.max_wait_ms / 1000)
    shared = Breaker(BREAKER_THRESHOLD, BREAKER_COOLDOWN) if isinstance(target, RemoteTarget) else None
    return [
        Batcher(
            Slot(_worker(target, index), settings.model, settings.max_batch_size),
            backend_maker(settings, target, index),
            broker,
            policy,
            shared or Breaker(BREAKER_THRESHOLD, BREAKER_COOLDOWN),
            Limits(settings.gpu_timeout_ms / 1000),
            tally,
            clock,
        )
        for index in range(settings.workers)
    ]


def backend_maker(settings: Settings, target: Target, index: int) -> Callable[[], Backend]:
    """Builds the backend of slot `index` each time it is called."""
    start_timeout = settings.start_timeout_ms / 1000
    if isinstance(target, RemoteTarget):
        return lambda: HttpBackend(
            target, format=settings.remote_format, token=settings.remote_token, start_timeout=start_timeout
        )
    return lambda: ProcessBackend(
        target,
        worker=_worker(target, index),
        device=settings.device_ids[index],
        start_timeout=start_timeout,
        recycle_rss_bytes=settings.recycle_rss_mb << 20,
        recycle_after=settings.recycle_after_s,
        log=log,
    )


def _worker(target: Target, index: int) -> str:
    return f"remote-{index}" if isinstance(target, RemoteTarget) else f"gpu-{index}"


def make_identity(settings: Settings) -> Identity:
    """Who asks: by a file of keys when one is configured, anybody otherwise."""
    if settings.keys:
        return KeysFile(Path(settings.keys), settings.tier_names)
    return OpenIdentity(settings.default_tier_index)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _replace_on_change(service: Service, target: Target) -> None:
    """Replace the workers whenever the target's file changes; one that does not load leaves the last good ones."""
    if not isinstance(target, FileTarget):
        log.warning("reload needs a target of the form path/file.py:attr", target=str(target))
        return
    async for _ in reload.watch([target.path]):
        try:
            await service.replace_workers()
            log.info("target reloaded", target=str(target))
        except HeadwayError as exc:
            log.error("the changed target does not load; the last good one serves on", error=str(exc))


def announce(text: str) -> None:
    """Print `text` if somebody takes it; a service does not end because its reader has gone or a disk is full."""
    try:
        typer.echo(text)
    except OSError as exc:
        log.warning("the banner cannot be printed", error=str(exc))
        # What is still in the buffer would fail once more at the end, and change the exit code.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def banner(settings: Settings, target: Target, port: int, admin_port: int) -> str:
    """What start-up prints: what is served, where, by which rules, and one line to try."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    wait = ""
    if settings.max_wait_ms is not None:
        milliseconds = f"{settings.max_wait_ms:g} ms"
        aims = settings.policy == "pid"
        wait = f", aiming at {milliseconds} of waiting" if aims else f", at most {milliseconds} for batch-mates"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.keys else ""
    who = f"keys from {settings.keys}" if settings.keys else f"no keys: everybody is {settings.default_tier}"
    remote = isinstance(target, RemoteTarget)
    one, many = ("call in flight", "calls in flight") if remote else ("GPU worker process", "GPU worker processes")
    workers = f"{settings.workers} {one if settings.workers == 1 else many}"
    limits = (
        f"queue {settings.queue_timeout_ms:g} ms, GPU {settings.gpu_timeout_ms:g} ms, "
        f"in all {settings.request_timeout_ms:g} ms"
    )
    return "\n".join(
        (
            f"Headway serves {target} as model {settings.model!r}",
            f"  public   {url}   docs {url}/docs",
            f"  admin    http://{settings.admin_host}:{admin_port}/internal/health   metrics /metrics",
            f"  batches  up to {settings.max_batch_size}, policy {settings.policy}{wait}; {workers}",
            f"  limits   {limits}; body {settings.max_body_bytes} bytes",
            f"  tiers    {' > '.join(settings.tier_names)}; {who}",
            "Try it:",
            f'  curl {url}/v1/inference{key} -d \'{{"input": "hello"}}\'',
        )
    )
