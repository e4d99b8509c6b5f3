"""Puts a process together, whatever its role: the only place that chooses adapters.

    serve        gateway, batchers and controller; the broker is in this process unless one is named
    gateway      takes requests; in direct mode it runs a fallback by itself while the broker is away
    worker       runs batches
    controller   tells what the workers can carry

Every role is the same `Service` with some of its parts left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import typer

from headway import __version__
from headway.admin import routes as admin
from headway.admin.process import ProcessView
from headway.app.access import look_for_unused_keys, make_identity, make_ledger
from headway.app.banner import banner
from headway.app.lifecycle import Link, Resource, Service
from headway.app.signals import until_signalled
from headway.backends.process.backend import ProcessBackend
from headway.backends.process.group_guard import GroupGuard
from headway.backends.process.host_memory import HostMemory
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.brokers.memory.fleet import MemoryFleet
from headway.config import Settings, flag, idle, shown_url
from headway.config.target import FileTarget, RemoteTarget, Target, parse_target
from headway.controller.controller import Controller
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.queue import QueueLimits
from headway.core.retention import KeptLimits
from headway.core.throttle import Flow
from headway.errors import HeadwayError, SettingError, TargetError
from headway.fleet.membership import Membership
from headway.gateway.capacity_watcher import CapacityWatcher
from headway.gateway.fallback import Fallback
from headway.gateway.gateway import Gateway
from headway.gateway.ledger_writer import LedgerWriter
from headway.http import public
from headway.http.readiness import Readiness
from headway.http.server.listener import Listener
from headway.model import ProcessInfo, Role, Slot
from headway.ports import Backend, Broker, DeadLetters, Fleet
from headway.runtime import file_watcher
from headway.runtime.counters import Counters
from headway.runtime.request_id import new_id
from headway.worker.batcher import Batcher, Limits

log = structlog.get_logger(__name__)

COLLECT_AFTER = (20_000, 20, 50)
"""Garbage collector thresholds once everything is up. Requests make no reference cycles: looking for them
seldom saves time, and freezing what start-up made keeps each look short."""
BREAKER_THRESHOLD = 5
"""Batches in a row that fail before a backend gets a rest."""
BREAKER_COOLDOWN = 0.5
"""Seconds of the first such rest."""


@dataclass(frozen=True, slots=True)
class BrokerBundle:
    """Where entries wait, and what comes with it.

    Attributes:
        broker, letters, fleet: see `headway.ports`.
        now: asks for the clock of all three.
        link: the way there; None when they are in this process.
    """

    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    now: Callable[[], Awaitable[float]]
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Components:
    """What a process has of the services; `id` is its own in the fleet."""

    id: str
    gateway: Gateway | None
    direct: Fallback | None
    batchers: Sequence[Batcher]
    controller: Controller | None

    @property
    def slots(self) -> frozenset[str]:
        """Ids of the workers it runs."""
        return frozenset(batcher.slot.worker for batcher in self.batchers)


@dataclass(frozen=True, slots=True)
class Process:
    """A process put together, not yet started. `public` is None where no client comes."""

    settings: Settings
    role: Role
    target: Target | None
    service: Service
    admin: Listener
    public: Listener | None


async def run(settings: Settings, role: Role, target: str = "", reopen_log: Callable[[], bool] = lambda: False) -> int:
    """Run a process of a role to its end; returns the exit code.

    Arguments:
        settings: by which it runs.
        role: what it does.
        target: TARGET of those that run batches.
        reopen_log: opens the log anew; False when it goes to no file.

    Raises:
        SettingError: a setting cannot be met, for example a port that is taken.
        TargetError: the target cannot be loaded or breaks the rules.
        BrokerUnavailable: the broker does not come up.
    """
    house = build(settings, role, target)
    async with contextlib.AsyncExitStack() as stack:

        def ready() -> None:
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            port = house.public.port if house.public is not None else 0
            announce(banner(house.settings, role, house.target, port, house.admin.port))
            if settings.reload and house.target is not None:
                watcher = asyncio.create_task(_replace_on_change(house.service, house.target))
                stack.push_async_callback(_end, watcher)

        await until_signalled(house.service, ready, reopen_log)
    return 0


def build(settings: Settings, role: Role, target_text: str = "") -> Process:
    """Put a process together; for the arguments and what it raises see `run`."""
    if role is not Role.SERVE and not settings.broker:
        raise _no_broker(role)
    settings = dataclasses.replace(settings, name=settings.name or _default_name())
    target = parse_target(target_text) if role in (Role.SERVE, Role.WORKER) else None
    clock, counters = time.monotonic, Counters()
    place = make_brokerage(settings, counters, clock)
    ledger = make_ledger(settings.ledger) if settings.ledger else None
    journal = LedgerWriter(ledger, settings, counters, clock) if ledger is not None else None
    parts = make_parts(settings, role, target, place, counters, clock, journal)

    def describe() -> ProcessInfo:
        return _member(settings, role, parts, admin_door.port)

    attendance = Membership(place.fleet, describe, clock, place.broker, parts.slots)

    def leaving() -> bool:
        return attendance.leaving

    gateway, direct = parts.gateway, parts.direct

    def holding() -> bool:
        return gateway is not None and gateway.holding

    beside = direct.broker if direct is not None else None
    ready = Readiness(place.broker, leaving, role, parts.slots, beside, settings.model, holding)
    shown = ProcessView(
        settings, role, parts.id, counters, place.broker, place.letters, place.fleet, clock, place.now, gateway, ledger
    )
    admin_door = Listener.admin(settings, admin.build(shown, ready), new_id, counters)
    public_door = None
    resources: list[Resource] = [] if journal is None else [journal]
    if gateway is not None:
        identity, stores = make_identity(settings, counters)
        app = public.build(gateway, ready, identity)
        resources.extend((*stores, *look_for_unused_keys(settings)))
        warn_of_idle(settings)
        resources.append(CapacityWatcher(gateway, place.fleet, clock))
        public_door = Listener.public(settings, gateway, identity, app, new_id, counters)
    service = Service(
        settings,
        place.broker,
        gateway,
        parts.batchers,
        [admin_door] if public_door is None else [public_door, admin_door],
        controller=parts.controller,
        attendance=attendance,
        direct=direct,
        link=place.link,
        resources=resources,
    )
    return Process(settings, role, target, service, admin_door, public_door)


def make_parts(
    settings: Settings,
    role: Role,
    target: Target | None,
    place: BrokerBundle,
    counters: Counters,
    clock: Callable[[], float],
    journal: LedgerWriter | None = None,
) -> Components:
    """What a role is made of."""
    gateway = direct = controller = None
    if role in (Role.SERVE, Role.GATEWAY):
        direct = make_direct(settings, counters, clock)
        beside = direct.broker if direct is not None else None
        gateway = Gateway(settings, [settings.model], place.broker, counters, clock, direct=beside, journal=journal)
    id = gateway.name if gateway is not None else settings.name
    batchers: Sequence[Batcher] = ()
    if target is not None:
        batchers = make_batchers(settings, worker_names(settings, target), target, place.broker, counters, clock)
    if role in (Role.SERVE, Role.CONTROLLER):
        controller = Controller(id, place.broker, place.fleet, settings.target_utilisation, clock)
    return Components(id, gateway, direct, batchers, controller)


def _member(settings: Settings, role: Role, parts: Components, admin_port: int) -> ProcessInfo:
    gateway, controller = parts.gateway, parts.controller
    flow = gateway.limiter.throttle.flow if gateway is not None else Flow()
    host = f"[{settings.admin_host}]" if ":" in settings.admin_host else settings.admin_host
    return ProcessInfo(
        id=parts.id,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        admin=f"http://{host}:{admin_port}" if admin_port else "",
        version=__version__,
        pending=gateway.pending if gateway is not None else 0,
        requests_per_second=gateway.requests_per_second if gateway is not None else 0.0,
        model=settings.model if gateway is not None else "",
        higher_per_second=flow.higher,
        lowest_per_second=flow.lowest,
        leads=controller is not None and controller.leads,
        shared={
            "shards": str(settings.shards),
            "tiers": ",".join(settings.tier_names),
            "kept-mb": f"{settings.kept_mb:g}",
            "kept-tenant-mb": f"{settings.kept_tenant_mb:g}",
        },
    )


def warn_of_idle(settings: Settings) -> None:
    """Say which settings have no effect, as another is missing."""
    for name, missing in idle(settings):
        log.warning("a setting has no effect", setting=flag(name), without=flag(missing))


def _no_broker(role: Role) -> SettingError:
    reason = f"a {role.value} without a broker has nobody to work with"
    hint = "Name the Redis or Valkey that all processes share, for example --broker redis://127.0.0.1:6379/0"
    return SettingError("broker", "", reason, f"{hint}; or run all in one process with headway serve.")


def _default_name() -> str:
    host = re.sub("[^A-Za-z0-9_.-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"


def make_brokerage(settings: Settings, counters: Counters, clock: Callable[[], float]) -> BrokerBundle:
    """The broker that is named, or one in this process."""
    models = {settings.model: _limits(settings)}
    if settings.broker:
        return _redis(settings, models, counters)
    letters = DeadLetterBox()

    async def now() -> float:
        return clock()

    broker = _memory(settings, models, letters, counters, clock)
    return BrokerBundle(broker, letters, MemoryFleet(clock), now)


def _redis(settings: Settings, models: dict[str, QueueLimits], counters: Counters) -> BrokerBundle:
    """The broker in Redis or Valkey. Imported only here, so that who needs none needs not install its client."""
    try:
        from headway.brokers.redis.broker import RedisBroker
        from headway.brokers.redis.connection import RedisConnection
        from headway.brokers.redis.dead_letters import RedisDeadLetters
        from headway.brokers.redis.fleet import RedisFleet
    except ModuleNotFoundError as exc:
        if not (exc.name or "").partition(".")[0] == "redis":
            raise
        hint = "Install it: pip install 'headway[redis]'."
        raise SettingError("broker", settings.broker_shown, "needs the package redis, which is not here", hint) from exc
    link = RedisConnection(settings.broker, settings.broker_prefix, settings.broker_timeout_ms / 1000)
    lease, kept = settings.lease_ms / 1000, _kept(settings)
    broker = RedisBroker(link, models, counters, random.random, settings.shards, lease, kept)
    fleet = RedisFleet(link)

    class Whole:
        """The link with what must be closed before it."""

        async def open(self) -> None:
            await link.open()

        async def close(self) -> None:
            await broker.close()
            await link.close()

        @property
        def rereads(self) -> str:
            return "certificates" if settings.broker.startswith("rediss") else ""

        async def reread(self) -> None:
            await link.renew()

    async def now() -> float:
        """Some process, this one for instance, was seen within the last second."""
        return max((member.last_seen for member in await fleet.members()), default=0.0)

    return BrokerBundle(broker, RedisDeadLetters(link, models, settings.shards), fleet, now, Whole())


def _memory(
    settings: Settings,
    models: dict[str, QueueLimits],
    letters: DeadLetterBox,
    counters: Counters,
    clock: Callable[[], float],
) -> MemoryBroker:
    kept, room = _kept(settings), settings.max_queue_mb << 20
    return MemoryBroker(models, letters, counters, clock, random.random, kept, room)


def _kept(settings: Settings) -> KeptLimits:
    return KeptLimits.of(settings.kept_mb << 20, settings.kept_tenant_mb << 20)


def _limits(settings: Settings) -> QueueLimits:
    return QueueLimits(
        tiers=len(settings.tier_names),
        max_batch=settings.max_batch_size,
        reserved_share=settings.reserved_share,
        max_queue=settings.max_queue,
        shed_at=settings.shed_at,
    )


def make_direct(settings: Settings, counters: Counters, clock: Callable[[], float]) -> Fallback | None:
    """What a gateway asks while a broker elsewhere is away, if a fallback is set. Its processes get no GPU."""
    if not (settings.broker and settings.fallback):
        return None
    try:
        target = parse_target(settings.fallback)
    except TargetError as exc:
        hint = "Write module:attr, path/file.py:attr, or the URL of a remote batch API."
        raise SettingError("fallback", shown_url(settings.fallback), f"is no target: {exc}", hint) from None
    slots = settings.fallback_concurrency
    own = dataclasses.replace(settings, workers=slots, devices=",".join(["cpu"] * slots))
    models, letters = {settings.model: _limits(settings)}, DeadLetterBox()
    broker = _memory(settings, models, letters, counters, clock)
    names = [f"{settings.name}/fallback-{index}" for index in range(slots)]
    return Fallback(broker, make_batchers(own, names, target, broker, counters, clock))


def worker_names(settings: Settings, target: Target) -> list[str]:
    """One for each slot, unique in the whole fleet where there is one."""
    kind = "remote" if isinstance(target, RemoteTarget) else "gpu"
    place = f"{settings.name}/" if settings.broker else ""
    return [f"{place}{kind}-{index}" for index in range(settings.workers)]


def make_batchers(
    settings: Settings,
    names: Sequence[str],
    target: Target,
    broker: Broker,
    counters: Counters,
    clock: Callable[[], float],
) -> list[Batcher]:
    """One batcher for each name. Slots of one remote API share its breaker; a GPU process has its own."""
    policy = policies.build(settings.policy, None if settings.max_wait_ms is None else settings.max_wait_ms / 1000)
    breakers = [Breaker(BREAKER_THRESHOLD, BREAKER_COOLDOWN) for _ in names]
    if isinstance(target, RemoteTarget):
        breakers = breakers[:1] * len(names)
    memory, guard = HostMemory(clock), GroupGuard()
    return [
        Batcher(
            Slot(name, settings.model, settings.max_batch_size),
            backend_maker(settings, name, target, index, breaker, guard),
            broker,
            policy,
            breaker,
            Limits(settings.gpu_timeout_ms / 1000),
            counters,
            clock,
            memory=memory.used,
        )
        for index, (name, breaker) in enumerate(zip(names, breakers, strict=True))
    ]


def backend_maker(
    settings: Settings,
    name: str,
    target: Target,
    index: int,
    breaker: Breaker | None = None,
    guard: GroupGuard | None = None,
) -> Callable[[], Backend]:
    """Builds the backend of slot `index`, which is called `name`, each time it is called. `breaker`, which goes by
    `time.monotonic`, keeps the rest that a remote API asks for; `guard` ends what workers have started if this process is
    killed."""
    start_timeout = settings.start_timeout_ms / 1000
    if isinstance(target, RemoteTarget):
        # A third of what a start takes, which local targets are spared.
        from headway.backends.http.backend import HttpBackend

        return lambda: HttpBackend(
            target,
            format=settings.remote_format,
            token=settings.remote_token,
            start_timeout=start_timeout,
            breaker=breaker,
        )
    return lambda: ProcessBackend(
        target,
        worker=name,
        device=settings.device_ids[index],
        start_timeout=start_timeout,
        recycle_rss_bytes=settings.recycle_rss_mb << 20,
        recycle_after=settings.recycle_after_s,
        log=log,
        guard=guard,
    )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _replace_on_change(service: Service, target: Target) -> None:
    """Replace the workers whenever the target's file changes; one that does not load leaves the last good ones."""
    if not isinstance(target, FileTarget):
        log.warning("reload needs a target of the form path/file.py:attr", target=str(target))
        return
    async for _ in file_watcher.watch([target.path]):
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
