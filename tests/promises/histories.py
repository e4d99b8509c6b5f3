"""Histories written by hand in a short notation."""

import uuid
from typing import Any

from tests.promises.checker import check
from tests.promises.evidence import Row
from tests.promises.faults import Fault
from tests.promises.operation import History, Kind, Operation, Presence, Run, Weighing

REJECTED: dict[str, Any] = {"status": 422, "code": "REJECTED_BY_MODEL"}
ANSWERS: dict[str, dict[str, Any]] = {
    "accepted": {"status": 202},
    "pending": {"status": 200},
    "unknown": {"status": 404, "code": "NOT_FOUND"},
    "conflict": {"status": 409, "code": "IDEMPOTENCY_CONFLICT"},
    "misuse": {"status": 422, "code": "IDEMPOTENCY_CONFLICT"},
    "rejected": REJECTED,
    "known": {**REJECTED, "turned_down": True},
    "limited": {"status": 429, "code": "RATE_LIMITED"},
    "late": {"status": 504, "code": "DEADLINE_EXCEEDED"},
    "no-workers": {"status": 503, "code": "NO_WORKERS"},
    "forgotten": {"status": 204},
    "failed": {"status": 200, "code": "DEADLINE_EXCEEDED"},
    "left": {"lost": "left"},
    "torn": {"lost": "torn"},
    "cut": {"lost": "cut"},
}
"""Answers by the words that the notation uses for them."""
KINDS = {"ask": Kind.ASK, "task": Kind.TASK, "poll": Kind.POLL, "forget": Kind.FORGET}
TYPES = {"timeout": float, "blamed": int, "fresh": bool, "rows": bool}


class Scribe:
    def __init__(self, story: str = "", *, shares: bool = False) -> None:
        self.history = History(shares=shares)
        self.write(story)

    def write(self, story: str) -> None:
        """Write sentences separated by semicolons: when, what, with which inputs and options, and the answer.

        1-2 run a b                  a run of two inputs; it is `run0`, and `run0.1` is its output for b
        0-3 ask a key=k: run0.0      a request that gets an output
        0- ask a b: left             one with two inputs, whose client left
        0-1 task poison_c id=t: accepted; 2-3 poll t: pending; 4-5 forget t: forgotten
        4-5 fault gpu killed of=worker-1

        Write a space in an input as an underscore. The call parameter is `t`.
        """
        for sentence in filter(None, map(str.strip, story.split(";"))):
            asked, _, answer = sentence.partition(": ")
            span, what, *words = asked.split()
            began, _, ended = span.partition("-")
            at = float(began), float(ended) if ended else None
            options: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
            options |= {name: TYPES[name](value) for name, value in options.items() if name in TYPES}
            if "t" in options:
                options["parameters"] = f'{{"t": {options.pop("t")}}}'
            texts = [word.replace("_", " ") for word in words if "=" not in word]
            if what == "fault":
                self.history.faults.append(Fault(" ".join(texts), *at, options.get("of", "").replace("_", " ")))
            elif what == "run":
                self.run(*texts, at=at, **options)
            elif what in ("poll", "forget"):
                self.note(KINDS[what], at, texts[0], **options, **self._told(answer))
            else:
                options |= {"inputs": tuple(texts)} if len(texts) > 1 else {}
                self.note(KINDS[what], at, text="\n".join(texts), **options, **self._told(answer))

    def _told(self, answer: str) -> dict[str, Any]:
        told, outputs = dict[str, Any](), list[str]()
        marks = {mark: text for run in self.history.runs for mark, text in run.marks().items()}
        for word in answer.split():
            if word in marks or "|" in word:
                outputs.append(word if "|" in word else f"{marks[word].upper()}|{word}")
            else:
                told |= ANSWERS.get(word) or {
                    "status" if word.isdigit() else "code": int(word) if word.isdigit() else word
                }
        if outputs:
            told["output"] = "\n".join(outputs)
        return told | ({"outputs": tuple(outputs)} if len(outputs) > 1 else {})

    @property
    def broken(self) -> set[str]:
        return {violation.promise for violation in check(self.history)}

    def run(
        self,
        *inputs: str,
        at: tuple[float, float | None],
        version: str = "",
        parameters: str = "",
        name: str = "",
        model: str = "",
    ) -> list[str]:
        run = Run(name or f"run{len(self.history.runs)}", inputs, *at, version, model, parameters=parameters)
        self.history.runs.append(run)
        return [f"{text.upper()}|{mark}" for mark, text in run.marks().items()]

    def weigh(self, at: float = -99.0, **weights: float) -> None:
        """Set version weights from a time on. `v3` means version 3."""
        named = {version.removeprefix("v"): weight for version, weight in weights.items()}
        self.history.weighings.append(Weighing(named, at))

    def host(self, version: str, up: float = -99.0, gone: float | None = None) -> None:
        self.history.processes.append(Presence(f"host of {version}", version, up, gone, host=True))

    def row(self, id: str, error: str = "", tenant: str = "acme", **told: Any) -> None:
        rows = self.history.evidence.rows = self.history.evidence.rows or []
        rows.append(Row(tenant, id, "failed" if error else "completed", error, **told))

    def note(
        self,
        kind: Kind,
        at: tuple[float, float | None],
        id: str = "",
        text: str = "",
        tenant: str = "acme",
        **told: Any,
    ) -> None:
        """Record an operation called at the first time. It returned at the second, unless that is None."""
        chosen, timeout = bool(id), told.pop("timeout", 30.0)
        if told.get("output") is not None:
            told.setdefault("status", 200)
        told["returned"] = None if told.get("lost") else at[1]
        number = len(self.history.operations) + 1
        own = {"id": id or str(uuid.uuid4()), "chosen": chosen, "text": text, "timeout": timeout}
        self.history.operations.append(Operation(number, kind, tenant, "gateway", at[0], **own, **told))
