"""Pool of batchers, one for each slot, that can become more or fewer while they serve.

    run ──▶ slot 0, slot 1, … ── grow ──▶ a further slot, which brings its backend up by itself
                              ── shrink ─▶ the last slot claims no more, finishes its batch, goes offline

A slot that leaves loses nothing: what it runs is answered, and what it has not claimed waits for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headway.model import Signature
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.starting import start_all

log = get_logger(__name__)


class Places:
    """Places that pools take slots' numbers from.

    Arguments:
        most: number of places.

    Attributes:
        takers: called in turn when a place has become free, so that whoever waits for one takes it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._free = most, set(range(most))
        self.takers: list[Callable[[], None]] = []

    @property
    def free(self) -> int:
        """Number of free places."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """Number of places that are not free."""
        return self._most - len(self._free)

    def take(self) -> int | None:
        """Take the free place with the lowest number; None where none is free."""
        if not self._free:
            return None
        number = min(self._free)
        self._free.discard(number)
        return number

    def give(self, number: int) -> None:
        """Give a place back."""
        self._free.add(number)
        for take in self.takers:
            take()


class ServingBatchers(dict[Batcher, asyncio.Task[None]]):
    """Batchers of a pool that serve, each with the task that does."""

    async def finish(self, batcher: Batcher) -> None:
        """Take a slot offline as soon as its last batch is done: others wait for none of its batches any more."""
        if (serving := self.get(batcher)) is not None:
            await asyncio.shield(serving)  # Who gives up waiting ends no loop: that is the supervisor's.
        await batcher.stop()
        self.pop(batcher, None)


async def replace_all(batchers: Sequence[Batcher]) -> None:
    """Swap every backend for a fresh one, one after the other; the first that fails ends it, the rest go on.

    The fleet is told of their code once all have it. Until then answers are shared as those of the old code, and nobody
    who asks afterwards joins a batch that began on it.
    """
    try:
        for batcher in batchers:
            await batcher.replace()
    finally:
        for batcher in batchers:
            await batcher.tell_report()


class WorkerPool:
    """Batchers of one process over one broker.

    Arguments:
        make: builds the batcher of the slot with a number, counted from 0.
        places: numbers that other pools take, too; None: those below `most`.
        size: slots at first.
        most: most slots that there can ever be, as each needs a device.
        slots: set that the ids of the slots are kept in, beside those of other pools; None: a set of its own.

    Attributes:
        most: most slots that there can ever be.
        wanted: slots that there should be; it has fewer as long as other pools have their places.
        places: places that its slots have.
        batchers: batchers that serve, in the order in which they came.
        slots: ids of their slots; the same set for as long as the pool lives.
        held: whether an operator has drained the whole process.
        drains: names of all drains of the fleet: a further slot that is drained starts no backend.
    """

    def __init__(
        self,
        make: Callable[[int], Batcher],
        size: int,
        most: int,
        slots: set[str] | None = None,
        places: Places | None = None,
    ) -> None:
        self._make = make
        self.most, self.wanted = most, size
        self.places = Places(most) if places is None else places
        self.batchers: list[Batcher] = []
        self.slots = set[str]() if slots is None else slots
        self.held, self.drains = False, frozenset[str]()
        self._numbers: dict[Batcher, int] = {}
        self._leaving: list[Batcher] = []
        self._serving = ServingBatchers()
        self._supervisor: Supervisor | None = None
        self._resizing = asyncio.Lock()
        self._winding_down = False
        self.places.takers.append(self._grow)
        self._grow()
        self.wanted = len(self.batchers)

    @property
    def size(self) -> int:
        """Number of slots that serve or start."""
        return len(self.batchers)

    @property
    def serving(self) -> bool:
        """Whether it can be resized: it serves, and does not end."""
        return self._supervisor is not None and not self._winding_down

    @property
    def items_per_second(self) -> float:
        """Items per second that all slots do in full batches, as far as that is known."""
        return sum(batcher.figures.pace.items_per_second for batcher in self.batchers)

    @property
    def signature(self) -> Signature | None:
        """Signature of the target; None while no slot has loaded it."""
        return next((one.signature for one in self.batchers if one.signature is not None), None)

    async def start(self) -> None:
        """Start all backends; the first that fails ends the attempt.

        Raises:
            TargetError: a backend does not start.
        """
        await start_all(batcher.start() for batcher in self.batchers)

    def run(self, supervisor: Supervisor) -> None:
        """Start serving. A backend that has not been started is started, again and again if need be."""
        self._supervisor = supervisor
        for batcher in self.batchers:
            self._serving[batcher] = batcher.run(supervisor)

    async def resize(self, size: int) -> None:
        """Serve with `size` slots from now on; changes nothing once the pool winds down.

        Slots that leave are those that came last. Returns when their batches are done. Backends of new slots start in the
        background, as soon as there are places for them.

        Raises:
            ValueError: there cannot be so many, or the pool does not serve yet.
        """
        if not 0 <= size <= self.most:
            raise ValueError(f"{size} slots: must lie between 0 and {self.most}")
        if self._supervisor is None:
            raise ValueError("a pool that does not serve yet cannot be resized")
        async with self._resizing:
            if self._winding_down or size == self.wanted:
                return
            log.info("the pool of workers changes", slots=size, before=len(self.batchers))
            self.wanted = size
            self._grow()
            self._leaving.extend(self.batchers[size:])
            del self.batchers[size:]
            for batcher in self._leaving:
                self.slots.discard(batcher.slot.worker)
                batcher.wind_down()
            await asyncio.gather(*map(self._serving.finish, self._leaving))
            left = [self._numbers.pop(batcher) for batcher in self._leaving]
            self._leaving.clear()
            for number in left:
                self.places.give(number)

    def _grow(self) -> None:
        """Have as many slots as are wanted, as far as there are places."""
        while (
            len(self.batchers) < self.wanted and not self._winding_down and (number := self.places.take()) is not None
        ):
            batcher = self._make(number)
            batcher.held = self.held or batcher.slot.worker in self.drains
            self._numbers[batcher] = number
            self.batchers.append(batcher)
            self.slots.add(batcher.slot.worker)
            if self._supervisor is not None:
                self._serving[batcher] = batcher.run(self._supervisor)

    async def replace(self) -> None:
        """Swap every backend for a fresh one; see `replace_all`."""
        await replace_all(tuple(self.batchers))

    async def wind_down(self) -> None:
        """Begin no other batch; returns when those that run are done and all slots are offline."""
        self._winding_down = True
        everyone = [*self.batchers, *self._leaving]
        for batcher in everyone:
            batcher.wind_down()
        await asyncio.gather(*map(self._serving.finish, everyone))

    async def stop(self) -> None:
        """Stop all backends, after the loops have been stopped or have ended."""
        self._winding_down = True
        await asyncio.gather(*(batcher.stop() for batcher in (*self.batchers, *self._leaving)))
