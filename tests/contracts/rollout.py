"""A random rollout on any broker and its clock: two gateways, slots of two versions, and a history of everything."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from headway.config import Settings
from headway.core import policies
from headway.core.breaker import Breaker
from headway.core.ledger_records import record_of
from headway.core.values import shown
from headway.errors import STATUS
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.gateway.pending import Ending, PendingRequest
from headway.model import (
    Entry,
    InferenceRequest,
    ItemResult,
    ModelReport,
    Principal,
    Reply,
    RequestOptions,
    Signature,
    Slot,
)
from headway.ports import Broker
from headway.runtime.counters import Counters, GatewayCounts
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.helping import StrayWatcher
from headway.worker.pool import WorkerPool
from headway.worker.starting import Limits
from tests.contracts.brokers import Harness
from tests.promises.faults import Fault
from tests.promises.operation import History, Kind, Operation, Presence, Run, Telling, Weighing

VERSIONS = ("3", "4")
TENANTS = ("acme", "globex")
WEIGHTS: Sequence[Mapping[str, float]] = (
    {"3": 1.0, "4": 1.0}, {"3": 95.0, "4": 5.0}, {"3": 0.0, "4": 1.0}, {"3": 1.0, "4": 0.0}, {"3": 1.0}, {"4": 1.0},
)  # fmt: skip
LASTS = 9.0
"""Seconds that weights last."""
TIMEOUT = 20.0
REAP_EVERY = 0.25


class _Backend:
    pid, signature, warm_up = 4242, Signature(), ()

    def __init__(self, version: str, history: History, harness: Harness) -> None:
        self._version, self._history, self._now = version, history, harness.now

    async def start(self) -> float:
        return 0.1

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        name = f"run{len(self._history.runs)}"
        run = Run(name, [shown(entry.input) for entry in entries], self._now(), version=self._version)
        self._history.runs.append(run)
        await asyncio.sleep(0.1)
        run.ended = self._now()
        return [ItemResult(f"{text.upper()}|{name}.{place}") for place, text in enumerate(run.inputs)]

    async def gone(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        pass


class _Host:
    """A process with one slot of a version, and its part of the history."""

    def __init__(self, name: str, version: str, broker: Broker, harness: Harness, history: History) -> None:
        slot = Slot(name, "m", 8, 0, ModelReport(version), version)
        backend, policy = _Backend(version, history, harness), policies.build("window", 0.0)
        clock, counters = harness.now, Counters()

        def batcher(number: int) -> Batcher:
            parts = policy, Breaker(5, 0.5), Limits(3.0), counters.worker, clock
            return Batcher(slot, lambda: backend, broker, *parts, rng=lambda: 0.5)

        self.version, self.name = version, name
        self.pool = WorkerPool(batcher, 1, 1)
        self._strays = StrayWatcher(lambda: (one.claims for one in self.pool.batchers), broker, clock)
        self.supervisor = Supervisor()
        self.presence = Presence(name, version, clock(), host=True)
        history.processes.append(self.presence)

    async def start(self) -> None:
        await self.pool.start()
        self.pool.run(self.supervisor)
        self._strays.start(self.supervisor)

    async def kill(self) -> None:
        await self.supervisor.stop()
        await self.pool.stop()


class _Ledger:
    """An observer that records which version a ledger names for each request."""

    def __init__(self, history: History) -> None:
        self._history = history

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        for one in requests:
            record = record_of(one.principal, one.entry, 0.0, one.reply, now, ("", "", ""), content=False)
            self._history.tellings.append(Telling("the ledger", record.tenant, record.id, record.version))


class Rollout:
    """The whole rollout, at random. `history` records what happened."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.history, self._harness, self._rng = History(), harness, random.Random(seed)
        self._supervisor = Supervisor()
        settings = Settings(model="m", max_batch_size=8, cache=True, collapse=True)
        views = harness.broker, harness.peer()
        how: dict[str, Any] = {"observers": [_Ledger(self.history)], "rng": self._rng.random}
        self.gateways = [Gateway(settings, ["m"], view, GatewayCounts(), harness.now, **how) for view in views]
        self._views = views
        self._hosts: list[_Host] = []
        self._asked = 0
        self._keys: list[tuple[str, str, tuple[str, ...], str]] = []

    async def run(self, seconds: float, rate: float) -> History:
        """Send `rate` requests a second for `seconds`."""
        for number, version in enumerate([*VERSIONS, *VERSIONS]):
            await self._add(f"host {number} of {version}", version)
        for gateway in self.gateways:
            gateway.start(self._supervisor)
        self._supervisor.start("reaper", self._reap)
        self._supervisor.start("lookout", self._look_on)
        await self._weigh(WEIGHTS[0])
        await asyncio.sleep(6.0)
        others = [asyncio.ensure_future(one) for one in (self._change_weights(), self._trouble())]
        asked = []
        until = self._harness.now() + seconds
        while self._harness.now() < until:
            await asyncio.sleep(self._rng.expovariate(rate))
            asked.append(asyncio.ensure_future(self._ask()))
        await asyncio.gather(*asked)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._supervisor.stop()
        for host in self._hosts:
            await host.kill()
        return self.history

    async def _add(self, name: str, version: str) -> None:
        view = self._views[len(self._hosts) % 2]
        host = _Host(name, version, view, self._harness, self.history)
        await host.start()
        self._hosts.append(host)

    async def _reap(self) -> None:
        """Reap less often than a fleet does. On a real server, every instant at which something happens costs time."""
        while True:
            await self._harness.broker.reap()
            await asyncio.sleep(REAP_EVERY)

    async def _look_on(self) -> None:
        """Let the gateways hear about the workers twice a second, as usual."""
        while True:
            workers = await self._harness.broker.workers()
            for gateway in self.gateways:
                gateway.served.learn(workers)
            await asyncio.sleep(0.5)

    async def _weigh(self, weights: Mapping[str, float]) -> None:
        self.history.weighings.append(Weighing(weights, self._harness.now()))
        for gateway in self._rng.sample(self.gateways, 2):
            gateway.served.weigh({"": weights})
            await asyncio.sleep(1.0)

    async def _change_weights(self) -> None:
        while True:
            await asyncio.sleep(LASTS)
            await self._weigh(self._rng.choice([one for one in WEIGHTS if one != self.history.weighings[-1].weights]))

    async def _trouble(self) -> None:
        """Kill or drain a host, sometimes both hosts of a version, and start replacements."""
        for number in range(1000):
            await asyncio.sleep(self._rng.uniform(1.0, 4.0))
            version = self._rng.choice(VERSIONS)
            alike = [host for host in self._hosts if host.version == version]
            for host in alike[: self._rng.choice((1, 2))]:
                host.presence.gone = self._harness.now()
                self._hosts.remove(host)
                if self._rng.random() < 0.7:
                    now = self._harness.now()
                    self.history.faults.append(Fault("worker killed", now, now, host.name))
                else:
                    await host.pool.wind_down()
                await host.kill()
            await asyncio.sleep(self._rng.uniform(1.0, 5.0))
            for spare in range(2 - sum(host.version == version for host in self._hosts)):
                await self._add(f"host {number}-{spare} of {version}", version)

    async def _ask(self) -> None:
        rng, tenant = self._rng, self._rng.choice(TENANTS)
        self._asked += 1
        texts: tuple[str, ...] = tuple(f"text {self._asked}-{place}" for place in range(rng.choice((1, 1, 1, 3))))
        wanted = rng.choice((*VERSIONS, "9")) if rng.random() < 0.2 else ""
        key = ""
        luck = rng.random()
        if luck < 0.2:
            key = f"key {self._asked}"
            self._keys.append((tenant, key, texts, wanted))
        elif luck < 0.4 and self._keys:
            tenant, key, texts, wanted = rng.choice(self._keys[-12:])
        elif luck < 0.7:
            texts = (f"common {int(self._harness.now() / 8)} {rng.randrange(3)}",)
        chosen = not key and rng.random() < 0.2
        await self._perform(tenant, texts, key, wanted, chosen=chosen)

    async def _perform(self, tenant: str, texts: tuple[str, ...], key: str, wanted: str, *, chosen: bool) -> None:
        number = self._rng.randrange(2)
        gateway, id = self.gateways[number], str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        one = Operation(
            len(self.history.operations), Kind.ASK, tenant, f"gateway {number}", self._harness.now(), id, chosen=chosen,
            text="\n".join(texts), inputs=texts if len(texts) > 1 else (), key=key, wanted=wanted, timeout=TIMEOUT,
        )  # fmt: skip
        self.history.operations.append(one)
        ended: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()
        options = RequestOptions(TIMEOUT, 0, key, chosen=chosen, version=wanted)
        FanOut(
            gateway, InferenceRequest(Principal(tenant, tenant, 0), id, options, "m"), texts, ended.set_result
        ).start()
        with contextlib.suppress(asyncio.CancelledError):
            replies = await ended
            one.returned = self._harness.now()
            self._take(one, replies)

    def _take(self, one: Operation, replies: Sequence[Reply]) -> None:
        failure = replies[0].failure
        if failure is not None:
            one.code = "IDEMPOTENCY_CONFLICT" if failure.code == "IDEMPOTENCY_MISUSE" else failure.code
            one.status = STATUS[failure.code]
            return
        outputs = tuple(str(reply.output) for reply in replies)
        one.status, one.output, one.outputs = 200, "\n".join(outputs), outputs if one.inputs else ()
        one.version = "" if replies[0].ran is None else replies[0].ran.version


def rollout(harness: Harness, seed: int, seconds: float = 60.0, rate: float = 15.0) -> History:
    return harness.run(Rollout(harness, seed).run(seconds, rate))
