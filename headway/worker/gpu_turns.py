"""Turn-taking between the batchers that share a GPU. One batch runs at a time, and all models compete for the next turn.

    free ──a claim gets a batch──▶ running ──complete or release──▶ choosing ──▶ ask the waiting batchers in order
      ▲                                                                          │ first with a batch due ──▶ running
      └────────────────────────────── no batch is due ───────────────────────────┘

Each batcher gets a `TurnedSource` as its broker. Claiming from it returns nothing while another model has the turn. Waiting
for work ends when it is the batcher's turn or, while the GPU is free, when the broker wakes the batcher. If several models
could go next, the broker is asked what each has queued, while the finished batch is being delivered. A batcher that doesn't
use its turn promptly, for example because its process just died, is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from headway.core.departure import Policy
from headway.core.locality import Contender, FairOrder
from headway.errors import BrokerUnavailable
from headway.model import BatchFailure, Completion, ItemResult, Lease, NoWork, Slot, WorkerInfo, WorkerStatus
from headway.ports import WorkSource
from headway.runtime.race import race

TURN = 0.02  # Time limit in seconds for a batcher to use its turn, and for the broker to say what is queued.
NOT_ITS_TURN = NoWork(None)  # Result of a claim that never reached the broker, because another model has the turn.


class GpuTurns:
    """Decides which model on a GPU may claim and run a batch.

    Arguments:
        name: the GPU's name in heartbeats.
        contenders: asks the broker about the next batch of each slot.
        share: returns the share of the GPU that is available to a model.
        load_seconds: returns how long a model is expected to take to load.
        absent: changes an offline worker's heartbeat to report that its evicted model can be loaded.

    `evicted` holds the models that were evicted and haven't been loaded again.
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
        self._slots: dict[str, Slot] = {}  # Slot of each model that has claimed on this GPU.
        self._choosing: asyncio.Task[None] | None = None
        self._turns = FairOrder()
        self._running: str | None = None
        self._since = 0.0
        self._turn: str | None = None  # Model that may claim next.
        self._asks = False  # True while that model is claiming.
        self._order: list[str] = []  # Models to ask next, in order, if the current turn yields no batch.
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._free: dict[str, asyncio.Future[None]] = {}  # Models that wait for work while the GPU is free.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """True while a batch is running, a model has the turn, or the next turn is being decided."""
        return self._running is not None or self._turn is not None or self._choosing is not None

    def begin(self, slot: Slot) -> bool:
        """Let a slot claim, and return True. Return False if a batch is running or another model has the turn."""
        if not slot.helps or slot.model not in self._slots:
            self._slots[slot.model] = slot
        if self._running is not None or self._choosing is not None or self._turn not in (None, slot.model):
            return False
        self._stop_timer()
        self._turn, self._asks = slot.model, True
        return True

    def took(self, model: str) -> None:
        """Record that the model's claim got a batch."""
        self._turn, self._asks, self._order = None, False, []
        self._running, self._since = model, self._clock()
        self._turns.began(model)
        for taken in self._free.values():
            if not taken.done():
                taken.set_result(None)

    def passed(self, model: str) -> None:
        """Record that the model's claim got no batch, and let the next model claim."""
        if self._turn == model:
            self._turn, self._asks = None, False
            self._give_turn()

    def ended(self, model: str) -> None:
        """Record that the model's batch has finished. Then let all waiting models, including this one, claim in turn."""
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
        """Decide the order in which the waiting models and `last`, whose batch just finished, may claim."""
        known: dict[str, Contender] = {}
        try:
            async with asyncio.timeout(TURN):
                slots = [self._slots[model] for model in {*self._waiting, last}]
                known = {contender.model: contender for contender in await self._contenders(slots)}
        except (BrokerUnavailable, TimeoutError):  # Then the order depends only on past GPU time.
            pass
        finally:
            self._choosing = None
        models = {*self._waiting, last} & self._slots.keys()
        self._order = self._turns.order([known.get(model) or Contender(model) for model in models])
        self._give_turn()

    def leave(self, model: str) -> None:
        self._turns.forget(model)
        self._slots.pop(model, None)
        self._order = [other for other in self._order if other != model]
        self.passed(model)

    async def turn(self, model: str) -> None:
        """Return once the model may claim, or the GPU is free."""
        if self.busy:
            await self._until(self._waiting, model)

    async def taken(self, model: str) -> None:
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
        """Give the turn to the next model in order. If there is none, wake all waiting models."""
        self._stop_timer()
        self._turn = None
        if self._order:
            self._turn, self._asks = self._order.pop(0), False
            self._timer = asyncio.get_running_loop().call_later(TURN, self._pass_over, self._turn)
            self._wake(self._turn)
            return
        for model in tuple(self._waiting):
            self._wake(model)

    def _wake(self, model: str) -> None:
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
    """The broker, as seen by a batcher on a shared GPU."""

    def __init__(self, broker: WorkSource, turns: GpuTurns, model: str) -> None:
        self._broker = broker
        self._turns = turns
        self._model = model
        self._claimed = False  # True if the last claim reached the broker, so that it knows that this slot is idle.

    async def claim(self, slot: Slot, policy: Policy) -> Lease | NoWork:
        """Claim a batch, or return NOT_ITS_TURN while another model has the turn. A slot that `helps` keeps the turn even if it
        gets no batch, so that it can claim from another queue."""
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
        if not self._claimed:
            await self._turns.turn(self._model)
            return
        work, _ = await race(self._broker.wait_for_work(slot, until), self._turns.taken(self._model))
        if work is not None:
            work.result()

    async def complete(self, lease: Lease, items: Sequence[ItemResult]) -> Completion:
        self._turns.ended(self._model)  # The GPU is free while the results are sent to the broker.
        return await self._broker.complete(lease, items)

    async def release(self, lease: Lease, failure: BatchFailure | None = None) -> bool:
        self._turns.ended(self._model)
        return await self._broker.release(lease, failure)

    async def extend(self, lease: Lease) -> bool:
        return await self._broker.extend(lease)

    async def heartbeat(self, worker: WorkerInfo) -> None:
        """Add the GPU's name, the model's share of that GPU, and the model's load time to the heartbeat."""
        turns = self._turns
        if worker.status is WorkerStatus.OFFLINE and self._model in turns.evicted:
            worker = turns.absent(worker)
        share, load = turns.share(self._model), turns.load_seconds(self._model)
        await self._broker.heartbeat(replace(worker, gpu=turns.name, share=share, load_seconds=load))

    async def contenders(self, slots: Sequence[Slot]) -> Sequence[Contender]:
        return await self._broker.contenders(slots)
