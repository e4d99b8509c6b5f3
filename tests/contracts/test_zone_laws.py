"""The laws, with processes in two zones of one fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis.stateful import rule, run_state_machine_as_test

from headway import errors
from headway.brokers.redis.broker import RedisBroker
from headway.model import Entry, Failure, Lease, WorkerInfo, WorkerStatus
from headway.ports import Broker
from tests.contracts.brokers import NAMED_QUEUES, RedisHarness, ask, queue
from tests.contracts.culprits import Culprits
from tests.contracts.test_broker_laws import EXPLORE_SERVER, GATEWAYS, BrokerLaws
from tests.servers.redis import SharedServers


class ZonedLaws(BrokerLaws):
    """Processes in two zones: whoever asks, runs and leaves does so in either, and each entry has still one outcome.

    Every id is one that a client chose, so it is looked for in all zones. Inputs that failed are known by zone.
    """

    made: Callable[[], RedisHarness]
    last = ("last", "last-b")

    def __init__(self) -> None:
        super().__init__()
        self.culprits = Forgetful()
        self.do(self.look_around())

    async def look_around(self) -> None:
        for broker in (self.broker, self.harness.peer()):
            await broker.workers()
        await self.broker.workers()

    @rule()
    def forget_the_other_zone(self) -> None:
        """Have each process forget the queues of the other zone, whatever they hold, and find them at its next look."""
        for broker in (self.broker, self.harness.peer()):
            assert isinstance(broker, RedisBroker)
            self.do(forget_others(broker))

    def ask(self, *what: Any, **how: Any) -> Entry:
        return ask(*what, digest=b"asked", **how)

    def host(self, worker: str) -> Broker:
        return self.harness.peer() if worker in ("gpu-1", "last-b") else self.broker

    def door(self, gateway: str, peer: bool = False) -> Broker:
        return self.harness.peer() if gateway == "g2" else self.broker

    def offer(self, entries: Sequence[Entry], peer: bool = False) -> Iterable[tuple[Entry, Failure | None]]:
        found: list[tuple[Entry, Failure | None]] = []
        for gateway in GATEWAYS:
            own = [entry for entry in entries if entry.gateway == gateway]
            found += zip(own, self.do(self.door(gateway).enqueue(own)), strict=True)
        return found

    def zone_of(self, lease: Lease) -> str:
        own = "a" if self.host(lease.slot.worker) is self.broker else "b"
        return own if lease.slot.zone is None else lease.slot.zone

    def stay_alive(self) -> None:
        for worker in self.last:
            for model in NAMED_QUEUES:
                name = queue(model)
                info = WorkerInfo(
                    worker_id=f"{worker} {model}", model=name.model, version=name.version, status=WorkerStatus.HEALTHY
                )
                self.do(self.host(worker).heartbeat(info))


async def forget_others(broker: RedisBroker) -> None:
    queues = broker._queues
    await queues.look(at_once=True)
    queues._signs = dict.fromkeys(queues, -math.inf)
    if gone := {*queues.forget()}:
        await broker._forget(gone)
    await queues.look(at_once=True)


class Forgetful(Culprits):
    """Culprits of which a zone may know nothing."""

    def judge(self, entry: Entry, verdict: Failure | None, now: float, *, runs: bool = True) -> bool:
        return verdict is not None and verdict.code == errors.REJECTED_BY_MODEL


@pytest.mark.processes
def test_the_laws_hold_across_zones(servers: SharedServers) -> None:
    made = staticmethod(lambda: RedisHarness(servers.of("valkey"), zones=("a", "b")))
    run_state_machine_as_test(type("Laws", (ZonedLaws,), {"made": made}), settings=EXPLORE_SERVER)
