"""Table of the queues of one process.

A queue is created when an entry, a worker or a server's list first names it. It is forgotten when no worker and no list has named
it for a while, but never if it belongs to one of the process's own models or slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway.brokers.redis.shard_queue import Queue
from headway.core.batch_cost import is_news
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import CostLine, QueueName

LIST_QUEUES_EVERY = 10.0
"""Seconds between two reads of the server's lists."""
FORGET_AFTER = 120.0
"""Seconds after which an unnamed queue is forgotten. A server that lost its state lists nothing for a while."""


class QueueTable(dict[QueueName, list[Queue]]):
    """Queues of one process by name, one for each shard.

    Attributes:
        added: called with new queues.
        rows: models whose entries have rows or shapes. See `core.rows.counted`.
        untold: instant until which each model's queues may hold data, if the fleet hasn't been told yet.
    """

    def __init__(self, make: Callable[[QueueName, int, QueueLimits], Queue], shards: int) -> None:
        super().__init__()
        self.every: list[Queue] = []
        self.limits: dict[str, QueueLimits] = {}
        self.added: Callable[[Sequence[Queue]], None] = lambda queues: None
        self.rows: set[str] = set()
        self.padded: dict[str, CostLine | None] = {}
        self._strangers = False
        self.untold: dict[str, float] = {}
        self._make, self._shards = make, shards
        self._look_at = -math.inf
        self._own: set[QueueName] = set()
        self._named_at: dict[QueueName, float] = {}
        self._looked: dict[str, float] = {}
        """Instant of each model's last look that all its shards answered."""
        self._registry_read = -math.inf
        self._former_losses = 0

    @property
    def losses(self) -> int:
        """Number of times that the server has lost a queue, including forgotten queues."""
        return self._former_losses + sum(queue.losses for queue in self.every)

    def know(self, models: Mapping[str, QueueLimits], strangers: bool = False) -> None:
        """Add queues of these models. Queues of their versions get the same bounds.

        If `strangers` is set, queues of all other models are added too from now on, while they hold data.
        """
        self._strangers |= strangers
        for model, limits in models.items():
            self.limits[model] = limits
            self.has(QueueName(model))
            self._bound(model)

    def count_rows(self, counted: Mapping[str, bool]) -> None:
        """Note for each model whether its entries have rows and shapes, which decide their weight and which ride together."""
        for model, counts in counted.items():
            if counts is not (model in self.rows):
                (self.rows.add if counts else self.rows.discard)(model)
                self._bound(model)

    def fill_up(self, lines: Mapping[str, CostLine]) -> None:
        """For models that pad, batch entries with others of similar weight."""
        for model in self.limits:
            line = lines.get(model)
            if is_news(line, self.padded.get(model)):
                self.padded[model] = line
                self._bound(model)

    def _bound(self, model: str) -> None:
        for queue in self.every:
            if queue.name.model == model:
                queue.limits = self._bounds(model)

    def _bounds(self, model: str) -> QueueLimits:
        limits = self.limits[model].filling_up(self.padded.get(model))
        return limits.counting_rows() if model in self.rows else limits

    def has(self, name: QueueName) -> bool:
        """Return True if queues of this name exist. If the name is another version of a known model, they are created."""
        if name not in self:
            self._add(name)
        return name in self

    def keep(self, names: Iterable[QueueName]) -> None:
        self._own.update(names)

    def learn(self, names: Iterable[QueueName]) -> None:
        """Add the queues of these names, or note that they were named again. Unknown models are ignored."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if self.has(name):
                self._named_at[name] = self._named_at[QueueName(name.model)] = now

    def learn_registry(self, names: Iterable[QueueName], models: Iterable[str]) -> None:
        """Add the queues that workers claim from, and the queues of models that may hold data."""
        self._registry_read = asyncio.get_running_loop().time()
        for model in models:
            if model not in self.limits and self._strangers:
                self.know({model: next(iter(self.limits.values()))})  # Any bounds do, as nobody enqueues for it here.
                self._look_at = -math.inf
            self.learn([QueueName(model)])
        self.learn(names)

    async def look(self, at_once: bool = False) -> None:
        """Add the queues that the servers list, if a look is due or must happen `at_once`. Some may be unknown to all processes."""
        now = asyncio.get_running_loop().time()
        if at_once or now >= self._look_at:
            self._look_at = now + LIST_QUEUES_EVERY
            await asyncio.gather(*(self._look_at_model(model, now) for model in list(self.limits)))

    async def _look_at_model(self, model: str, now: float) -> None:
        answers = await asyncio.gather(*map(_siblings, self[QueueName(model)]))
        listed = [answer for answer in answers if answer is not None]
        self.learn({name for names, _ in listed for name in names})
        until = max((until for _, until in listed), default=0.0)
        if until or len(listed) == len(answers):
            self.untold[model] = until
        if len(listed) == len(answers) and model in self.limits:
            self._looked[model] = now

    def forget(self) -> Sequence[Queue]:
        """Drop queues that weren't named for long, and return them."""
        self.learn([name for name in self if name not in self._named_at])
        names = [name for name in self if self._is_past(name)]
        gone = [queue for name in names for queue in self.pop(name)]
        for name in names:
            del self._named_at[name]
            if name == QueueName(name.model):
                del self.limits[name.model], self._looked[name.model]
                self.rows.discard(name.model)
                self.padded.pop(name.model, None)
        if gone:
            self.every[:] = [queue for queues in self.values() for queue in queues]
            self._former_losses += sum(queue.losses for queue in gone)
        return gone

    def _is_past(self, name: QueueName) -> bool:
        """Return True if a queue wasn't named for long, which a look must confirm, and the registry if it brought the model."""
        if name in self._own:
            return False
        looked = self._looked.get(name.model, -math.inf)
        if QueueName(name.model) not in self._own:
            looked = min(looked, self._registry_read)
        return looked - self._named_at[name] > FORGET_AFTER

    def beside(self, queue: Queue, name: QueueName) -> Queue:
        self.learn([name])
        return self[name][queue.shard]

    def _add(self, name: QueueName) -> None:
        if name.model in self.limits:
            limits = self._bounds(name.model)
            self[name] = made = [self._make(name, shard, limits) for shard in range(self._shards)]
            self.every += made
            self.added(made)


async def _siblings(queue: Queue) -> tuple[Sequence[QueueName], float] | None:
    """Return the queue names that a server lists, and the instant until which the list holds, or None without an answer."""
    with contextlib.suppress(BrokerUnavailable):
        return await queue.siblings()
    return None
