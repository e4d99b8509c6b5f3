"""Compares the ledger with its clients: every answer has its row, and every row its client.

A row holds the answer that the client with its id got. A part of a list may have its own row under an unknown id, which
is matched by input. Refusals share rows, so they are only compared as sums, and only from above: if a gateway is
killed, its counts and the last rows are lost.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from headway.errors import REFUSALS, SHOWN
from tests.promises.evidence import Row
from tests.promises.faults import Fault
from tests.promises.operation import ASKS, History, Kind, Operation, Violation
from tests.promises.ways_in import text_of_numbers

WRITTEN_SECONDS = 3.0
"""Seconds without faults in which a gateway writes the rows of its answers."""
GIVEN_UP = "the last records could not be written to the ledger"
"""Logged by a process that ends without having written all of its rows."""
TENSORS = "tensors: "
"""Prefix of what the ledger stores for tensors: their shapes, which don't identify a request."""
ENDED = ("ok", "REJECTED_BY_MODEL", "BACKEND_ERROR", "DEADLINE_EXCEEDED")
"""Outcomes of accepted requests, each of which has its own row."""
_SHARED = frozenset(SHOWN.get(code, code) for code in REFUSALS)


def ledger(history: History) -> Iterator[Violation]:
    if history.evidence.rows is not None:
        yield from _Judge(history, history.evidence.rows).judge()


class _Judge:
    def __init__(self, history: History, rows: Sequence[Row]) -> None:
        self._history = history
        self._asks = [one for one in history.operations if one.kind in ASKS and one.lost != "torn"]
        self._under = defaultdict[tuple[str, str], list[Operation]](list)
        for one in self._asks:
            if one.id:
                self._under[one.tenant, one.id].append(one)
        self._rows = defaultdict[tuple[str, str], list[Row]](list)
        for row in rows:
            self._rows[row.tenant, row.id].append(row)
        self._polled: dict[tuple[str, str], str] = {}
        for one in history.operations:
            if one.kind is Kind.POLL and one.outcome:
                self._polled[one.tenant, one.id] = "ok" if one.output is not None else one.code
        self._given_up = {line.process: line.at for line in history.evidence.lines if line.event == GIVEN_UP}
        self._stood = [fault for fault in history.faults if fault.what.startswith("ledger")]

    def judge(self) -> Iterator[Violation]:
        yield from self._missing()
        yield from self._of_nobody()
        yield from self._versions()

    def _missing(self) -> Iterator[Violation]:
        """Find answers without a row, and rows whose outcome is not what the client with that id got."""
        for name, asked in self._under.items():
            told = Counter(outcome for one in asked if (outcome := self._outcome(one)) in ENDED)
            if len(asked) == 1 and asked[0].status == 202 and self._polled.get(name) in ENDED:
                told[self._polled[name]] += 1
            rows = Counter(row.error or "ok" for row in self._rows[name] if row.requests == 1)
            for outcome in told - rows:
                told_so = [one for one in asked if self._outcome(one) == outcome] or asked[:1]
                one = told_so[0]
                others = {row.error or "ok" for row in self._rows[name]} - told.keys()
                story = f"{one}: {outcome}, not {sorted(others)}; rows {self._rows[name]}"
                if others and len(asked) == 1 and one.status == 202:
                    yield Violation("the ledger tells another outcome of a task than its poll", story)
                elif others and len(asked) == 1:
                    yield Violation("the ledger tells another outcome than its client got", story)
                elif not self._history.evidence.dropped and not any(map(self._lost, told_so)):
                    yield Violation("an answer without a row in the ledger", story)
            [one, *more] = asked
            for row in self._rows[name] if not more and one.output is not None and not one.inputs else ():
                if row.output is None or row.output.startswith(TENSORS):
                    continue
                if text_of_numbers(row.output) != one.output:
                    yield Violation("the ledger tells another output", f"{one}: {row.output[-60:]}")

    def _outcome(self, one: Operation) -> str:
        """Return the outcome that the client got from its gateway. Empty if none, or if its gRPC stack made it."""
        if one.returned is None or (one.kind is Kind.TASK and one.status == 202):
            return ""
        by_stack = one.way.startswith("gRPC") and one.status == 504
        return "" if by_stack else "ok" if one.output is not None else one.code

    def _lost(self, one: Operation) -> bool:
        """Return True if its gateway may have ended before writing its row."""
        returned = one.returned or one.called
        ends = [
            fault
            for fault in self._history.faults
            if fault.whom == one.gateway and fault.what.endswith(("killed", "ended"))
        ]
        if one.status == 202:  # The row comes with the outcome, if the gateway is still running.
            return bool(ends)
        return any(self._calm(returned, fault) < WRITTEN_SECONDS for fault in ends)

    def _calm(self, since: float, end: Fault) -> float:
        """Return the seconds since the last fault in which a gateway could write to the ledger before it ended."""
        gone = end.ended or end.began  # Another process may have replaced it by then.
        until = end.began if end.what.endswith("killed") else self._given_up.get(end.whom, gone)
        stood = [
            min(fault.ended or until, until)
            for fault in self._history.faults
            if fault.began <= until and (fault in self._stood or fault.what.endswith("paused"))
        ]
        return until - max([since, *stood])

    def _of_nobody(self) -> Iterator[Violation]:
        """Find rows that no request explains, or more rows than requests."""
        asked = Counter((one.tenant, text) for one in self._asks for text in one.texts)
        nameless = Counter[str]()
        for one in self._asks:
            nameless[one.tenant] += one.entries - bool(one.id)
        seen, unknown = Counter[tuple[str, str]](), Counter[str]()
        for name, rows in self._rows.items():
            own = [row for row in rows if row.requests == 1]
            if name in self._under and len(own) > len(self._under[name]):
                yield Violation("more rows than requests under an id", f"{own}; {self._under[name][0]}")
            for row in own:
                unknown[row.tenant] += name not in self._under
                if row.input is not None and row.input.startswith(TENSORS):
                    continue
                if row.input or (row.input is not None and row.error not in _SHARED):
                    seen[row.tenant, row.input] += 1
        for tenant, text in seen - asked:
            what = "more rows than requests" if asked[tenant, text] else "a row that nobody asked for"
            yield Violation(f"{what}, by the input", f"{tenant} {text[:200]!r}: {seen[tenant, text]} rows")
        for tenant in unknown - nameless:
            yield Violation("rows of nobody", f"{tenant}: {unknown[tenant]} under ids that no client knows")
        yield from self._refusals()

    def _refusals(self) -> Iterator[Violation]:
        """Find refusals in the sums that no client received."""
        told, open_ = Counter[tuple[str, str]](), Counter[str]()
        for one in self._asks:
            if one.returned is None:
                open_[one.tenant] += len(one.texts)
            elif one.kind is Kind.ASK or one.status != 202:
                told[one.tenant, one.code] += 1
                open_[one.tenant] += len(one.texts) - 1
            else:
                open_[one.tenant] += 1
        counted = Counter[tuple[str, str]]()
        for rows in self._rows.values():
            for row in rows:
                if row.error in _SHARED:
                    counted[row.tenant, row.error] += row.requests
        for tenant, code in counted - told:
            if (counted - told)[tenant, code] > open_[tenant]:
                many = f"{counted[tenant, code]} in rows, {told[tenant, code]} told, {open_[tenant]} open"
                yield Violation("refusals that nobody was told", f"{tenant} {code}: {many}")

    def _versions(self) -> Iterator[Violation]:
        """Check that failed runs have a version, too."""
        if self._history.weighings:
            for rows in self._rows.values():
                for row in rows:
                    if row.worker and not row.version:
                        yield Violation("a row of a run without its version", str(row))
