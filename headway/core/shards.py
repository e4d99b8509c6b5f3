"""Shards, one queue in several: how many are in use, which slots are at home where, and which shard gets an entry.

A model's queue can be cut into shards that share nothing, so that several servers carry it. Each has the slots whose
home it is, and spaces its departures for them; an entry goes into one shard and stays there. The rules are pure, so
gateways and batchers that know the same workers agree without asking one another.

What a shard costs is the gap of fewer slots: with m at home, latency reaches to α(1 + 1/m). Hence SLOTS_EACH.

Entries are dealt out in turn. To take the emptier of two, as servers are usually chosen (Mitzenmacher, "The power of
two choices in randomized load balancing", IEEE Trans. Parallel and Distributed Systems 12, 2001), is no better here
even where depths are known at once. Where work leaves in batches, a depth tells how long ago the last one left; known
20 ms late, it sends entries to shards that are about to overflow ("How useful is old information?", the same, 11,
2000).

Depth says something only above a full batch. That much a shard has when its slots fail it, and then others' slots help:
work stealing with a threshold (Eager, Lazowska and Zahorjan, "A comparison of receiver-initiated and sender-initiated
adaptive load sharing", Performance Evaluation 6, 1986).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from headway.core.departure import Load
from headway.core.slot_factors import FACTORS, USUAL, paces

SLOTS_EACH = 4
"""Least slots at home in each shard, while there is more than one. The cut then costs at most a quarter of α."""
BEHIND = 1.5
"""Full batches waiting, from which a shard is behind.

At even spacing a slot comes free just when its home needs it, so a slot that helps where it is not needed is missed at
home.
"""
LOOK_ELSEWHERE_EVERY = 0.05
"""Seconds between two looks of an idle slot at shards where it is not at home.

The first look comes at once: near saturation no rest lasts as long as this.
"""
PART = 0.25
"""Share of a full batch that one call puts into one shard: more makes batches lumpy, less makes more calls."""


def active(shards: int, slots: int) -> int:
    """Return the number of shards in use: as many as have SLOTS_EACH slots, and at least one.

    Arguments:
        shards: number of shards, at least 1.
        slots: live GPUs of the model.
    """
    return max(1, min(shards, slots // SLOTS_EACH))


def home(worker: str, workers: Sequence[str], active: int) -> int:
    """Return the shard that a worker claims from first: its rank among all, dealt out in turn.

    Ranks are dealt rather than ids hashed so that no shard gets two slots less than another. A worker that is not among
    the workers (it has not been seen yet) gets the home that it will have.

    Arguments:
        worker: id of the worker.
        workers: ids of the live workers, in any order.
        active: shards in use.
    """
    return bisect_left(sorted(workers), worker) % active


def slots_at(shard: int, slots: int, active: int) -> int:
    """Return the number of live slots at home in a shard; 0 for a shard that is not in use."""
    return -(-(slots - shard) // active) if shard < min(active, slots) else 0


def in_turn(turn: int, slots: int, active: int) -> int:
    """Return the shard to offer to: the home of the next slot, so that each shard gets its slots' share.

    Arguments:
        turn: number that grows by one with each call of a gateway; gateways begin anywhere.
        slots: live GPUs of the model.
        active: shards in use.
    """
    return turn % slots % active if slots else 0


def of_tenant(tenant: str, active: int) -> int:
    """Return the shard of all entries of a tenant that have something in common: limits, keys, tasks, identical requests.

    One shard more or less moves as few tenants as can be (Lamping and Veach, "A fast, minimal memory, consistent hash
    algorithm", 2014). What those had in common begins anew in the other shard.

    Arguments:
        tenant: name of the tenant.
        active: shards in use.
    """
    hashed = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).digest()
    state, shard, following = int.from_bytes(hashed[:8]), 0, 0
    while following < active:
        shard = following
        state = (state * 2862933555777941757 + 1) % 2**64
        following = int((shard + 1) * (2**31 / ((state >> 33) + 1)))
    return shard


def part(max_batch: int) -> int:
    """Return the most entries of a group that go into one shard together."""
    return max(1, int(max_batch * PART))


def parts(count: int, max_batch: int) -> int:
    """Return the number of parts, alike in size, into which a group of `count` entries is cut.

    Each goes to the next shard in turn.

    A full part and a rest would not do: with an even number of shards, the rests would all go to the same ones.
    """
    return -(-count // part(max_batch))


def behind(depth: int, slots: int, max_batch: int) -> bool:
    """Return True if slots that are at home elsewhere may claim from a shard, when its rule says go.

    Arguments:
        depth: entries waiting in the shard.
        slots: slots at home in it; a shard without any lives on help.
        max_batch: most entries in a batch.
    """
    return depth >= (BEHIND * max_batch if slots else 1)


def load_of(loads: Sequence[Load]) -> Load:
    """Return the load of a queue in several shards: their sums, and the costs of the shard that has seen most batches, or the largest."""
    slots = sum(load.slots for load in loads)
    counts = [sum(load.paces[position] for load in loads if load.paces) for position in range(len(FACTORS))]
    counts[USUAL] = 0  # Where all are alike they are not counted.
    known = max(loads, key=lambda load: (load.departures, load.largest))
    rate = sum(load.rate for load in loads)
    return Load(
        rate=rate,
        alpha=known.alpha,
        beta=known.beta,
        slots=slots,
        max_batch=known.max_batch,
        depth=sum(load.depth for load in loads),
        utilisation=known.utilisation,
        wait=max(load.wait for load in loads),
        departures=sum(load.departures for load in loads),
        deviation=known.deviation,
        largest=known.largest,
        entry_size=sum(load.size_rate for load in loads) / rate if rate else 1.0,
        paces=paces(counts, slots),
    )
