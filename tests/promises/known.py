"""Ids and keys that clients reuse."""

from collections import deque
from dataclasses import dataclass, replace

MOST_USES = 7
"""Maximum uses of an id or key, so that its history stays small enough to judge."""


@dataclass(slots=True)
class Known:
    """A reusable id or key, with its first request's input, version, model and parameters."""

    name: str
    words: tuple[str, ...]
    key: str = ""
    wanted: str = ""
    model: str = ""
    parameters: str = ""
    uses: int = 1


def use(known: Known, among: deque[Known]) -> Known:
    """Use an id or key once more. After MOST_USES it is not used again."""
    known.uses += 1
    if known.uses >= MOST_USES:
        among.remove(known)
    return replace(known)
