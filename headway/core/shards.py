"""One queue in several: how many shards, which is home to whom, and which is offered to.

A model's queue can be cut into shards that share nothing, so that several servers carry it. Each has the slots whose
home it is, and spaces its departures for them. An entry goes into one shard and stays there. The three rules are pure,
so gateways and batchers that know the same workers agree without asking one another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def active(shards: int, slots: int) -> int:
    """How many of the shards are in use: never more than there are slots to serve them, and at least one.

    Arguments:
        shards: how many there are, at least 1.
        slots: live GPUs of the model.
    """
    return max(1, min(shards, slots))


def home(worker: str, workers: Sequence[str], active: int) -> int:
    """The shard that a worker claims from first: its rank among all, dealt out in turn.

    Ranks are dealt rather than ids hashed because no shard may get two slots less than another. One that is not among
    the workers (it has not been seen yet) gets the home that it will have.

    Arguments:
        worker: whose home.
        workers: ids of the live workers, in any order.
        active: shards in use.
    """
    return bisect_left(sorted(workers), worker) % active


def slots_at(shard: int, slots: int, active: int) -> int:
    """How many of the live slots are at home in a shard; 0 for one that is not in use."""
    return -(-(slots - shard) // active) if shard < min(active, slots) else 0


def choose(depths: Sequence[float], dice: Callable[[], float]) -> int:
    """The shard to offer to: of two drawn at random, the one with less in it.

    Two choices instead of one take the longest queue from log n/log log n down to log log n (Mitzenmacher, "The power
    of two choices in randomized load balancing", IEEE Trans. Parallel and Distributed Systems 12, 2001). The shortest
    of all would be worse: depths are known late, and everybody would run after the same one until the news is out
    (Mitzenmacher, "How useful is old information?", the same, 11, 2000).

    Arguments:
        depths: for each shard in use, the last known entries waiting for each slot at home there; at least one.
        dice: uniform in [0, 1).
    """
    count = len(depths)
    if count == 1:
        return 0
    first = int(dice() * count)
    second = int(dice() * (count - 1))
    second += second >= first
    return second if depths[second] < depths[first] else first
