"""Shares of processes in the workers of a model: each computes its own from the same figures, and nobody deals them out.

No worker moves from one process to another, as that would cost a start: what is missing is added where there is most room,
and what is too much is removed where most are.
"""

from __future__ import annotations

from collections.abc import Mapping


def shares(desired: int, processes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Number of workers of each process; each keeps one at least, unless there should be none at all.

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
