"""Shares of inputs in the tokens that a remote API tells for all of them together."""

from __future__ import annotations

from collections.abc import Sequence


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Cut a number of tokens into parts that add up to it, in proportion to the weights; even parts where these are all 0."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts, before, done = [], 0, 0
    for weight in weights:  # Each begins where the one before it ends, so that none is lost to rounding.
        before += weight
        end = total * before // whole
        parts.append(end - done)
        done = end
    return parts
