"""Turns of the batchers that share one GPU: one batch at a time, and one decision over all models whose it is.

    free ──claim gets a batch──▶ running ──complete or release──▶ choosing ──▶ the batchers that wait are asked in order
      ▲                                                                        │ first with a batch due ──▶ running
      └────────────────────────────── nobody has ────────────────────────────────┘

Each batcher is one of any slot. What it takes for its broker is a `TurnedSource`, whose claims get nothing while it is
another's turn, and whose waits end when a batch may be there: while the GPU runs, with the batcher's turn; while it is free,
with the broker's wake-up. While the outcome of a batch is handed in, the broker is asked what waits for whom, if several could be
next. A batcher whose turn it is and that does not claim soon, as its process has just died, is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from headway.core.departure import Policy
from headway.core.locality.turns import Contender, FairOrder
from headway.errors import BrokerUnavailable
from headway.model import BatchFailure, Completion, ItemResult, Lease, NoWork, Slot, WorkerInfo, WorkerStatus
from headway.ports import WorkSource
from headway.runtime.race import race

TURN = 0.02
"""Seconds that a batcher has to claim once it is its turn, and the broker to say what waits."""
NOT_ITS_TURN = NoWork(None)
"""Answer to a claim of which the broker has not heard."""


class GpuTurns:
    """Turns on one GPU.

    Arguments:
        name: name of the GPU in heartbeats.
        clock: monotonic seconds.
        contenders: asks what is known of the next batches of some slots.
        share: share of the GPU that a model can have.
        load_seconds: seconds that a load of a model is expected to take.
        absent: makes the heartbeat of a worker whose model has left the GPU, and can be loaded again.

    Attributes:
        evicted: models that have done so.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        contenders: Callable[[Sequence[Slot]], Awaitable[Sequence[Contender]]],
        share: Callable[[str], float],
        load_seconds: Callable[[str], float] = lambda model: 0.0,
        absent: Callable[[WorkerInfo], WorkerInfo] = lambda worker: replace(worker, status=WorkerStatus.COLD),
    ) -> None:
        self.name = name
        self.share, self.load_seconds, self.absent = share, load_seconds, absent
        self.evicted = set[str]()
        self._clock = clock
        self._contenders = contenders
        self._slots: dict[str, Slot] = {}
        """Slot of each model that has claimed here."""
        self._choosing: asyncio.Task[None] | None = None
        """Task that chooses whose turn it is."""
        self._turns = FairOrder()
        self._running: str | None = None
        self._since = 0.0
        self._turn: str | None = None
        """Model whose turn it is to claim."""
        self._asks = False
        """Whether its claim is under way."""
        self._order: list[str] = []
        """Models that are asked next, if it has nothing due."""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Models that wait for their turn."""
        self._free: dict[str, asyncio.Future[None]] = {}
        """Models that wait for work on a free GPU, until it is taken."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch runs, or a turn has been given that may become one, or is about to be."""
        return self._running is not None or self._turn is not None or self._choosing is not None

    def begin(self, slot: Slot) -> bool:
        """Let a slot claim now; False while it is another's turn, or a batch runs."""
        if not slot.helps or slot.model not in self._slots:
            self._slots[slot.model] = slot
        if self._running is not None or self._choosing is not None or self._turn not in (None, slot.model):
            return False
        self._stop_timer()
        self._turn, self._asks = slot.model, True
        return True

    def took(self, model: str) -> None:
        """Note that the claim of a model got a batch."""
        self._turn, self._asks, self._order = None, False, []
        self._running, self._since = model, self._clock()
        self._turns.began(model)
        for taken in self._free.values():
            if not taken.done():
                taken.set_result(None)

    def passed(self, model: str) -> None:
        """Note that the claim of a model got nothing; the next is asked."""
        if self._turn == model:
            self._turn, self._asks = None, False
            self._give_turn()

    def ended(self, model: str) -> None:
        """Note that the batch of a model is over; all that wait are asked in order, it among them."""
        if self._running != model:
            return
        self._running = None
        self._turns.ended(model, self._clock() - self._since)
        if self._waiting.keys() - {model}:
            self._choosing = asyncio.get_running_loop().create_task(self._choose(model))
        else:
            self._order = [model]
            self._give_turn()

    async def _choose(self, last: str) -> None:
        """Choose the order in which those that wait are asked, `last` among them, whose batch is over."""
        known: dict[str, Contender] = {}
        try:
            async with asyncio.timeout(TURN):
                slots = [self._slots[model] for model in {*self._waiting, last}]
                known = {one.model: one for one in await self._contenders(slots)}
        except (BrokerUnavailable, TimeoutError):  # Then only the time had decides.
            pass
        finally:
            self._choosing = None
        models = {*self._waiting, last} & self._slots.keys()
        self._order = self._turns.order([known.get(model) or Contender(model) for model in models])
        self._give_turn()

    def leave(self, model: str) -> None:
        """Forget a model that leaves the GPU."""
        self._turns.forget(model)
        self._slots.pop(model, None)
        self._order = [one for one in self._order if one != model]
        self.passed(model)

    async def turn(self, model: str) -> None:
        """Return when it is the model's turn to claim, or the GPU is free."""
        if self.busy:
            await self._until(self._waiting, model)

    async def taken(self, model: str) -> None:
        """Return when the GPU runs a batch."""
        if self._running is None:
            await self._until(self._free, model)

    async def _until(self, waits: dict[str, asyncio.Future[None]], model: str) -> None:
        waiter = waits[model] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if waits.get(model) is waiter:
                del waits[model]

    def _give_turn(self) -> None:
        """Give the next model in order its turn; after the last, everybody else may look for work."""
        self._stop_timer()
        self._turn = None
        if self._order:
            self._turn, self._asks = self._order.pop(0), False
            self._timer = asyncio.get_running_loop().call_later(TURN, self._pass_over, self._turn)
            self._tell(self._turn)
            return
        for model in tuple(self._waiting):
            self._tell(model)

    def _tell(self, model: str) -> None:
        waiter = self._waiting.get(model)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _pass_over(self, model: str) -> None:
        if self._turn == model and not self._asks:
            self._give_turn()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class TurnedSource(WorkSource):
    """Broker as one batcher of a shared GPU sees it; see `headway.ports.WorkSource`.

    Arguments:
        broker: the broker.
        turns: turns on the GPU.
        model: model of the batcher.
    """

    def __init__(self, broker: WorkSource, turns: GpuTurns, model: str) -> None:
        self._broker = broker
        self._turns = turns
        self._model = model
        self._claimed = False
        """Whether the last claim has reached the broker, so that it knows that this slot is idle."""

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """See WorkSource. Nothing is claimed while it is another model's turn. One that helps has its own claim next."""
        self._claimed = self._turns.begin(slot)
        if not self._claimed:
            return NOT_ITS_TURN
        keeps = False
        try:
            claimed = await self._broker.claim(slot, policy)
            keeps = slot.helps
            if isinstance(claimed, Lease):
                keeps = True
                self._turns.took(self._model)
            return claimed
        finally:
            if not keeps:
                self._turns.passed(self._model)

    async def wait_for_work(self, slot: Slot, until: float | None) -> None:
        """See WorkSource. The GPU has to be free, too."""
        if not self._claimed:
            await self._turns.turn(self._model)
            return
        found, _ = await race(self._broker.wait_for_work(slot, until), self._turns.taken(self._model))
        if found is not None:
            found.result()

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        """See WorkSource. The GPU is free from here on."""
        self._turns.ended(self._model)
        return await self._broker.complete(lease, items)

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        """See WorkSource. The GPU is free from here on."""
        self._turns.ended(self._model)
        return await self._broker.release(lease, failure)

    async def extend(self, lease: Lease) -> bool:
        return await self._broker.extend(lease)

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """See WorkSource. It tells the GPU, how much of it the model can have, and how long a load takes there."""
        turns = self._turns
        if worker.status is WorkerStatus.OFFLINE and self._model in turns.evicted:
            worker = turns.absent(worker)
        share, load = turns.share(self._model), turns.load_seconds(self._model)
        await self._broker.heartbeat(replace(worker, gpu=turns.name, share=share, load_seconds=load))

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        return await self._broker.contenders(slots)
