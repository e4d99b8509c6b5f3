"""Records of a history: clients' operations, runs of the model function, faults.

All times are seconds of the host's monotonic clock, which clients and model functions share.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tests.promises.evidence import Evidence
from tests.promises.faults import Fault

INDEFINITE = frozenset((500, 503, 504))
"""After these statuses the operation may still take effect, because an earlier answer of the broker was not awaited."""


BAD = ("reject", "poison")
"""Prefixes of inputs that the model function rejects. The first kind fails alone, the second fails its whole batch."""


SHOWN = 200
"""Number of characters shown of a text."""


class Kind(Enum):
    ASK = "asks"
    TASK = "hands over"
    POLL = "polls"
    FORGET = "deletes"
    LOSS = "data may be lost"
    """Not an operation of a client. While it lasts, the service may forget what it has acknowledged."""


ASKS = (Kind.ASK, Kind.TASK)
"""Kinds that send inputs to the model."""


@dataclass(slots=True)
class Operation:
    """A client's request and its answer.

    Attributes:
        called: when its first byte was sent.
        id: UUID of the request or of the task it is about; empty until known.
        text, inputs: the input; if there are several, all in one string, and separately.
        words: what was sent; the API may turn it into a different input.
        fresh: no earlier answer will do; later identical requests may get its answer.
        returned: when its answer arrived, or None.
        status, code: of the answer. The code is that of an error; if a task failed, the task's own.
        output, outputs: of the model, also for a task; like `text` and `inputs`.
        blamed: index of the input that the error names, or -1.
        wanted: version of the model that it names; empty for any.
        version: version in its answer, or several separated by commas; empty if there is none.
        turned_down: refused without a run, because the same input failed alone before.
        parameters: call parameters as JSON, or empty.
        rows: its inputs are the rows of one tensor, which run and are answered together.
        lost: why there is no answer: `torn` off before it was completely sent, `left`, `reset` because its gateway was
            killed; or `cut` or `silent`, which are violations.
    """

    number: int
    kind: Kind
    tenant: str
    gateway: str
    called: float
    id: str = ""
    chosen: bool = False
    text: str = ""
    key: str = ""
    fresh: bool = False
    timeout: float = 0.0
    returned: float | None = None
    status: int = 0
    code: str = ""
    output: str | None = None
    turned_down: bool = False
    lost: str = ""
    way: str = "native"
    words: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    blamed: int = -1
    wanted: str = ""
    version: str = ""
    model: str = ""
    parameters: str = ""
    rows: bool = False

    @property
    def told(self) -> tuple[str, ...]:
        return tuple(self.version.split(",")) if self.version else ()

    @property
    def what(self) -> str:
        """Return what it asks, which distinguishes it from others with the same id or key."""
        named = (f"@{self.wanted}" if self.wanted else "") + (f" to {self.model}" if self.model else "")
        named += f" with {self.parameters}" if self.parameters else ""  # Under a key, 1.0 and 1 are different requests.
        return self.text + named + " as rows" * self.rows  # An array is answered with an array.

    @property
    def values(self) -> str:
        return canonical(self.parameters)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.inputs or (self.text,)

    @property
    def entries(self) -> int:
        """Return how many requests it counts as: one per input, or one for all rows of a tensor."""
        return 1 if self.rows else len(self.texts)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.outputs or (() if self.output is None else (self.output,))

    @property
    def ends(self) -> float | None:
        """Return when its effect has certainly happened or never will, or None if it may always happen. If one of
        several inputs fails, the others are released after the answer."""
        open_ = self.status != 200 and len(self.inputs) > 1 and (self.code != "IDEMPOTENCY_CONFLICT" or self.blamed > 0)
        return None if open_ or self.status in INDEFINITE else self.returned

    @property
    def outcome(self) -> str:
        """Return the outcome of the run as one word; empty if the answer doesn't show it."""
        if self.output is not None:
            return f"={self.output}"
        told = self.kind is Kind.POLL and self.status == 200 and self.code
        ended = self.kind in (Kind.ASK, Kind.TASK) and self.code in ("REJECTED_BY_MODEL", "BACKEND_ERROR")
        return f"!{self.code}" if told or ended else ""

    def __str__(self) -> str:
        what = " ".join(word for word in (self.id, self.key and f"key {self.key}", repr(self.what[:SHOWN])) if word)
        until = f"{self.returned:.3f}" if self.returned is not None else self.lost or "…"
        got = f"{self.status} {self.code or (self.output or '')[-60:]}".strip() if self.status else self.code
        got += ", known to fail" if self.turned_down else ""
        return (
            f"[{self.called:.3f}–{until}] {self.tenant} {self.kind.value} {what} at {self.gateway}, {self.way}: {got}"
        )


def canonical(parameters: str) -> str:
    """Write parameters in a form that all equal ones share: 1.0 as 1, and none as the empty string."""
    values = json.loads(parameters or "{}", parse_float=_number)
    return json.dumps(values, sort_keys=True) if values else ""


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def text_of(output: str) -> str:
    """Return the input that the model function got, as found in the output."""
    return output.rpartition("|")[0]


def mark_of(output: str) -> str:
    """Return the mark in an output, which identifies the run and the place in it."""
    return output.rpartition("|")[2]


@dataclass(slots=True)
class Run:
    """A batch that the model function began and, if `ended` is set, finished. `version` is that of the function,
    `model` its name (empty for the default model), and `host` the process it ran for. `parameters` are those of the
    call, as written by `canonical`."""

    name: str
    inputs: Sequence[str]
    began: float
    ended: float | None = None
    version: str = ""
    model: str = ""
    host: str = ""
    parameters: str = ""

    @property
    def pid(self) -> int:
        first = self.name.partition(".")[0]
        return int(first, 16) if "." in self.name else 0

    def marks(self) -> Mapping[str, str]:
        """Map the mark of each output, which is unique over all runs, to its input."""
        return {f"{self.name}.{place}": text for place, text in enumerate(self.inputs)}


@dataclass(frozen=True, slots=True)
class Weighing:
    """Version weights that gateways were given from a certain time on."""

    weights: Mapping[str, float]
    began: float


@dataclass(slots=True)
class Presence:
    """When a process was up: a gateway, or a worker host with a version and models."""

    name: str
    version: str
    up: float
    gone: float | None = None
    models: tuple[str, ...] = ("",)
    host: bool = False


@dataclass(frozen=True, slots=True)
class Telling:
    """The version of a request according to the ledger or a status. None means that the request is unknown there."""

    source: str
    tenant: str
    id: str
    version: str | None


@dataclass(slots=True)
class Job:
    """A bulk job as its client knows it at the end. Its status is empty if unknown. `lines` and `parameters` are keyed
    by `custom_id`; a line has several texts if it has several inputs. `answers` and `errors` are the records of its two
    files: `custom_id`, and the outputs or the error's code."""

    tenant: str
    id: str
    called: float
    lines: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, str] = field(default_factory=dict)
    cancelled: bool = False
    status: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    answers: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """The record of a whole history: what clients did, what ran, what failed, and evidence from the service itself.

    Attributes:
        limits: requests per second and burst, by tenant and model; None means all models together.
        shares: whether identical requests of a tenant may share an answer (`--cache`, `--collapse`).
        unasked: descriptions of bytes that arrived when no answer was due.
        weighings: version weights in order of time; empty if versions are unknown.
        processes: gateways and worker hosts, if versions are known.
    """

    operations: list[Operation] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    shares: bool = True
    limits: dict[tuple[str, str | None], tuple[float, float]] = field(default_factory=dict)
    unasked: list[str] = field(default_factory=list)
    weighings: list[Weighing] = field(default_factory=list)
    processes: list[Presence] = field(default_factory=list)
    tellings: list[Telling] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: which one, and the operations that show it."""

    promise: str
    story: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.story}"
