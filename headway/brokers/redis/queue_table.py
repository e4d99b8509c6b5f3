"""Table of the queues of one process: by name one for each shard, made when a name is first heard of, and forgotten again.

A name is heard of from workers, from entries, and from the server, which lists the queues in which something may be known.
Each time that a worker or the server's list names a queue is a sign of it. A queue is forgotten once there was no sign for
a while, but for those of the models and slots of the process itself.
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
"""Seconds between two looks at what the server lists."""
FORGET_AFTER = 120.0
"""Seconds without a sign of a queue after which it is forgotten. A server that has lost its state lists nothing meanwhile."""

MakeQueue = Callable[[QueueName, int, QueueLimits], Queue]
"""Function that makes a queue, of its name, its shard and its bounds."""


class QueueTable(dict[QueueName, list[Queue]]):
    """Queues of one process by name; of each name one for each shard.

    Arguments:
        make: makes a queue.
        shards: queues that each model is split into.

    Attributes:
        every: all queues.
        limits: bounds of the queues of each model.
        added: hears of queues that are made.
        losses: number of times that the server has lost a queue.
        rows: models whose entries have rows or shapes; see `core.rows.counted`.
        untold: until when something may be known in the queues of each model, of which the fleet is still to be told.
    """

    def __init__(self, make: MakeQueue, shards: int) -> None:
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
        """Names that are never forgotten."""
        self._signs: dict[QueueName, float] = {}
        """Instant of the last sign of each queue."""
        self._looked: dict[str, float] = {}
        """Instant of the last look at each model that all of its shards have answered."""
        self._registry_read = -math.inf
        self._former_losses = 0

    @property
    def losses(self) -> int:
        """See QueueTable; those of forgotten queues count, too."""
        return self._former_losses + sum(queue.losses for queue in self.every)

    def know(self, models: Mapping[str, QueueLimits], strangers: bool = False) -> None:
        """Have queues for each of these models. The queues of its versions have its bounds.

        `strangers`: from now on also of models that nobody has told this process of, while they hold something.
        """
        self._strangers |= strangers
        for model, limits in models.items():
            self.limits[model] = limits
            self.has(QueueName(model))
            self._bound(model)

    def count_rows(self, counted: Mapping[str, bool]) -> None:
        """Have entries of these models ride only with those of their shape and weigh what they say, or no longer."""
        for model, counts in counted.items():
            if counts is not (model in self.rows):
                (self.rows.add if counts else self.rows.discard)(model)
                self._bound(model)

    def fill_up(self, lines: Mapping[str, CostLine]) -> None:
        """Have the entries of these models, which pad, ride with others of like weight; those of no other model."""
        for model in self.limits:
            line = lines.get(model)
            if is_news(line, self.padded.get(model)):
                self.padded[model] = line
                self._bound(model)

    def _bound(self, model: str) -> None:
        """Set the bounds of the queues of a model, as far as it is known."""
        for queue in self.every:
            if queue.name.model == model:
                queue.limits = self._bounds(model)

    def _bounds(self, model: str) -> QueueLimits:
        limits = self.limits[model].filling_up(self.padded.get(model))
        return limits.counting_rows() if model in self.rows else limits

    def has(self, name: QueueName) -> bool:
        """Whether there are queues of a name. Those of a version of a known model are made."""
        if name not in self:
            self._add(name)
        return name in self

    def keep(self, names: Iterable[QueueName]) -> None:
        """Never forget the queues of these names."""
        self._own.update(names)

    def learn(self, names: Iterable[QueueName]) -> None:
        """Take note of a sign of each of these names, and have their queues.

        Names of models that are not known are left out.
        """
        now = asyncio.get_running_loop().time()
        for name in names:
            if self.has(name):
                self._signs[name] = self._signs[QueueName(name.model)] = now

    def learn_registry(self, names: Iterable[QueueName], models: Iterable[str]) -> None:
        """Have the queues that workers claim from, and those of models in which something may be known.

        A stranger among them has the bounds of the first model; nobody enqueues for it here.
        """
        self._registry_read = asyncio.get_running_loop().time()
        for model in models:
            if model not in self.limits and self._strangers:
                self.know({model: next(iter(self.limits.values()))})
                self._look_at = -math.inf
            self.learn([QueueName(model)])
        self.learn(names)

    async def look(self, at_once: bool = False) -> None:
        """Have the queues that the server lists, when a look at them is due: what was there before all processes began is found.

        Of a server that does not answer they are learnt at the next look. `at_once`: a look is due now.
        """
        now = asyncio.get_running_loop().time()
        if at_once or now >= self._look_at:
            self._look_at = now + LIST_QUEUES_EVERY
            await asyncio.gather(*(self._look_at_model(model, now) for model in list(self.limits)))

    async def _look_at_model(self, model: str, now: float) -> None:
        """Learn the queues that the shards of a model list."""
        answers = await asyncio.gather(*map(_siblings, self[QueueName(model)]))
        found = [answer for answer in answers if answer is not None]
        self.learn({name for names, _ in found for name in names})
        until = max((until for _, until in found), default=0.0)
        if until or len(found) == len(answers):
            self.untold[model] = until
        if len(found) == len(answers) and model in self.limits:
            self._looked[model] = now

    def forget(self) -> Sequence[Queue]:
        """Forget the queues of which there was no sign for long. Returns them."""
        self.learn([name for name in self if name not in self._signs])
        names = [name for name in self if self._is_past(name)]
        gone = [queue for name in names for queue in self.pop(name)]
        for name in names:
            del self._signs[name]
            if name == QueueName(name.model):
                del self.limits[name.model], self._looked[name.model]
                self.rows.discard(name.model)
                self.padded.pop(name.model, None)
        if gone:
            self.every[:] = [queue for queues in self.values() for queue in queues]
            self._former_losses += sum(queue.losses for queue in gone)
        return gone

    def _is_past(self, name: QueueName) -> bool:
        """Whether there was no sign of a queue for long, as a look has shown and, of a learnt model, the registry too."""
        if name in self._own:
            return False
        looked = self._looked.get(name.model, -math.inf)
        if QueueName(name.model) not in self._own:
            looked = min(looked, self._registry_read)
        return looked - self._signs[name] > FORGET_AFTER

    def beside(self, queue: Queue, name: QueueName) -> Queue:
        """Queue of another name in the same shard."""
        self.learn([name])
        return self[name][queue.shard]

    def _add(self, name: QueueName) -> None:
        if name.model in self.limits:
            limits = self._bounds(name.model)
            self[name] = made = [self._make(name, shard, limits) for shard in range(self._shards)]
            self.every += made
            self.added(made)


async def _siblings(queue: Queue) -> tuple[Sequence[QueueName], float] | None:
    """Queues that the server of one lists, and until when; None without an answer."""
    with contextlib.suppress(BrokerUnavailable):
        return await queue.siblings()
    return None
