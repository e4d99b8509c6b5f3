"""The checker on what gateways count: counts that fit what clients were told, and one of each kind that does not."""

from __future__ import annotations

import pytest

from tests.promises.checker import check
from tests.promises.histories import ACCEPTED, LATE, LEFT, LIMITED, REJECTED, UNKNOWN, Scribe

MISSING = "outcomes that a gateway has not counted"
TOO_OFTEN = "outcomes that a gateway has counted too often"
MORE = "a gateway has counted more requests than came"


@pytest.mark.parametrize(
    ("counted", "wrong"),
    [
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, set()),
        ({"ok": 6, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1, "not_found": 1}, set()),
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1, "cancelled": 4}, set()),
        ({"ok": 2, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, {MISSING}),
        ({"ok": 3, "rejected_by_model": 1, "rate_limited": 1}, {MISSING}),
        ({"ok": 9, "rejected_by_model": 1, "rate_limited": 1, "deadline_exceeded": 1}, {TOO_OFTEN, MORE}),
        ({"ok": 3, "rejected_by_model": 4, "rate_limited": 4, "deadline_exceeded": 1}, {MORE}),
    ],
)
def test_a_gateway_has_counted_what_its_clients_were_told_and_no_more_than_they_asked(
    counted: dict[str, int], wrong: set[str]
) -> None:
    it = Scribe()
    a, b, c = it.run("a", "b", "c", at=(1.0, 2.0))
    it.run("reject d", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=a)
    it.ask((0.0, 3.0), "b\nc", inputs=("b", "c"), outputs=(b, c), output=f"{b}\n{c}")
    it.ask((0.0, 3.0), "e\nreject d", inputs=("e", "reject d"), blamed=1, **REJECTED)  # Nobody knows of e.
    it.ask((0.0, 30.0), "f", **LATE)
    it.ask((0.0, 3.0), "g", **LIMITED)
    it.ask((0.0, 3.0), "h", wanted="9", **UNKNOWN)
    it.ask((0.0, None), "i", **LEFT)
    it.task((0.0, 3.0), "j", "task", **ACCEPTED)
    it.history.evidence.counted["gateway"] = counted
    assert {violation.promise for violation in check(it.history)} == wrong


@pytest.mark.parametrize(("wanted", "wrong"), [("", {MISSING}), ("3", set())])
def test_a_version_that_is_not_known_now_is_refused_before_there_is_a_request(wanted: str, wrong: set[str]) -> None:
    it = Scribe()
    it.ask((0.0, 3.0), "a", wanted=wanted, status=503, code="NO_WORKERS")
    it.history.evidence.counted["gateway"] = {"ok": 0}
    assert {violation.promise for violation in check(it.history)} == wrong


def test_what_other_gateways_were_asked_is_no_matter() -> None:
    it = Scribe()
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)
    it.history.evidence.counted["another"] = {"ok": 0}
    assert not check(it.history)


@pytest.mark.parametrize(("counted", "wrong"), [(1, set()), (2, {TOO_OFTEN, MORE})])
def test_rows_of_a_tensor_are_one_request(counted: int, wrong: set[str]) -> None:
    it = Scribe()
    a, b = it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a\nb", inputs=("a", "b"), outputs=(a, b), output=f"{a}\n{b}", rows=True)
    it.history.evidence.counted = {it.history.operations[0].gateway: {"ok": counted}}
    assert {violation.promise for violation in check(it.history)} == wrong
