"""Evidence that the service itself gives of a history: rows of its ledger, its counts, dead letters, keys in Redis, log lines, slots.

Plain data. Each kind has its laws in a file of its own; None stands for evidence that nobody has collected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.promises.ways_in import text_of_codes


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the ledger, with the columns' names. `input` and `output` are None where the ledger does not keep them."""

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
    """One dead letter; the input of one that is listed and cannot be shown is None, and `refused` says what came instead.

    An input of several rows is a list of them. One of numbers is a list of octets, or an object that has such, or of rows.
    """

    tenant: str
    id: str
    input: str | Sequence[Any] | Mapping[str, Any] | None
    cause: str = ""
    attempts: int = 1
    refused: str = ""

    @property
    def texts(self) -> Sequence[str]:
        """Its rows; the input alone where it has none."""
        found: Any = self.input["codes"] if isinstance(self.input, Mapping) else self.input
        if found is None or isinstance(found, str):
            return [] if found is None else [found]
        rows = [found] if found and isinstance(found[0], int) else found
        return [row if isinstance(row, str) else text_of_codes(row) for row in rows]


@dataclass(frozen=True, slots=True)
class Key:
    """One key that is left in Redis: its name, its type, its elements or bytes, and seconds until its end; -1: none."""

    name: str
    type: str
    size: int
    ttl: float


@dataclass(frozen=True, slots=True)
class Line:
    """One warning or error in the log of a process, at an instant of the monotonic clock."""

    process: str
    at: float
    level: str
    event: str
    text: str = ""


class Slot(NamedTuple):
    """One slot of the registry: its place, its host, the process that runs its function, and what it runs where.

    A place is the slot itself, or the GPU that it shares with others. The default model has no name.
    """

    place: str
    host: str
    pid: int
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """One look at the registry: the slots that were healthy then."""

    at: float
    healthy: Sequence[Slot]


@dataclass(slots=True)
class Evidence:
    """All evidence of a history: the ledger's rows, requests that each gateway has counted since it started, dead
    letters that are left, keys in Redis when all is answered, warnings and errors in logs, and looks at the registry in
    their order.
    """

    rows: list[Row] | None = None
    dropped: int = 0
    counted: dict[str, Mapping[str, int]] = field(default_factory=dict)
    letters: list[Letter] | None = None
    letters_counted: int | None = None
    keys: list[Key] | None = None
    lines: list[Line] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
