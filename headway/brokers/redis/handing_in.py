"""The outcomes of a lease on their way into the server: in several steps where there is much, small outputs first."""

from __future__ import annotations

from collections.abc import Sequence

from headway.brokers.redis.completion import fitting, pack, parts
from headway.brokers.redis.shard_queue import Queue
from headway.model import Completion, ItemResult, Lease


async def hand_in(
    queue: Queue, fence: int, lease: Lease, items: Sequence[ItemResult], waited: Sequence[float]
) -> Completion:
    """End a lease with outputs. Large ones go last, stored apart where nobody else can ask for them later.

    Arguments:
        queue: queue of the lease.
        fence: number of the lease in that queue.
        lease: the lease.
        items: what came of each of its entries.
        waited: seconds that each of them waited.

    Raises:
        BrokerUnavailable: no answer in time; some of it may have been told.
    """
    items, delivered = fitting(lease.entries, items), 0
    large = queue.large_outputs(items)
    lonely = {position for position in large if not lease.entries[position].dedup_keys}
    *ahead, last = parts(items, large)
    for positions in ahead:
        apart = await queue.bring_outputs(items, [one for one in positions if one in lonely])
        answered = await queue.deliver(fence, pack(lease, items, waited, positions, apart))
        if answered is None:
            last = []  # The lease has ended, as the completion will say.
            break
        delivered += answered
    apart = await queue.bring_outputs(items, [one for one in last if one in lonely])
    settled = await queue.complete(fence, pack(lease, items, waited, last, apart))
    if delivered:
        departed = max(settled.departed - delivered, 0)
        settled = Completion(settled.answered + delivered, departed, settled.fenced)
    return settled
