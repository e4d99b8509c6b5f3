"""Shares in workers: how many of a model's workers each process has, and how many of a process's places each model has.

Each process computes its own share of a model's workers from the same figures, without a coordinator. As moving a worker would cost
a start, missing workers are added where there is most room, and surplus ones are removed where most are.

If models take turns in one process's places, free places are room for each of them. If a model waits for a place, the model with
most workers gives one up. If each has only one, all that nobody asks for give up their last."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def shares(desired: int, processes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the number of workers of each process, `desired` in all. Each gets at least one, unless `desired` is 0. `processes`
    has the workers of each and its limit."""
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
    """Places of one model in a process: how many it has and wants, and its limit."""

    has: int
    wants: int
    most: int


def rooms(holdings: Mapping[str, Holding], free: int, coming: int) -> dict[str, int]:
    """Return the largest number of workers that each model may want. `coming` places are being given up, and not free yet."""
    largest_wanted = {
        model: min(max(holding.has + free, holding.wants), holding.most) for model, holding in holdings.items()
    }
    waited_for = sum(max(holding.wants - holding.has, 0) for holding in holdings.values()) - coming - free
    givers = {model: holding.has for model, holding in holdings.items() if 0 < holding.has >= holding.wants}
    if waited_for <= 0 or not givers:
        return largest_wanted
    largest = max(givers, key=lambda model: givers[model])
    giving = [largest] if givers[largest] > 1 else givers
    return largest_wanted | {model: givers[model] - 1 for model in giving}
