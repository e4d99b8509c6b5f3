"""Evidence from the service itself: ledger rows, counts, dead letters, keys in Redis, log lines, slots.

Plain data. Each kind has its rules in its own file. None means that the evidence was not collected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.promises.ways_in import text_of_codes


@dataclass(frozen=True, slots=True)
class Row:
    """A ledger row, with the names of its columns. `input` and `output` are None if the ledger doesn't store them."""

    tenant: str
    id: str
    status: str
    error: str = ""
    version: str = ""
    worker: str = ""
    requests: int = 1
    input: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. If it was listed but can't be shown, `input` is None and `refused` is the answer. An input with
    several rows is a list of rows. One with numbers is a list of octets, or an object with octets or rows."""

    tenant: str
    id: str
    input: str | Sequence[Any] | Mapping[str, Any] | None
    cause: str = ""
    attempts: int = 1
    refused: str = ""

    @property
    def texts(self) -> Sequence[str]:
        """Return its rows, or the input alone if it has none."""
        found: Any = self.input["codes"] if isinstance(self.input, Mapping) else self.input
        if found is None or isinstance(found, str):
            return [] if found is None else [found]
        rows = [found] if found and isinstance(found[0], int) else found
        return [row if isinstance(row, str) else text_of_codes(row) for row in rows]


@dataclass(frozen=True, slots=True)
class Key:
    """A key left in Redis: its name, type, elements or bytes, and time to live in seconds (-1: none)."""

    name: str
    type: str
    size: int
    ttl: float


@dataclass(frozen=True, slots=True)
class Line:
    """A warning or error in a process's log, at a time of the monotonic clock."""

    process: str
    at: float
    level: str
    event: str
    text: str = ""


class Slot(NamedTuple):
    """A slot in the registry: its place, its host, its function's process, its version and its model. A place is the
    slot itself, or the GPU that it shares. The default model has no name."""

    place: str
    host: str
    pid: int
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """The healthy slots at one look at the registry."""

    at: float
    healthy: Sequence[Slot]


@dataclass(slots=True)
class Evidence:
    """All evidence of a history: ledger rows, each gateway's request counts since its start, dead letters, keys left in
    Redis after all answers, warnings and errors in logs, and looks at the registry in order."""

    rows: list[Row] | None = None
    dropped: int = 0
    counted: dict[str, Mapping[str, int]] = field(default_factory=dict)
    letters: list[Letter] | None = None
    letters_counted: int | None = None
    keys: list[Key] | None = None
    lines: list[Line] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
