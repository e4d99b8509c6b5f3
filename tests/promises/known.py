"""Ids and keys that clients use again."""

from collections import deque
from dataclasses import dataclass, replace

MOST_USES = 7
"""Times that an id or a key is used, so that its history can be judged."""


@dataclass(slots=True)
class Known:
    """An id or a key that may be used again, with what was asked first, and the version, model and parameters that were named."""

    name: str
    words: tuple[str, ...]
    key: str = ""
    wanted: str = ""
    model: str = ""
    parameters: str = ""
    uses: int = 1


def use(known: Known, among: deque[Known]) -> Known:
    """Use an id or key once more; one that was used often is not any more."""
    known.uses += 1
    if known.uses >= MOST_USES:
        among.remove(known)
    return replace(known)
