"""Table of the queues of one process: by name one for each shard, and made when a name is first heard of.

A name is heard of from workers, from entries, and from the server, which lists the queues in which something may be known.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from headway.brokers.redis.shard_queue import Queue
from headway.core.queue_limits import QueueLimits
from headway.errors import BrokerUnavailable
from headway.model import in_zone, model_and_version, name_and_zone, queue_name

LOOK_EVERY = 10.0
"""Seconds between two looks at what the server lists."""

MakeQueue = Callable[[str, int, QueueLimits], Queue]
"""Function that makes a queue, of its name, its shard and its bounds."""


class QueueTable(dict[str, list[Queue]]):
    """Queues of one process by name, see `headway.model.in_zone`; of each name one for each shard.

    Arguments:
        make: makes a queue.
        shards: queues that each model is split into.
        zone: zone of the process; empty for none.

    Attributes:
        every: all queues.
        limits: bounds of the queues of each model.
        added: hears of queues that are made.
        zone: zone of the process.
        zones: whether there is a queue in a zone.
    """

    def __init__(self, make: MakeQueue, shards: int, zone: str) -> None:
        super().__init__()
        self.every: list[Queue] = []
        self.limits: dict[str, QueueLimits] = {}
        self.added: Callable[[Sequence[Queue]], None] = lambda queues: None
        self.zone = zone
        self.zones = bool(zone)
        self._make, self._shards = make, shards
        self._look_at = -math.inf

    def know(self, models: Mapping[str, QueueLimits]) -> None:
        """Have queues for each of these models. The queues of its versions and in zones have its bounds."""
        for model, limits in models.items():
            self.limits[model] = limits
            self.has(model)
            for name in self:
                if model_and_version(name)[0] == model:
                    for queue in self[name]:
                        queue.limits = limits

    def has(self, name: str) -> bool:
        """Whether there are queues of a name, without a zone. Those of a version of a known model are made, also in the zone."""
        if name in self:
            return True
        self._add(name)
        if self.zone:
            self._add(in_zone(name, self.zone))
        return name in self

    def learn(self, names: Iterable[str]) -> None:
        """Have queues of these names, in whatever zones; those of models that are not known are left out."""
        for name in names:
            plain, zone = name_and_zone(name)
            if self.has(plain) and zone and name not in self:
                self._add(name)

    async def look(self) -> None:
        """Have the queues that the server lists, when a look at them is due: what was there before all processes began is found.

        Of a server that does not answer they are learnt at the next look.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            await asyncio.gather(*(self._look_beside(queue) for model in self.limits for queue in self[model]))

    async def _look_beside(self, queue: Queue) -> None:
        with contextlib.suppress(BrokerUnavailable):
            self.learn(await queue.siblings())

    def own(self, name: str) -> list[Queue]:
        """Queues of a name in the zone of the process."""
        return self[in_zone(name, self.zone) if self.zone else name]

    @property
    def in_own_zone(self) -> list[str]:
        """Names of the queues in the zone of the process; none where it has no zone."""
        return [name for name in self if name_and_zone(name)[1] == self.zone] if self.zone else []

    def everywhere(self, name: str) -> list[Queue]:
        """Queues of a name in all zones; those of the process's zone come first."""
        own = self.own(name)
        if not self.zones:
            return own
        others = (queue for other in self if name_and_zone(other)[0] == name for queue in self[other])
        return [*own, *(queue for queue in others if queue.zone != self.zone)]

    def beside(self, queue: Queue, version: str, zone: str) -> Queue:
        """Queue of another version or zone, of the same model and shard."""
        name = in_zone(queue_name(queue.model, version), zone)
        self.learn([name])
        return self[name][queue.shard]

    def _add(self, name: str) -> None:
        limits = self.limits.get(model_and_version(name)[0])
        if limits is not None:
            self[name] = made = [self._make(name, shard, limits) for shard in range(self._shards)]
            self.every += made
            self.zones = self.zones or any(queue.zone for queue in made)
            self.added(made)
