"""Offers of entries: each to its queue, and on to another queue of its model where it has something in common with others.

An idempotency key, a task and an id that a client has chosen belong to the model. So a queue that is offered one looks
whether the queue of another version or zone of the model knows it, in the same step, and names that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headway.brokers.redis.shard_queue import Moved, Queue, Verdict
from headway.brokers.redis.shard_router import ShardRouter
from headway.brokers.redis.together import all_of
from headway.core import failures
from headway.model import DedupKind, Entry, Failure, QueueName

MOVES = 4
"""Most queues that an entry is offered to: what it has in common may end, and begin elsewhere, on its way there."""


async def offer(
    entries: Sequence[Entry], router: ShardRouter, beside: Callable[[Queue, QueueName], Queue]
) -> list[Failure | None]:
    """Offer entries whose queues there are. Returns the verdicts in order, None for an admitted one.

    Arguments:
        entries: entries to offer.
        router: router that deals them out.
        beside: returns the queue of another name in the same shard.
    """
    await router.count()
    result: list[Failure | None] = [None] * len(entries)
    dealt, offered = router.deal(entries), list(entries)
    if not dealt or dealt.count(dealt[0]) < len(dealt):
        answers = await _verdicts(offered, dict(enumerate(dealt)))
    else:
        verdicts = await dealt[0].enqueue(entries)
        if verdicts.count(None) == len(verdicts):  # Mostly.
            return result
        answers = [(position, dealt[0], verdict) for position, verdict in enumerate(verdicts)]
    for turn in range(MOVES):
        moved: dict[int, Queue] = {}
        for position, queue, verdict in answers:
            if isinstance(verdict, Moved):
                moved[position] = beside(queue, verdict.queue)
                offered[position] = _without_identical(entries[position])
                router.place(entries[position], moved[position])
            else:
                result[position] = verdict
        if not moved or turn == MOVES - 1:
            break
        answers = await _verdicts(offered, moved)
    for position in moved:
        result[position] = failures.conflict()
    refused = [entry for entry, verdict in zip(entries, result, strict=True) if verdict is not None]
    router.forget((entry.tenant, entry.id) for entry in refused)
    return result


def _without_identical(entry: Entry) -> Entry:
    """The entry without what it has in common with identical requests: they get the answers of one queue."""
    kept = tuple(dedup_key for dedup_key in entry.dedup_keys if dedup_key.kind is not DedupKind.SAME)
    return replace(entry, dedup_keys=kept)


async def _verdicts(entries: Sequence[Entry], queues: dict[int, Queue]) -> list[tuple[int, Queue, Verdict]]:
    """Verdicts of the queues to which these positions are offered."""
    groups: dict[Queue, list[int]] = {}
    for position, queue in queues.items():
        groups.setdefault(queue, []).append(position)
    calls = (queue.enqueue([entries[position] for position in positions]) for queue, positions in groups.items())
    answers = [await next(calls)] if len(groups) == 1 else await all_of(*calls)
    return [
        (position, queue, verdict)
        for (queue, positions), answer in zip(groups.items(), answers, strict=True)
        for position, verdict in zip(positions, answer, strict=True)
    ]
