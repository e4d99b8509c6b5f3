"""Calls of a gateway to its broker: how the next one ends, and what they offered."""

from collections.abc import Callable

from headway.model import Entry
from tests.services.fleet import Fleet


def once(name: str, mode: str, times: int = 1) -> Callable[[str], str | None]:
    """The next call, or calls, of this name end like that."""
    left = [mode] * times
    return lambda called: left.pop() if called == name and left else None


def offered(fleet: Fleet, since: int = 0) -> list[Entry]:
    return [entry for _, _, entries in fleet.server.named("enqueue")[since:] for entry in entries]
