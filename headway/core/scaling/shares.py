"""Shares in numbers of workers: of processes in those of a model, and of models in the places of a process.

Each process computes its own share of a model's workers from the same figures, and nobody deals them out. No worker moves from one
process to another, as that would cost a start: what is missing is added where there is most room, and what is too much is removed
where most are.

Of several models that have the places of one process by turns, what is free is room for each. Where a model waits for a place, the
one with the most gives one up. Where each has only one, the first that nobody asks for gives its last: their rooms are smaller than
what they have.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def shares(desired: int, processes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the number of workers of each process; each keeps one at least, unless there should be none at all.

    Arguments:
        desired: workers that there should be together.
        processes: workers that each has and most that it can have, by its id.
    """
    if desired <= 0:
        return dict.fromkeys(processes, 0)
    has = {id: max(min(present, most), 1) for id, (present, most) in processes.items()}
    room = {id: max(most, 1) for id, (_, most) in processes.items()}
    missing = desired - sum(has.values())
    for _ in range(missing):
        open_ = [id for id in has if has[id] < room[id]]
        if not open_:
            break
        has[min(open_, key=lambda id: (has[id] / room[id], id))] += 1
    for _ in range(-missing):
        spare = [id for id in has if has[id] > 1]
        if not spare:
            break
        has[max(spare, key=lambda id: (has[id] / room[id], id))] -= 1
    return has


class Holding(msgspec.Struct, frozen=True):
    """Places of one model: how many it has, how many it wants, and most that it may have."""

    has: int
    wants: int
    most: int


def rooms(holdings: Mapping[str, Holding], free: int, coming: int) -> dict[str, int]:
    """Return the most workers that each model may want.

    Arguments:
        holdings: places of each model.
        free: places that are free.
        coming: places that are being given up, and are not free yet.
    """
    found = {model: min(max(one.has + free, one.wants), one.most) for model, one in holdings.items()}
    waited_for = sum(max(one.wants - one.has, 0) for one in holdings.values()) - coming - free
    givers = {model: one.has for model, one in holdings.items() if one.has and one.wants <= one.has}
    if waited_for <= 0 or not givers:
        return found
    largest = max(givers, key=lambda model: givers[model])
    giving = [largest] if givers[largest] > 1 else givers
    return found | {model: givers[model] - 1 for model in giving}
