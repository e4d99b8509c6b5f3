"""The outcomes of a lease on their way into the server: in several steps where there is much, small outputs first."""

from __future__ import annotations

from collections.abc import Sequence

from headway.brokers.redis.completion import fitting, pack, parts
from headway.brokers.redis.shard_queue import Queue
from headway.model import Completion, ItemResult, Lease


async def hand_in(
    queue: Queue, fence: int, lease: Lease, items: Sequence[ItemResult], waited: Sequence[float]
) -> Completion:
    """End a lease with outputs. Large ones go last, and are stored apart.

    Arguments:
        queue: queue of the lease.
        fence: number of the lease in that queue.
        lease: the lease.
        items: what came of each of its entries.
        waited: seconds that each of them waited.

    Raises:
        BrokerUnavailable: no answer in time; some of it may have been told.
    """
    large, delivered = queue.large_outputs(items), 0
    storable = set(large)
    items = fitting(lease.entries, items, storable)
    *ahead, last = parts(items, large)
    for positions in ahead:
        items, apart = await _bring(queue, lease, items, positions, storable)
        answered = await queue.deliver(fence, pack(lease, items, waited, positions, apart))
        if answered is None:
            last = []  # The lease has ended, as the completion will say.
            break
        delivered += answered
    items, apart = await _bring(queue, lease, items, last, storable)
    settled = await queue.complete(fence, pack(lease, items, waited, last, apart))
    if delivered:
        departed = max(settled.departed - delivered, 0)
        settled = Completion(settled.answered + delivered, departed, settled.fenced)
    return settled


async def _bring(
    queue: Queue, lease: Lease, items: Sequence[ItemResult], positions: Sequence[int], storable: set[int]
) -> tuple[Sequence[ItemResult], dict[int, str]]:
    """Store apart the outputs of some entries. Returns the items, and kind and token of each output that is stored, by position.

    An output that the server has no room for goes in its reply, if that has, and is no longer `storable`.
    """
    wanted = [position for position in positions if position in storable] if storable else []
    apart = await queue.bring_outputs(lease, items, wanted)
    if len(apart) < len(wanted):
        storable.difference_update(position for position in wanted if position not in apart)
        items = fitting(lease.entries, items, storable)
    return items, apart
