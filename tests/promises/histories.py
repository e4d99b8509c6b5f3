"""Histories made by hand, in few words."""

import uuid
from typing import Any

from tests.promises.evidence import Row
from tests.promises.faults import Fault
from tests.promises.operation import History, Kind, Operation, Presence, Run, Weighing

ACCEPTED: dict[str, Any] = {"status": 202}
PENDING: dict[str, Any] = {"status": 200}
UNKNOWN: dict[str, Any] = {"status": 404, "code": "NOT_FOUND"}
CONFLICT: dict[str, Any] = {"status": 409, "code": "IDEMPOTENCY_CONFLICT"}
MISUSE: dict[str, Any] = {"status": 422, "code": "IDEMPOTENCY_CONFLICT"}
REJECTED: dict[str, Any] = {"status": 422, "code": "REJECTED_BY_MODEL"}
KNOWN: dict[str, Any] = {**REJECTED, "turned_down": True}
LIMITED: dict[str, Any] = {"status": 429, "code": "RATE_LIMITED"}
LATE: dict[str, Any] = {"status": 504, "code": "DEADLINE_EXCEEDED"}
FORGOTTEN: dict[str, Any] = {"status": 204}
FAILED: dict[str, Any] = {"status": 200, "code": "DEADLINE_EXCEEDED"}
LEFT: dict[str, Any] = {"lost": "left"}


class Scribe:
    """Writes a history down."""

    def __init__(self, *, shares: bool = False) -> None:
        self.history = History(shares=shares)

    def run(
        self, *inputs: str, at: tuple[float, float | None], version: str = "", parameters: str = "", name: str = ""
    ) -> list[str]:
        run = Run(name or f"run{len(self.history.runs)}", inputs, *at, version, parameters=parameters)
        self.history.runs.append(run)
        return [f"{text.upper()}|{mark}" for mark, text in run.marks().items()]

    def fault(self, what: str, at: tuple[float, float], whom: str = "") -> None:
        self.history.faults.append(Fault(what, *at, whom))

    def weigh(self, at: float = -99.0, **weights: float) -> None:
        """Weights from an instant on, by version; `v3` stands for 3."""
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
        """An operation that was called, and returned unless it did not, at these instants."""
        chosen, timeout = bool(id), told.pop("timeout", 30.0)
        if told.get("output") is not None:
            told.setdefault("status", 200)
        self.history.operations.append(
            Operation(
                len(self.history.operations) + 1, kind, tenant, "gateway", at[0],
                id=id or str(uuid.uuid4()), chosen=chosen, text=text, timeout=timeout,
                returned=None if told.get("lost") else at[1], **told,
            )
        )  # fmt: skip

    def ask(self, at: tuple[float, float | None], text: str, id: str = "", **told: Any) -> None:
        self.note(Kind.ASK, at, id, text, **told)

    def task(self, at: tuple[float, float | None], text: str, id: str, **told: Any) -> None:
        self.note(Kind.TASK, at, id, text, **told)

    def poll(self, at: tuple[float, float | None], id: str, **told: Any) -> None:
        self.note(Kind.POLL, at, id, **told)

    def forget(self, at: tuple[float, float | None], id: str, **told: Any) -> None:
        self.note(Kind.FORGET, at, id, **told)
