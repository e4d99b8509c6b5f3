"""Records of a history: operations of clients, runs of the model function, faults.

All instants are seconds of the host's monotonic clock, which clients and model functions share.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tests.promises.evidence import Evidence
from tests.promises.faults import Fault

INDEFINITE = frozenset((500, 503, 504))
"""Statuses after which the effect of an operation may still come, as an earlier answer of the broker was not awaited."""


BAD = ("reject", "poison")
"""Beginnings of inputs that the model function rejects: the first fail by themselves, the others with all that ride
with them.
"""


SHOWN = 200
"""Characters of a text that are told."""


class Kind(Enum):
    ASK = "asks"
    TASK = "hands over"
    POLL = "polls"
    FORGET = "deletes"
    LOSS = "data may be lost"
    """No client's: while this lasts, the service may forget what it has acknowledged."""


ASKS = (Kind.ASK, Kind.TASK)
"""Kinds that ask the model for something."""


@dataclass(slots=True)
class Operation:
    """One request of a client and its answer.

    Attributes:
        called: when its first byte was sent.
        id: UUID text of the request or of the task it is about; empty as long as it is not known.
        text, inputs: the input; those of a request with several, one after the other, and apart.
        words: what was sent, of which the way may make another input.
        fresh: no earlier answer will do; its own may do for later identical requests.
        returned: when its answer was there; None if there was none.
        status, code: of the answer; the code is that of an error, of a task that failed its own.
        output, outputs: of the model, also that of a task; as `text` and `inputs`.
        blamed: place of the input that the error names; -1: it names none.
        wanted: version of the model that it names; empty: any.
        version: version that its answer tells, of several that answered all, with commas; empty where that tells none.
        turned_down: refused without a run, as the same input has failed alone.
        parameters: those that a call has once, as JSON; empty: none.
        rows: whether its inputs are the rows of one tensor, which run and are answered together.
        lost: why there is no answer: `torn` off before it was sent whole, `left`, `reset` as its gateway was killed; or,
            which is a violation, `cut` or `silent`.
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
        """What it asks, by which it is told from others under its id or its key."""
        named = (f"@{self.wanted}" if self.wanted else "") + (f" to {self.model}" if self.model else "")
        named += f" with {self.parameters}" if self.parameters else ""  # Under a key, 1.0 is another request than 1.
        return self.text + named + " as rows" * self.rows  # An array is answered with an array.

    @property
    def values(self) -> str:
        return canonical(self.parameters)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.inputs or (self.text,)

    @property
    def entries(self) -> int:
        """Requests as which it is counted: one for each input, and one for all rows of a tensor."""
        return 1 if self.rows else len(self.texts)

    @property
    def answers(self) -> tuple[str, ...]:
        return self.outputs or (() if self.output is None else (self.output,))

    @property
    def ends(self) -> float | None:
        """Instant by which its effect is sure to have come, or not to come; None: never.

        When one of several inputs fails, the others are let go of after the answer.
        """
        open_ = self.status != 200 and len(self.inputs) > 1 and (self.code != "IDEMPOTENCY_CONFLICT" or self.blamed > 0)
        return None if open_ or self.status in INDEFINITE else self.returned

    @property
    def outcome(self) -> str:
        """Outcome of the run in one word, as it is told here; empty if this tells nothing of it."""
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
    """Write parameters as all that equal them are written: 1.0 as 1, and none at all as the empty text."""
    values = json.loads(parameters or "{}", parse_float=_number)
    return json.dumps(values, sort_keys=True) if values else ""


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def text_of(output: str) -> str:
    """Input of the model function, as an output tells it."""
    return output.rpartition("|")[0]


def mark_of(output: str) -> str:
    """Run of an output, and its place in that run."""
    return output.rpartition("|")[2]


@dataclass(slots=True)
class Run:
    """A batch that the model function began, and ended if it did.

    `version` is that of the function, `model` its name, empty for the default one, and `host` the process that it ran for.
    `parameters` are those of the call, as `canonical` writes them.
    """

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
        """The mark of each output by which it is told from those of all other runs, to its input."""
        return {f"{self.name}.{place}": text for place, text in enumerate(self.inputs)}


@dataclass(frozen=True, slots=True)
class Weighing:
    """Weights of the versions, of which gateways were told from an instant on."""

    weights: Mapping[str, float]
    began: float


@dataclass(slots=True)
class Presence:
    """Time in which a process was up: a gateway, or a worker host of a version, which runs these models."""

    name: str
    version: str
    up: float
    gone: float | None = None
    models: tuple[str, ...] = ("",)
    host: bool = False


@dataclass(frozen=True, slots=True)
class Telling:
    """Version of a request as a ledger or a status tells it; None: it knows nothing of the request."""

    source: str
    tenant: str
    id: str
    version: str | None


@dataclass(slots=True)
class Job:
    """One bulk job, as its client knows it in the end. Its status is empty where nobody knows it.

    `lines` and `parameters` go by `custom_id`; a line has several texts if it has several inputs. `answers` and
    `errors` are the records of its two files: `custom_id`, and the outputs or the error's code.
    """

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
    """Notes of a whole history: what clients did, what ran, what failed, and what the service itself gives as evidence.

    Attributes:
        limits: requests a second and burst, by tenant and model; None stands for all models together.
        shares: whether identical requests of a tenant may get one answer (`--cache`, `--collapse`).
        unasked: bytes that came when no answer was due, in words.
        weighings: weights of the versions, in the order of their beginnings; empty: nothing is known of versions.
        processes: gateways and worker hosts, where versions are known.
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
    """A promise that was broken: which, and the operations that show it."""

    promise: str
    story: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.story}"
