"""Compares dead letters with poison inputs: each input that failed alone has its letter, and each letter its failure.

A letter from before a loss of data may be gone. So may the oldest ones, if there are too many.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.promises.evidence import Letter
from tests.promises.faults import REDO_SECONDS
from tests.promises.operation import ASKS, BAD, History, Operation, Violation

MOST = 10_000
"""Maximum number of letters that are kept. All of them can be listed."""
FAILED = ("REJECTED_BY_MODEL", "BACKEND_ERROR")
"""Codes of failures that leave a letter."""


def letters(history: History) -> Iterator[Violation]:
    found = history.evidence.letters
    if found is not None:
        unread = [letter for letter in found if letter.input is None]
        for letter in unread:
            yield Violation("a dead letter that is listed and cannot be shown", str(letter))
        yield from _of_good_inputs(history, found)
        yield from _too_many(history, found)
        if len(found) < MOST and not unread:
            yield from _missing(history, found)
        counted = history.evidence.letters_counted
        if counted is not None and counted != len(found):
            yield Violation(
                "the metrics count other dead letters than there are", f"{counted}, {len(found)} are listed"
            )


def _of_good_inputs(history: History, found: Sequence[Letter]) -> Iterator[Violation]:
    """Find letters for good inputs that were in no batch that a fault may have ended."""
    reruns = any(fault.cost.reruns for fault in history.faults)
    for letter in found:
        good = letter.texts and not any(text.startswith(BAD) for text in letter.texts)
        if good and not (reruns and letter.attempts > 1):
            yield Violation("a dead letter of a good input", str(letter))


def _too_many(history: History, found: Sequence[Letter]) -> Iterator[Violation]:
    """Find more letters than requests, and several letters with one id."""
    asked = Counter((one.tenant, text) for one in _asked(history) for text in one.texts)
    used = Counter((one.tenant, one.id) for one in _asked(history) if one.id)
    for tenant, text in Counter((one.tenant, text) for one in found for text in one.texts) - asked:
        what = "more dead letters than requests" if asked[tenant, text] else "a dead letter of nobody"
        yield Violation(what, f"{tenant} {text[:200]!r}")
    for (tenant, id), times in Counter((one.tenant, one.id) for one in found).items():
        if times > max(used[tenant, id], 1):
            yield Violation("several dead letters of one request", f"{tenant} {id}: {times}")


def _missing(history: History, found: Sequence[Letter]) -> Iterator[Violation]:
    """Find failures that left no letter. An input that is already known to fail leaves no other."""
    left, ids = {(one.tenant, text) for one in found for text in one.texts}, {(one.tenant, one.id) for one in found}
    used = Counter((one.tenant, one.id) for one in _asked(history) if one.id and _may_have_failed(one))
    losses = [fault for fault in history.faults if fault.cost.loses]
    lost = max(((fault.ended or fault.began) + REDO_SECONDS for fault in losses), default=float("-inf"))
    for one in _asked(history):
        if one.code not in FAILED or one.returned is None or one.turned_down or one.called < lost:
            continue
        texts = one.texts[one.blamed :][:1] if one.blamed >= 0 else one.texts
        if used[one.tenant, one.id] > 1 and (one.tenant, one.id) in ids:
            continue  # A later letter with the same id has replaced its own.
        if not any((one.tenant, text) in left for text in texts):
            yield Violation("a failure without a dead letter", str(one))


def _may_have_failed(one: Operation) -> bool:
    """Return True if a request failed, or may have failed without its client knowing, in a way that leaves a letter."""
    return one.code in FAILED or one.status == 202 or one.returned is None


def _asked(history: History) -> list[Operation]:
    return [one for one in history.operations if one.kind in ASKS]
