"""Chooses the broker by the scheme of its URL. No other module knows all brokers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from headway.app.lifecycle import BrokerConnection
from headway.config import Settings
from headway.config.extras import needing
from headway.config.urls import SCHEMES
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.ports import Board, Broker, DeadLetters, Fleet
from headway.runtime.counters import BrokerCounts

if TYPE_CHECKING:
    from headway.brokers.memory.broker import MemoryBroker
    from headway.brokers.memory.dead_letters import DeadLetterBox


class BrokerBundle(msgspec.Struct, frozen=True):
    """A process's broker, with the dead letters, fleet and board that share its connection. `now` returns the time on their common
    clock. `memory` returns the servers' used and maximum bytes. For a broker in this process, `connection` and `memory` are
    None."""

    broker: Broker
    letters: DeadLetters
    fleet: Fleet
    board: Board
    now: Callable[[], Awaitable[float]]
    connection: BrokerConnection | None = None
    memory: Callable[[], tuple[int, int]] | None = None


def make_broker_bundle(settings: Settings, counters: BrokerCounts, clock: Callable[[], float]) -> BrokerBundle:
    """Build a client for the broker at the configured URL, or a broker in this process."""
    scheme = settings.broker.partition("://")[0]
    return BROKERS[scheme](settings, counters, clock)


async def fail_over(settings: Settings, within: float, say: Callable[[str], None], to: str, only: str) -> None:
    """Promote replicas of the broker's servers. Raises FailoverAborted, or SettingError if a file named in the URL can't be used."""
    with needing("redis", "broker", settings.broker_shown, "needs the package redis, which is not installed"):
        from headway.brokers.redis import failover
        from headway.brokers.redis.clients import nodes

    await failover.fail_over(nodes(settings.broker, settings.broker_timeout_ms / 1000), within, say, to, only)


def make_memory_broker(
    settings: Settings,
    counters: BrokerCounts,
    clock: Callable[[], float],
    letters: DeadLetterBox | None = None,
    models: Mapping[str, Settings] | None = None,
) -> MemoryBroker:
    """Build a broker in this process for `models`, or for all models in the settings. It puts dead letters into `letters`."""
    from headway.brokers.memory.broker import MemoryBroker
    from headway.brokers.memory.dead_letters import DeadLetterBox

    box, room = DeadLetterBox() if letters is None else letters, settings.memory_mb << 20
    of_models = _models(settings) if models is None else {model: queue_limits(own) for model, own in models.items()}
    return MemoryBroker(of_models, box, counters, clock, random.random, _kept(settings), room)


def _memory(settings: Settings, counters: BrokerCounts, clock: Callable[[], float]) -> BrokerBundle:
    from headway.brokers.memory.dead_letters import DeadLetterBox
    from headway.brokers.memory.fleet import MemoryBoard, MemoryFleet

    letters = DeadLetterBox()

    async def now() -> float:
        return clock()

    return BrokerBundle(
        make_memory_broker(settings, counters, clock, letters), letters, MemoryFleet(clock), MemoryBoard(clock), now
    )


def _redis(settings: Settings, counters: BrokerCounts, clock: Callable[[], float]) -> BrokerBundle:
    with needing("redis", "broker", settings.broker_shown, "needs the package redis, which is not installed"):
        from headway.brokers.redis.board import RedisBoard
        from headway.brokers.redis.broker import RedisBroker
        from headway.brokers.redis.connection import RedisConnection
        from headway.brokers.redis.dead_letters import RedisDeadLetters
        from headway.brokers.redis.fleet import RedisFleet
    models = _models(settings)
    timeout = settings.broker_timeout_ms / 1000
    connection = RedisConnection(settings.broker, settings.broker_prefix, timeout, counters=counters)
    lease, kept_limits = settings.lease_s, _kept(settings)
    room, apart_from = settings.memory_mb << 20, settings.large_payload_bytes
    rng, shards = random.random, settings.shards
    broker = RedisBroker(connection, models, counters, rng, shards, lease, kept_limits, room, apart_from)
    fleet = RedisFleet(connection)

    class ClosingConnection:
        """The broker's connection. Closing it also closes the broker."""

        async def open(self) -> None:
            await connection.open()

        async def close(self) -> None:
            await broker.close()
            await connection.close()

        @property
        def rereads(self) -> str:
            return "certificates" if settings.broker.startswith("rediss") else ""

        async def reread(self) -> None:
            await connection.renew()

    async def now() -> float:
        """Return the time of the fleet's latest heartbeat, including this process's own. It was at most 2 s ago."""
        return max((member.last_seen for member in await fleet.members()), default=0.0)

    letters = RedisDeadLetters(connection, broker.queue_names, settings.shards)
    board = RedisBoard(connection)
    return BrokerBundle(broker, letters, fleet, board, now, ClosingConnection(), lambda: connection.memory.use)


BROKERS: Mapping[str, Callable[[Settings, BrokerCounts, Callable[[], float]], BrokerBundle]] = {
    "": _memory,
    **dict.fromkeys(SCHEMES, _redis),
}  # By the scheme of the URL, which is empty for a broker in this process.


def _models(settings: Settings) -> dict[str, QueueLimits]:
    return {model: queue_limits(own) for model, own in settings.served.items()}


def queue_limits(settings: Settings) -> QueueLimits:
    """Return the limits of a model's queue."""
    return QueueLimits(
        tiers=len(settings.tier_names),
        max_batch=settings.max_batch_size,
        reserved_share=settings.reserved_share,
        max_queue=settings.max_queue,
        shed_at=settings.shed_at,
        max_weight=settings.max_batch_weight,
        promise=settings.promise_ms / 1000,
    )


def _kept(settings: Settings) -> KeptLimits:
    return KeptLimits.of(settings.kept_bytes, settings.kept_bytes // 4)
