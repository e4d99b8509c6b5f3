"""End of a request whose inputs are submitted one by one, for those who count requests and not inputs."""

from __future__ import annotations


class SeveralInputs:
    """Request with several inputs, of which each is submitted, and ends, by itself.

    Arguments:
        id: id of the request.
        count: number of its inputs.
    """

    __slots__ = ("_missing", "count", "id")

    def __init__(self, id: str, count: int) -> None:
        self.id, self.count = id, count
        self._missing = count

    def ends(self, failed: bool) -> bool:
        """Note that an input has its outcome. True, once, when the request ends with it: the first failure or the last output."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended
