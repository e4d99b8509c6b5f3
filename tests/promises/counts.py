"""Compares the gateways' counts (`headway_requests_total`) with the answers that their clients got.

Each input is a request, but all rows of a tensor together are only one.

    clients' answers ≤ counted ≤ clients' answers + requests whose outcome clients don't know

Clients don't know the outcome if they left or were cut off, for the other inputs of a list that failed, or for a task:
its outcome is counted where it was accepted. Only gateways that are still running at the end can be checked.
"""

from collections import Counter
from collections.abc import Iterator

from headway.errors import SHOWN
from tests.promises.operation import ASKS, History, Kind, Violation

UNCOUNTED = ("NOT_FOUND", "PAYLOAD_TOO_LARGE", "BAD_REQUEST", "REQUEST_TIMEOUT")
"""Codes of refusals that some APIs return before there is a request. They are only counted as refusals."""


def counts(history: History) -> Iterator[Violation]:
    for gateway, found in history.evidence.counted.items():
        counted = Counter[str]()
        for outcome, times in found.items():  # Clients report two codes as one.
            counted[SHOWN.get(outcome.upper(), outcome).lower()] += times
        told, unsure, open_ = Counter[str](), Counter[str](), 0
        for one in history.operations:
            if one.gateway != gateway or one.kind not in ASKS or one.lost == "torn":
                continue
            if one.returned is None or (one.kind is Kind.TASK and one.status == 202):
                open_ += one.entries
            elif one.output is not None:
                told["ok"] += one.entries
            else:
                by_stack = one.way.startswith("gRPC") and one.status == 504  # The client's timer may have.
                unknown = one.code == "NO_WORKERS" and bool(one.wanted or one.model)  # Not found, or not yet.
                sure = one.code not in UNCOUNTED and not by_stack and not unknown
                (told if sure else unsure)[one.code.lower()] += 1
                open_ += one.entries - 1
        open_ += sum(unsure.values())
        for outcome in told.keys() | counted.keys():
            missing = told[outcome] - counted[outcome]
            if missing > 0:
                yield Violation("outcomes that a gateway has not counted", f"{gateway}: {missing} {outcome}")
            if -missing > open_:
                many = f"{-missing} more than clients were told, {open_} open"
                yield Violation("outcomes that a gateway has counted too often", f"{gateway}: {outcome}: {many}")
        beyond = sum(counted.values()) - sum(told.values()) - open_
        if beyond > 0:
            yield Violation("a gateway has counted more requests than came", f"{gateway}: {beyond}")
