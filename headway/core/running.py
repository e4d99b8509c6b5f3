"""Batches that run on the GPUs: the size of each, and the share of the GPUs that they keep busy."""

from __future__ import annotations

from math import exp

BUSY_TIME = 5.0
"""Time constant of the busy share, in seconds."""


class RunningBatches:
    """Batches that have left and not come back.

    Attributes:
        utilisation: busy share of the slots over the last seconds, 0 to 1, as of the last call.
    """

    __slots__ = ("_since", "_sizes", "utilisation")

    def __init__(self) -> None:
        self.utilisation = 0.0
        self._sizes: list[float] = []
        self._since = 0.0

    @property
    def busy(self) -> int:
        """Number of GPUs that run one."""
        return len(self._sizes)

    @property
    def largest(self) -> float:
        """Size of the largest batch; 0 when none runs."""
        return max(self._sizes, default=0.0)

    @property
    def size(self) -> float:
        """Size of all batches that run."""
        return sum(self._sizes)

    def left(self, size: float, slots: int, now: float) -> None:
        """Note that a batch has left.

        Arguments:
            size: size of the batch.
            slots: number of live slots.
            now: the instant.
        """
        self._note(slots, now)
        self._sizes.append(size)

    def back(self, size: float, slots: int, now: float) -> None:
        """Note that a batch of this size has come back."""
        self._note(slots, now)
        self._sizes.remove(size)

    def _note(self, slots: int, now: float) -> None:
        share = min(1.0, len(self._sizes) / slots) if slots else 0.0
        weight = 1.0 - exp(-max(0.0, now - self._since) / BUSY_TIME)
        self.utilisation += (share - self.utilisation) * weight
        self._since = now
