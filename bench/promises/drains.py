"""Drains of a fleet: an operator drains a worker, a process or the whole machine for a while, one at a time.

The service refuses a drain that would leave a model without a healthy worker. Draining the machine is forced, and short; requests may be refused
meanwhile for lack of workers.
"""

import asyncio
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from bench.promises.watches import host_of, listed
from bench.stand.fleet import Fleet
from bench.stand.stand import Server
from tests.promises.faults import Drained, Fault

LEVELS = {"worker": 3, "process": 3, "machine": 1}
"""Weights of the levels to drain."""
LASTS, LASTS_FOR_ALL = (0.5, 8.0), (0.3, 2.0)
"""Minimum and maximum seconds between idle and undrained, and the same for the whole machine."""
HEARD = 10.0
"""Maximum seconds until an order takes effect."""
LOOK_EVERY = 0.1
ANSWERED_WITHIN = 5.0


class Drains:
    """An operator's orders, recorded in `faults`.

    Attributes:
        now: names of processes that are drained, entirely or in part.
        refused: orders that the service refused.
    """

    def __init__(self, made: Fleet, faults: list[Fault], rng: random.Random) -> None:
        self.now: set[str] = set()
        self.refused = 0
        self._made, self._faults, self._rng = made, faults, rng

    async def order(self) -> None:
        """Drain something, wait until nothing runs there, and undrain it after a while."""
        level = self._rng.choices(list(LEVELS), list(LEVELS.values()))[0]
        workers = [worker for worker in await self._workers() if worker["status"] == "healthy"]
        healthy = [worker for worker in workers if host_of(self._made, worker)]
        if not healthy:
            return
        worker = self._rng.choice(healthy)["worker_id"]
        name = await self._name(level, worker)
        if not name:
            return
        began = time.monotonic()
        status, answer = await self._told("start", name=name, force=str(level == "machine").lower())
        if status != 200:
            self.refused += 1
            await self._told("end", name=name)  # An earlier try without an answer may have succeeded.
            return
        ids = {worker for drain in answer["drains"] for worker in drain["workers"]}
        noted = self._note(level, began, [worker for worker in healthy if worker["worker_id"] in ids])
        try:
            idle_at = await self._seen(lambda: self._idle(ids))
            for drain in noted:
                drain.told = idle_at
            await asyncio.sleep(self._rng.uniform(*(LASTS_FOR_ALL if level == "machine" else LASTS)))
        finally:
            for drain in noted:
                drain.undrained = time.monotonic()
            await self._told("end", name=name)
            back = await self._seen(lambda: self._back(ids))
            for drain in noted:
                drain.back, drain.ended = back, time.monotonic()
            self.now.clear()

    async def _name(self, level: str, worker: str) -> str:
        """Return the name of what to drain, or an empty string if it isn't known now."""
        if level == "machine":
            return socket.gethostname()
        process = worker.partition("/")[0]
        if level == "worker" or not self._made.services:
            return worker if level == "worker" else process
        fleet = await self._asked(lambda door: door.ask("/internal/fleet", ANSWERED_WITHIN))
        return next((member["id"] for member in fleet["members"]), "") if fleet else ""

    def _note(self, level: str, began: float, lines: Sequence[dict[str, Any]]) -> list[Drained]:
        """Record a drain of GPU processes, or of a whole Headway process."""
        noted: dict[tuple[str, int], Drained] = {}
        for line in lines:
            host = host_of(self._made, line)
            if host is not None:
                pid = line["pid"] if level == "worker" else 0
                role = "service" if self._made.services else "worker"
                noted[host.name, pid] = Drained(f"{role} drained", began, whom=host.name, pid=pid)
                self.now.add(host.name)
        self._faults += noted.values()
        return list(noted.values())

    async def _idle(self, ids: set[str]) -> bool:
        """Return True once all these workers are drained and run nothing, or are gone."""
        workers = await self._workers()
        there = [worker for worker in workers if worker["worker_id"] in ids and worker["status"] != "offline"]
        return bool(workers) and all(worker["status"] == "drained" and not worker["in_flight"] for worker in there)

    async def _back(self, ids: set[str]) -> bool:
        workers = await self._workers()
        there = [worker for worker in workers if worker["worker_id"] in ids and worker["status"] != "offline"]
        return bool(workers) and all(worker["status"] == "healthy" for worker in there)

    async def _seen(self, look: Callable[[], Any]) -> float | None:
        """Return when something was seen, or None if it wasn't seen in time."""
        until = time.monotonic() + HEARD
        while time.monotonic() < until:
            if await look():
                return time.monotonic()
            await asyncio.sleep(LOOK_EVERY)
        return None

    async def _workers(self) -> list[dict[str, Any]]:
        return await self._asked(listed) or []

    async def _asked(self, ask: Callable[[Server], Any]) -> Any:
        """Return the first answer that a process gives, or None."""
        for door in self._rng.sample(self._made.doors, len(self._made.doors)):
            try:
                if answer := await asyncio.to_thread(ask, door):
                    return answer
            except (OSError, msgspec.DecodeError):
                continue
        return None

    async def _told(self, what: str, **query: str) -> tuple[int, Any]:
        """Give an order, repeating it after server errors. Returns the status and answer."""
        while True:
            door = self._rng.choice(self._made.doors) if self._made.doors else None
            if door is not None and door.admin:
                status, answer = await asyncio.to_thread(
                    _posted, f"{door.admin}/internal/drains/{what}?{urlencode(query)}"
                )
                if status and status < 500:
                    return status, answer
            await asyncio.sleep(LOOK_EVERY)


def _posted(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=ANSWERED_WITHIN) as answer:
            return answer.status, msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as exc:
        return exc.code, None
    except (OSError, msgspec.DecodeError):
        return 0, None
