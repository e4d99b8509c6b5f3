"""Room of each of several models that have the places of one process by turns: the most workers that it may want now.

What is free is room for each of them. Where a model waits for a place, the one with the most gives one up. Where each has
only one, the first that nobody asks for gives its last: their rooms are smaller than what they have.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Holding(msgspec.Struct, frozen=True):
    """Places of one model: how many it has, how many it wants, and most that it may have."""

    has: int
    wants: int
    most: int


def rooms(holdings: Mapping[str, Holding], free: int, coming: int) -> dict[str, int]:
    """Most workers that each model may want.

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
