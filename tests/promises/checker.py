"""Judges a whole history: is every answer explained by what clients, faults and the model function did?

    violations = check(history)

The search judges each object (an id, a key). The rules in this file judge runs and single answers. A rule never reports
what a fault in the history may have caused.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.promises.at_rest import at_rest
from tests.promises.bulk import bulk
from tests.promises.charges import charges
from tests.promises.counts import counts
from tests.promises.drains import drains
from tests.promises.faults import REDO_SECONDS
from tests.promises.groups import Groups
from tests.promises.idle import idle
from tests.promises.ids import Id, Standing
from tests.promises.keys import Flight, Key
from tests.promises.ledger import ledger
from tests.promises.letters import letters
from tests.promises.operation import ASKS, BAD, History, Kind, Operation, Run, Violation, mark_of, text_of
from tests.promises.parameters import parameters, ran_in_vain
from tests.promises.search import Search, TooComplex
from tests.promises.versions import versions
from tests.promises.warnings import warnings

GRACE = 10.0
"""Seconds after its deadline by which a task must have its outcome, unless the service was down for longer."""
DISPATCH = 1.0
"""Seconds that may pass on a busy machine between claiming a batch and calling the model function."""
PATIENT = 2.0
"""Timeouts shorter than this (in seconds) are not judged, because the next batch alone may take longer."""
EARLY = 0.5
"""Share of its timeout before which no request can be late. It is late once no run could end by its deadline."""
SHOWN = 12
"""Number of operations in an object's history that a violation shows."""
ALLOWED = "not allowed by its history"


def check(history: History) -> list[Violation]:
    """Return all violations, or an empty list if the history is allowed."""
    return [
        *_answers(history), *_deadlines(history), *_verdicts(history), *_objects(history), *_Runs(history).judge(), *_ends(history),
        *charges(history), *versions(history), *ledger(history), *counts(history), *letters(history),
        *at_rest(history), *warnings(history), *idle(history), *bulk(history), *drains(history), *parameters(history),
    ]  # fmt: skip


def _answers(history: History) -> Iterator[Violation]:
    for one in history.operations:
        told, due = list(map(text_of, one.answers)), [text.upper() for text in one.texts]
        if told and one.kind in ASKS and told != due:
            yield Violation(
                "answers in another order" if sorted(told) == sorted(due) else "answer to another request", str(one)
            )
        if one.status == 500:
            yield Violation("error of the service itself", str(one))
        if one.lost in ("cut", "silent", "unreachable"):
            yield Violation("no answer", str(one))
    for text in history.unasked:
        yield Violation("bytes that nobody asked for", text)


def _deadlines(history: History) -> Iterator[Violation]:
    """Find requests that timed out too early. Requests that share an id with a task are exempt."""
    tasks = {(one.tenant, one.id) for one in history.operations if one.kind is Kind.TASK}
    for one in history.operations:
        own = one.kind is Kind.ASK and one.status == 504 and (one.tenant, one.id) not in tasks
        early = (one.returned or one.called) - one.called < EARLY * one.timeout
        if own and early and one.timeout >= PATIENT:
            yield Violation("late long before its deadline", str(one))


def _verdicts(history: History) -> Iterator[Violation]:
    """Find bad inputs that succeeded, good ones that were rejected, and good ones that failed because of others."""
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in history.operations:
        if one.kind in ASKS:
            texts[one.tenant, one.id].update(one.texts)
    for one in history.operations:
        asked = set(one.texts) if one.kind in ASKS else texts[one.tenant, one.id]
        if one.blamed >= 0:
            asked = {one.texts[one.blamed]} if one.blamed < len(one.texts) else {"none that was asked"}
        if any(text_of(output).lower().startswith(BAD) for output in one.answers):
            yield Violation("output of an input that the model rejects", str(one))
        if one.code == "REJECTED_BY_MODEL" and not any(text.startswith(BAD) for text in asked):
            yield Violation("a good input is rejected", str(one))
        failed = one.code == "BACKEND_ERROR" and asked and not any(text.startswith(BAD) for text in asked)
        if failed and not _may_rerun(history, 0.0, one.returned or one.called):
            yield Violation("a good input failed", str(one))


def _may_rerun(history: History, since: float, until: float) -> bool:
    """Return True if a fault may have made an input run again in this time."""
    return any(
        fault.cost.reruns and fault.began <= until and (fault.ended or until) + REDO_SECONDS >= since
        for fault in history.faults
    )


def _objects(history: History) -> Iterator[Violation]:
    ids: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    keys: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for one in history.operations:
        if one.lost == "torn":
            continue
        if one.id:
            ids[one.tenant, one.id].append(one)
        if one.key:
            keys[one.tenant, one.key].append(one)
    losses = _losses(history)
    for under in ids.values():
        if len(under) > 1 or under[0].kind is not Kind.ASK:
            yield from _search(Search(Id(under), [*under, *_within(losses, under)]), under)
    for under in keys.values():
        yield from _search(Search(Key(), [*under, *_within(losses, under)]), under)


def _within(losses: Sequence[Operation], under: Sequence[Operation]) -> list[Operation]:
    """Select the losses that can affect an object."""
    first, last = min(one.called for one in under), max(one.returned or one.called for one in under)
    return [loss for loss in losses if loss.called <= last and (loss.returned is None or loss.returned >= first)]


def _losses(history: History) -> list[Operation]:
    """Return the times when state may be lost, as operations without a client. Overlapping ones are merged."""
    losses: list[Operation] = []
    for fault in sorted(history.faults, key=lambda fault: fault.began):
        if not fault.cost.loses:
            continue
        until = None if fault.ended is None else fault.ended + REDO_SECONDS
        last = losses[-1] if losses else None
        if last is not None and (last.returned is None or last.returned >= fault.began):
            last.returned = None if last.returned is None or until is None else max(last.returned, until)
        else:
            losses.append(Operation(-1 - len(losses), Kind.LOSS, "", "", fault.began, returned=until))
    return losses


def _search(search: Search[Standing] | Search[Flight], under: Sequence[Operation]) -> Iterator[Violation]:
    try:
        blamed = search.unexplained()
    except TooComplex:
        yield Violation("not judged", f"too many explanations; {_story(under, under[-1])}")
        return
    if blamed is not None:
        yield Violation(_promise(blamed, under), _story(under, blamed))


def _promise(blamed: Operation, under: Sequence[Operation]) -> str:
    """Return the promise that was most likely broken."""
    before = [one for one in under if one is not blamed and one.called < (blamed.returned or 0.0)]
    if blamed.turned_down:
        return "turned down in place of what is kept"
    if blamed.status == 404:
        return "a task that lives is unknown (404)"
    if not any(one.kind in ASKS for one in before) and blamed.kind not in ASKS:
        return "a task of nobody, or of another tenant"
    told = {one.outcome for one in before if one.outcome and one.what in ("", blamed.what)}
    if blamed.outcome and told and blamed.outcome not in told:
        return "two outcomes"
    if any(one.kind is Kind.FORGET and one.status == 204 for one in before) and blamed.kind is Kind.POLL:
        return "known after its DELETE"
    if blamed.status in (409, 422) and blamed.code == "IDEMPOTENCY_CONFLICT":
        return "a conflict with nothing"
    return ALLOWED


def _story(under: Sequence[Operation], blamed: Operation) -> str:
    told = sorted(under, key=lambda one: one.called)
    place = told.index(blamed)
    told = told[max(0, place - SHOWN + 2) : place + 2]
    return f"{blamed}\n" + "".join(f"    {one}\n" for one in told)


class _Runs:
    """The runs, matched with requests and answers."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._marks: dict[str, tuple[Run, str]] = {}
        self._of: dict[str, list[Run]] = defaultdict(list)
        self._ended: dict[str, list[Run]] = defaultdict(list)
        """Finished runs of each text whose answers count."""
        in_vain = ran_in_vain(history.runs)
        for run in history.runs:
            for mark, text in run.marks().items():
                self._marks[mark] = run, text
                self._of[text].append(run)
                if run.ended is not None and run.name not in in_vain:
                    self._ended[text].append(run)
        self._groups = Groups(history, shares=history.shares)
        self._owners: dict[str, tuple[Operation, int]] = {}
        """The first operation that got each output, by mark, and its place there."""
        self._forgets = [one for one in history.operations if one.kind is Kind.FORGET and one.lost != "torn"]

    def judge(self) -> Iterator[Violation]:
        for one in self._history.operations:
            if one.returned is not None:
                for place, output in enumerate(one.answers):
                    yield from self._output(one, place, output)
        yield from self._rows()
        yield from self._rejections()
        yield from self._keys()
        yield from self._once()
        yield from self._departed()

    def _output(self, one: Operation, place: int, output: str) -> Iterator[Violation]:
        """Check that each output comes from a run that may have answered, and is shared only where allowed."""
        mark = mark_of(output)
        run, text = self._marks.get(mark, (None, ""))
        if run is None or text.upper() != text_of(output):
            yield Violation("output of no run", str(one))
            return
        if one.kind in ASKS and run.model != one.model:
            yield Violation("answer of another model", f"{one}: {run.model or 'the default one'} ran")
        if one.kind in ASKS and run.parameters != one.values:
            yield Violation("answer of a call with other parameters", f"{one}: {run.parameters or 'none'} in its call")
        if one.kind is Kind.POLL and not self._groups.knows(one):
            return  # Another tenant's task, which its own history covers.
        first = self._groups.first_call(one, place)
        if one.fresh and not (one.key or one.chosen):  # Others may get its answer later, but it gets no earlier one.
            first = one.called
        if run.began > (one.returned or 0.0) or run.began < first:
            yield Violation("output of a run at another time", f"{one}, run {run.began:.3f}–{run.ended}")
        owner, its_place = self._owners.setdefault(mark, (one, place))
        if owner.tenant != one.tenant:
            yield Violation("answer of another tenant", f"{one}\n    {owner}")
        elif not self._groups.together((owner, its_place), (one, place)):
            yield Violation("answer to another request", f"{one}\n    {owner}")

    def _rows(self) -> Iterator[Violation]:
        """Check that the rows of a request ran in one batch, in order."""
        for one in self._history.operations:
            marks = [mark_of(output) for output in one.answers] if one.rows else []
            if marks:
                run, _, first = marks[0].rpartition(".")
                if marks != [f"{run}.{int(first) + place}" for place in range(len(marks))]:
                    yield Violation("rows of a request that did not run together", f"{one}: {', '.join(marks)}")

    def _rejections(self) -> Iterator[Violation]:
        """Find inputs that were answered as rejected but never ran."""
        for one in self._history.operations:
            if one.kind not in ASKS or one.code != "REJECTED_BY_MODEL" or one.returned is None:
                continue
            texts = one.texts[one.blamed :][:1] if one.blamed >= 0 else one.texts
            if not any(run.began <= one.returned for text in texts for run in self._of.get(text, [])):
                yield Violation("rejected without any run", str(one))

    def _keys(self) -> Iterator[Violation]:
        """Check that an input used under one key only runs once for each of its places."""
        under: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        users: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for one in self._history.operations:
            if one.kind in ASKS:
                under[one.tenant, one.key].append(one)
                for text in one.texts:
                    users[text].add((one.tenant, one.key))
        for (tenant, key), asked in under.items():
            if not key:
                continue
            for text in {text for one in asked for text in one.texts}:
                asking = [one for one in asked if text in one.texts]
                ended = self._ended[text]
                places = max(one.texts.count(text) for one in asking)
                if len(ended) <= places or len(users[text]) > 1 or any("BACKEND_ERROR" in one.code for one in asking):
                    continue
                deleted = self._deleted(asking, ended[-1].began)
                if len(ended) > places + len(deleted) and not self._excused(asking[0].called, ended[-1].ended or 0.0):
                    story = _story([*asking, *deleted], asking[-1])
                    runs = ", ".join(f"{run.began:.3f}–{run.ended:.3f}" for run in ended)
                    yield Violation("second run under a key", f"{tenant} {key}: runs {runs}; {story}")

    def _once(self) -> Iterator[Violation]:
        """Check that an input sent once runs once, unless its batch failed."""
        asked = Counter(text for one in self._history.operations if one.kind in ASKS for text in one.texts)
        for one in self._history.operations:
            for text in one.texts if one.kind is Kind.ASK else ():
                ended = self._ended[text]
                if asked[text] > 1 or len(ended) < 2 or self._excused(one.called, ended[-1].ended or 0.0):
                    continue
                runs = ", ".join(f"{run.began:.3f}–{run.ended:.3f}" for run in ended)
                yield Violation("second run of a request", f"{one}: {text!r} runs {runs}")

    def _deleted(self, asking: Sequence[Operation], before: float) -> list[Operation]:
        """Return operations that may have deleted tasks of these. Deleting a task in progress also frees its key."""
        tasks = {(one.tenant, one.id) for one in asking if one.kind is Kind.TASK and one.id}
        return [
            one for one in self._forgets if (one.tenant, one.id) in tasks and one.status != 404 and one.called < before
        ]

    def _departed(self) -> Iterator[Violation]:
        """Find runs of requests that were not sent completely, or that were deleted in time."""
        texts = Counter(text for one in self._history.operations if one.kind in ASKS for text in one.texts)
        deleted: dict[tuple[str, str], list[Operation]] = defaultdict(list)
        for one in self._history.operations:
            if one.kind is Kind.FORGET and one.status == 204:
                deleted[one.tenant, one.id].append(one)
        for one in self._history.operations:
            alone = [text for text in one.texts if one.kind in ASKS and texts[text] == 1]
            runs = [run for text in alone for run in self._of.get(text, [])]
            if not runs:
                continue
            if one.lost == "torn":
                yield Violation("run of a request that was never sent whole", str(one))
            first = min(run.began for run in runs)
            for forget in deleted[one.tenant, one.id] if one.kind is Kind.TASK else ():
                in_time = (one.returned or first) <= forget.called and (forget.returned or first) + DISPATCH < first
                if in_time and not self._excused(one.called, first):
                    yield Violation("run of a deleted task", f"{one}\n    {forget}, run at {first:.3f}")

    def _excused(self, since: float, until: float) -> bool:
        return _may_rerun(self._history, since, until)


def _ends(history: History) -> Iterator[Violation]:
    """Find tasks that stay pending forever."""
    admitted: dict[tuple[str, str], Operation] = {}
    for one in history.operations:
        if one.kind is Kind.TASK and one.status == 202:
            admitted[one.tenant, one.id] = one
    for one in history.operations:
        task = admitted.get((one.tenant, one.id))
        if one.kind is not Kind.POLL or task is None or one.status != 200 or one.outcome:
            continue
        due = (task.returned or 0.0) + task.timeout + GRACE
        stood = sum((fault.ended or one.called) - fault.began for fault in history.faults if fault.began < one.called)
        if one.called > due + stood:
            yield Violation("a task without an end", f"{one}\n    {task}")
