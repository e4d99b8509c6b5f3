"""Trouble for a fleet: processes of every role are killed, terminated, paused and drained at random, and replaced.

    in peace ──SIGKILL──▶ gone ──random pause──▶ starting ──ready──▶ in peace
       │  ▲
       │  └──SIGCONT── paused ◀──SIGSTOP──┐
       ├──────────────────────────────────┘
       └──SIGTERM──▶ draining ──exit──▶ gone

Troubles overlap. At least one gateway and one worker host (usually one for each version of the model) are in peace at any time and not drained.
Redis, the ledger's database and a service with its broker in memory have one trouble at a time. Drained processes get trouble like all others.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.promises.drains import Drains
from bench.stand import fleet, processes
from bench.stand.fleet import Fleet
from bench.stand.processes import Process
from bench.stand.stand import Broken, Server
from tests.promises.client import Door, Standing
from tests.promises.faults import Fault
from tests.promises.operation import Presence
from tests.servers.postgres import PostgresServer

WEIGHTS = {
    "gateway": 3, "worker": 3, "gpu": 3, "controller": 2, "redis": 2, "ledger": 2, "service": 3, "drain": 3
}  # fmt: skip
GONE = (0.3, 3.0)
"""Minimum and maximum seconds before a process that is gone is replaced."""
PAUSED = (0.3, 6.0)
"""A lease lasts 3 s."""
REDIS_AWAY = (0.1, 2.0)
LEDGER_AWAY = (0.5, 8.0)
KEPT = {"always": "durable", "everysec": "synced each second", "no": "memory only"}
"""What a killed Redis recovers, by how often its append-only file is synced."""
START_AGAIN = 1.0
"""Seconds between attempts to start a process that failed because Redis was away."""
TAKING = ("gateway", "service")
"""Roles that take requests."""
SPARED = ("gateway", "worker")
"""Roles of which at least one is always left in peace."""
LAST = 0.3
"""Chance of trouble for the last host of a version."""
MOST_STARTS = 10
WATCH_EVERY = 0.25


@dataclass(slots=True, eq=False)
class Unit:
    role: str
    server: Server
    door: Door | None = None
    in_peace: bool = True


class Trouble:
    """All trouble. Build it in a running loop, once the fleet is up, and call `make` once.

    It keeps the fleet's lists and `doors` up to date. It records its actions in `faults`, and which processes existed when in `processes`.

    Attributes:
        unruly: processes that ended unprompted, or with an exit code other than 0; `examples` describes them.
        false_starts: failed attempts to start a process, because Redis was away.
    """

    def __init__(
        self,
        made: Fleet,
        doors: list[Door],
        faults: list[Fault],
        processes: list[Presence],
        every: float,
        seed: int,
        ledger: PostgresServer | None = None,
    ) -> None:
        self.unruly = self.false_starts = 0
        self.examples: list[str] = []
        self._fleet = made
        self._doors = doors
        self._faults, self._processes = faults, processes
        self._every = every
        self._rng = random.Random(f"trouble {seed}")
        self._drains, self._ledger = Drains(made, faults, self._rng), ledger
        self._once = {"redis": self._trouble_redis, "ledger": self._trouble_ledger, "drain": self._drains.order}
        self._busy = set[str]()
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._failed: list[BaseException | None] = []
        self._children: list[Process] = []
        self._units: list[Unit] = []
        self._host = "worker" if made.workers else "service"
        for role, servers in made.rosters.items():
            for server in servers:
                self._enlist(role, server)
        there = {unit.role for unit in self._units} | {"gpu", "drain", *(["redis"] if made.store is not None else [])}
        if ledger is not None:
            there.add("ledger")
        self._weights = {role: weight for role, weight in WEIGHTS.items() if role in there}

    async def make(self, seconds: float) -> None:
        """Make trouble for `seconds`. Returns when everything is repaired."""
        end = self._loop.time() + seconds
        watch = self._loop.create_task(self._watch())
        try:
            while (pause := self._rng.expovariate(1.0 / self._every)) < end - self._loop.time():
                await asyncio.sleep(pause)
                self._begin()
            while self._running:
                await asyncio.wait(self._running)
            for failure in filter(None, self._failed):
                raise failure
        finally:
            watch.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(watch, *self._running, return_exceptions=True)

    @property
    def refused(self) -> int:
        return self._drains.refused

    def orphans(self) -> list[Process]:
        """Return GPU processes that outlived their killed host."""
        return [child for child in self._children if processes.is_alive(child)]

    def _begin(self) -> None:
        """Begin one trouble, if possible."""
        role = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
        if role in self._once:
            if role not in self._busy:
                self._keep(self._alone(role))
        elif unit := self._pick(self._host if role == "gpu" else role):
            doings = (self._kill_gpu, self._pause_gpu) if role == "gpu" else (self._kill, self._end, self._pause)
            self._keep(self._rng.choice(doings)(unit))

    async def _alone(self, role: str) -> None:
        """Make a trouble that can't overlap with itself."""
        self._busy.add(role)
        await self._once[role]()
        self._busy.remove(role)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a trouble in the background. If it fails, the whole run fails."""
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: None if done.cancelled() else self._failed.append(done.exception()))

    def _pick(self, role: str) -> Unit | None:
        """Return a unit in peace, or None. For spared roles, another unit has to stay in peace."""
        calm = [unit for unit in self._units if unit.role == role and unit.in_peace]
        chosen = self._rng.choice(calm) if calm else None
        others = [unit for unit in calm if unit is not chosen and unit.server.name not in self._drains.now]
        if role in SPARED and not others:
            return None
        if chosen is not None and role == "worker" and self._rng.random() > LAST:
            return chosen if any(unit.server.version == chosen.server.version for unit in others) else None
        return chosen

    async def _kill(self, unit: Unit) -> None:
        with self._noted(f"{unit.role} killed", unit):
            self._leave(unit, Standing.KILLED)
            self._children += processes.family(unit.server.pid)[1:]
            await asyncio.to_thread(unit.server.kill)
            await self._replace(unit)

    async def _end(self, unit: Unit) -> None:
        with self._noted(f"{unit.role} ended", unit):
            self._leave(unit, Standing.ENDING)
            code = await asyncio.to_thread(unit.server.stop)
            if code:
                self._blame(unit, f"ended with exit code {code} after SIGTERM")
            await self._replace(unit)

    async def _pause(self, unit: Unit) -> None:
        with self._noted(f"{unit.role} paused", unit):
            unit.in_peace = False
            os.kill(unit.server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._rng.uniform(*PAUSED))
            finally:
                os.kill(unit.server.pid, signal.SIGCONT)
            unit.in_peace = True

    async def _kill_gpu(self, unit: Unit) -> None:
        for pid in self._one_of(fleet.gpu_pids(unit.server)):
            with self._noted("gpu killed", unit), contextlib.suppress(ProcessLookupError):  # It may have just exited.
                os.kill(pid, signal.SIGKILL)

    async def _pause_gpu(self, unit: Unit) -> None:
        """Pause a GPU process. Its host may notice the hang, and replace it meanwhile."""
        victims = [process for pid in self._one_of(fleet.gpu_pids(unit.server)) if (process := processes.look(pid))]
        for process in victims:
            with self._noted("gpu paused", unit), contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self._rng.uniform(*PAUSED))
                finally:
                    if processes.is_alive(process):
                        os.kill(process.pid, signal.SIGCONT)

    def _one_of(self, pids: Sequence[int]) -> Sequence[int]:
        return self._rng.sample(pids, min(len(pids), 1))

    async def _trouble_redis(self) -> None:
        redis, killed = self._fleet.redis, self._rng.random() < 0.5
        pid = redis.server.pid
        with self._noted(f"redis killed, {KEPT[redis.keep]}" if killed else "redis paused", None):
            if killed:
                redis.server.kill()
            else:
                os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._rng.uniform(*REDIS_AWAY))
            finally:
                if killed:
                    await asyncio.to_thread(redis.start)
                else:
                    os.kill(pid, signal.SIGCONT)

    async def _trouble_ledger(self) -> None:
        server, killed = self._ledger, self._rng.random() < 0.5
        assert server is not None
        with self._noted("ledger killed" if killed else "ledger paused", None, "ledger"):
            await asyncio.to_thread(server.kill if killed else server.pause)
            try:
                await asyncio.sleep(self._rng.uniform(*LEDGER_AWAY))
            finally:
                await (self._start_ledger(server) if killed else asyncio.to_thread(server.resume))

    async def _start_ledger(self, server: PostgresServer) -> None:
        """Start the ledger's server, which may fail while the killed one is still exiting."""
        for attempt in range(1, MOST_STARTS + 1):
            try:
                await asyncio.to_thread(server.start)
                return
            except AssertionError:
                if attempt == MOST_STARTS:
                    raise
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(START_AGAIN)

    def _leave(self, unit: Unit, standing: Standing) -> None:
        """Stop clients from using a unit or counting on it, before it gets the signal."""
        unit.in_peace = False
        if unit.door is not None:
            unit.door.standing = standing
        for presence in self._processes:
            if presence.name == unit.server.name:
                presence.gone = time.monotonic()

    async def _replace(self, unit: Unit) -> None:
        self._units.remove(unit)
        self._fleet.rosters[unit.role].remove(unit.server)
        await asyncio.sleep(self._rng.uniform(*GONE))
        for attempt in range(1, MOST_STARTS + 1):
            server = self._fleet.start(unit.role, unit.server.version, unit.server.models)
            try:
                await asyncio.to_thread(fleet.wait_until_up, unit.role, server)
            except Broken:
                self.false_starts += 1
                if attempt == MOST_STARTS:
                    raise
                await asyncio.sleep(START_AGAIN)
            except BaseException:
                server.kill()
                raise
            else:
                self._fleet.rosters[unit.role].append(server)
                self._enlist(unit.role, server)
                return

    def _enlist(self, role: str, server: Server) -> None:
        now = time.monotonic()
        if role in TAKING:
            ports = urlsplit(server.url).port or 80, urlsplit(server.admin).port or 0
            door = Door(server.name, ports[0], grpc=server.grpc_port, admin=ports[1])
            self._doors.append(door)
            self._processes.append(Presence(server.name, "", now))
        else:
            door = None
        if role == self._host:
            models = ("", *server.models)
            self._processes.append(Presence(server.name, server.version, now, models=models, host=True))
        self._units.append(Unit(role, server, door))

    async def _watch(self) -> None:
        """Find processes that ended unprompted, and replace them."""
        while True:
            await asyncio.sleep(WATCH_EVERY)
            for unit in [unit for unit in self._units if unit.in_peace and not unit.server.is_running]:
                self._blame(unit, f"ended by itself: {unit.server.output[-500:]}")
                self._leave(unit, Standing.ENDING)
                self._keep(self._replace(unit))

    def _blame(self, unit: Unit, text: str) -> None:
        self.unruly += 1
        self.examples.append(f"{unit.server.name} {text}")

    @contextlib.contextmanager
    def _noted(self, what: str, unit: Unit | None, whom: str = "redis") -> Iterator[None]:
        """Record a fault, from its beginning to its repair."""
        whom = unit.server.name if unit is not None else whom
        fault = Fault(what, time.monotonic(), whom=whom)
        self._faults.append(fault)
        yield
        fault.ended = time.monotonic()
