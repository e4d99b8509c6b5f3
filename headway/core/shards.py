"""Shards: one queue in several parts. How many are in use, to which one a slot belongs, and which one gets an entry.

A model's queue can be cut into shards that share nothing, so that several servers can carry it. Each slot has a home shard, which
spaces its departures. An entry goes into one shard and stays there. The rules are pure functions, so gateways and batchers that know
the same workers agree without communicating. With only m home slots, a shard's latency reaches α(1 + 1/m).

Entries are dealt out in turn. The usual choice, the emptier of two (Mitzenmacher, "The power of two choices in randomized load
balancing", IEEE Trans. Parallel and Distributed Systems 12, 2001), is no better here even with current depths: work leaves in
batches, so a depth only shows how long ago the last one left. Depths that are 20 ms old send entries to shards about to overflow
("How useful is old information?", the same, 11, 2000).

A depth above a full batch does mean something: the shard's slots have fallen behind, and other shards' slots help, which is work
stealing with a threshold (Eager, Lazowska and Zahorjan, "A comparison of receiver-initiated and sender-initiated adaptive load
sharing", Performance Evaluation 6, 1986)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from headway.core.departure import Load
from headway.core.slot_factors import FACTORS, USUAL, paces

SLOTS_EACH = 4  # Fewest home slots of each shard, if there are several. So sharding costs at most a quarter of α.
BEHIND = 1.5  # Full batches that wait in a shard that is behind. With fewer, a helping slot is missed at home.
LOOK_ELSEWHERE_EVERY = 0.05  # Seconds between two looks of an idle slot at other shards. The first is immediate.
PART = 0.25  # Share of a full batch that one call puts into a shard. If larger, batches get uneven; if smaller, calls multiply.


def active(shards: int, slots: int) -> int:
    """Return how many of `shards` are in use. If several are, each has at least SLOTS_EACH of the live slots."""
    return max(1, min(shards, slots // SLOTS_EACH))


def home(worker: str, workers: Sequence[str], active: int) -> int:
    """Return the shard that a worker claims from first. The sorted ids of all live workers are dealt out to the shards in turn, so
    that they differ by one slot at most, which hashing wouldn't ensure. For a worker not yet among them, return its future home."""
    return bisect_left(sorted(workers), worker) % active


def slots_at(shard: int, slots: int, active: int) -> int:
    """Return the number of a shard's live home slots, or 0 if the shard isn't in use."""
    return -(-(slots - shard) // active) if shard < min(active, slots) else 0


def in_turn(turn: int, slots: int, active: int) -> int:
    """Return the shard that gets the next entries. Each shard is chosen in proportion to its slots. `turn` may start at any
    number, and increases by one with each call that the gateway makes."""
    return turn % slots % active if slots else 0


def of_tenant(tenant: str, active: int) -> int:
    """Return the shard for a tenant's entries that share something: limits, keys, tasks, or identical requests. When a shard is
    added or removed, as few tenants as possible move (Lamping and Veach, "A fast, minimal memory, consistent hash algorithm",
    2014)."""
    hashed = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).digest()
    state, shard, following = int.from_bytes(hashed[:8]), 0, 0
    while following < active:
        shard = following
        state = (state * 2862933555777941757 + 1) % 2**64
        following = int((shard + 1) * (2**31 / ((state >> 33) + 1)))
    return shard


def part(max_batch: int) -> int:
    """Return the largest number of entries of a group that go into one shard together."""
    return max(1, int(max_batch * PART))


def parts(count: int, max_batch: int) -> int:
    """Return how many parts a group is cut into. They are equal, because with full parts and a smaller last part, some shards
    would get all the small parts."""
    return -(-count // part(max_batch))


def behind(depth: int, slots: int, max_batch: int) -> bool:
    """Return True if too much waits in a shard, or if anything waits in a shard without slots. Slots of other shards may then
    claim from it when its rule allows."""
    return depth >= (BEHIND * max_batch if slots else 1)


def load_of(loads: Sequence[Load]) -> Load:
    """Return the load of a queue in several shards. Loads are added up. Costs are from the shard with most batches."""
    slots = sum(load.slots for load in loads)
    counts = [sum(load.paces[position] for load in loads if load.paces) for position in range(len(FACTORS))]
    counts[USUAL] = 0  # Usual slots are not counted.
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
