"""The checker on versions of a model: what is allowed, and one history of each kind that is not."""

from typing import Any

import pytest

from headway.core.versions import Versions, position_of
from tests.promises.checker import check
from tests.promises.histories import ACCEPTED, UNKNOWN, Scribe
from tests.promises.operation import Presence, Telling
from tests.promises.spans import common, touches, union

NO_WORKERS: dict[str, Any] = {"status": 503, "code": "NO_WORKERS"}


@pytest.fixture
def it() -> Scribe:
    """Two versions that are there, each drawn half the time until 3 drains at 100."""
    made = Scribe(shares=True)
    made.weigh(v3=1.0, v4=1.0)
    made.weigh(100.0, v3=0.0, v4=1.0)
    made.host("3")
    made.host("4")
    return made


def promises(it: Scribe) -> set[str]:
    return {violation.promise for violation in check(it.history)}


def of_names(version: str) -> list[str]:
    """Keys that draw a version of two with the same weight."""
    both = Versions({"3": 1, "4": 1}, "34", {"3": 1.0, "4": 1.0})
    return [key for key in map(str, range(99)) if both.drawn(position_of("acme", key)) == version]


def test_each_request_may_be_answered_by_any_version_that_is_drawn(it: Scribe) -> None:
    for version in "34":
        [output] = it.run(version, at=(1.0, 2.0), version=version)
        it.ask((0.0, 3.0), version, output=output, version=version)
    assert not promises(it)


def test_an_answer_that_tells_another_version_than_ran_is_found_out(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", output=output, version="4")
    assert promises(it) == {"an answer tells another version than ran it"}


@pytest.mark.parametrize(("second", "told"), [("3", "3"), ("4", "3,4"), ("4", "4,3"), ("4", "3"), ("3", "3,4")])
def test_an_answer_to_a_list_tells_each_version_that_answered(it: Scribe, second: str, told: str) -> None:
    [a], [b] = it.run("a", at=(1.0, 2.0), version="3"), it.run("b", at=(1.0, 2.0), version=second)
    listed = {"inputs": ("a", "b"), "outputs": (a, b), "output": f"{a}\n{b}"}
    it.ask((0.0, 3.0), "a\nb", of_names("3")[0], version=told, **listed)
    wrong = set() if set(told.split(",")) == {"3", second} else {"an answer tells another version than ran it"}
    assert promises(it) - {"another version than its name draws"} == wrong


@pytest.mark.parametrize("ran", ["3", "4"])
def test_a_request_that_names_a_version_is_answered_by_no_other(it: Scribe, ran: str) -> None:
    [output] = it.run("a", at=(1.0, 2.0), version=ran)
    it.ask((0.0, 3.0), "a", output=output, wanted="3")
    assert promises(it) == (set() if ran == "3" else {"a request that names a version is answered by another"})


def test_a_version_that_drains_runs_what_came_before_and_nothing_that_comes_later(it: Scribe) -> None:
    before, after = it.run("before", "after", at=(110.0, 111.0), version="3")
    it.ask((104.0, 112.0), "before", output=before)
    assert not promises(it)
    it.ask((106.0, 112.0), "after", output=after)
    assert promises(it) == {"a version that drains runs a new request"}


def test_a_gateway_that_stood_still_may_go_by_former_weights_until_it_goes_on(it: Scribe) -> None:
    [output] = it.run("a", at=(110.0, 111.0), version="3")
    it.ask((106.0, 112.0), "a", output=output)
    it.fault("gateway paused", at=(99.0, 109.0))
    assert not promises(it)


def test_a_version_without_weight_answers_only_those_who_name_it(it: Scribe) -> None:
    it.host("5")
    named, other = it.run("named", "other", at=(1.0, 2.0), version="5")
    it.ask((0.0, 3.0), "named", output=named, wanted="5")
    assert not promises(it)
    it.ask((0.0, 3.0), "other", output=other)
    assert promises(it) == {"an answer of a version that was not drawn"}


@pytest.mark.parametrize("gone", [True, False])
def test_another_version_helps_only_where_one_has_no_worker(it: Scribe, gone: bool) -> None:
    if gone:
        it.history.processes[1].gone = 105.0
    [output] = it.run("a", at=(108.0, 109.0), version="3")
    it.ask((106.0, 112.0), "a", output=output)
    assert promises(it) == (set() if gone else {"a version that drains runs a new request"})


@pytest.mark.parametrize(
    ("what", "whom"), [("gpu killed", "host of 4"), ("redis paused", "redis"), ("gpu killed", "another")]
)
def test_a_fault_of_a_host_explains_help_for_its_version_and_no_other(it: Scribe, what: str, whom: str) -> None:
    it.fault(what, at=(105.0, 107.0), whom=whom)
    [output] = it.run("a", at=(108.0, 109.0), version="3")
    it.ask((106.0, 112.0), "a", output=output)
    assert promises(it) == (set() if whom != "another" else {"a version that drains runs a new request"})


def test_what_is_kept_is_of_a_version_that_may_be_drawn_though_a_helper_ran_it(it: Scribe) -> None:
    it.fault("worker killed", at=(105.0, 107.0), whom="host of 4")
    [output] = it.run("a", at=(108.0, 109.0), version="3")
    it.ask((106.0, 110.0), "a", output=output)
    assert not promises(it)
    it.ask((111.0, 112.0), "a", output=output)
    assert promises(it) == {"a kept answer of a version that may not be drawn"}


def test_what_is_kept_for_who_names_a_version_is_no_answer_for_who_does_not(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", output=output, wanted="3")
    it.ask((4.0, 5.0), "a", output=output)
    assert promises(it) == {"answer to another request", "output of a run at another time"}


def test_what_comes_again_gets_the_version_of_its_first_whatever_the_weights_are(it: Scribe) -> None:
    key = of_names("3")[0]
    [output] = it.run("a", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", output=output, key=key)
    it.ask((200.0, 201.0), "a", output=output, key=key)
    [second] = it.run("b", at=(202.0, 203.0), version="4")
    it.ask((199.0, 204.0), "b", output=second, key="other", wanted="4")
    assert not promises(it)


@pytest.mark.parametrize(("rows", "wrong"), [(True, set()), (False, {"another version than its name draws"})])
def test_rows_are_one_request_of_which_any_version_may_be_drawn(it: Scribe, rows: bool, wrong: set[str]) -> None:
    [name, *_] = of_names("4")
    a, b = it.run("a", "b", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a\nb", name, inputs=("a", "b"), outputs=(a, b), output=f"{a}\n{b}", rows=rows)
    it.history.operations[-1].chosen = False
    assert promises(it) == wrong


@pytest.mark.parametrize("draws", ["3", "4"])
def test_a_key_an_id_and_a_list_draw_one_version(it: Scribe, draws: str) -> None:
    name, other, *_ = of_names(draws)
    a, b, c, d = it.run("a", "b", "c", "d", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", output=a, key=name)
    it.ask((0.0, 3.0), "b", name, output=b)
    it.ask((0.0, 3.0), "c\nd", other, inputs=("c", "d"), outputs=(c, d), output=f"{c}\n{d}")
    found = [violation.promise for violation in check(it.history)]
    assert found.count("another version than its name draws") == (0 if draws == "3" else 4)


def test_a_task_is_run_by_a_version_that_was_drawn_when_it_came(it: Scribe) -> None:
    name = of_names("3")[0]
    [output] = it.run("a", at=(300.0, 301.0), version="3")
    it.task((0.0, 1.0), "a", name, **ACCEPTED)
    it.poll((302.0, 303.0), name, output=output)
    assert not promises(it)
    [late] = it.run("b", at=(300.0, 301.0), version="3")
    it.task((200.0, 201.0), "b", "t", **ACCEPTED)
    it.poll((302.0, 303.0), "t", output=late)
    assert promises(it) == {"a version that drains runs a new request"}


def test_a_task_may_get_what_was_kept_of_a_version_that_may_be_drawn_or_is_named_when_it_comes(it: Scribe) -> None:
    [output], [named] = it.run("a", at=(1.0, 2.0), version="3"), it.run("b", at=(51.0, 52.0), version="4")
    it.ask((0.0, 3.0), "a", output=output)
    one, other, third, *_ = of_names("3")
    it.task((50.0, 51.0), "a", one, **ACCEPTED)
    it.task((50.0, 51.0), "b", other, wanted="4", **ACCEPTED)
    it.poll((302.0, 303.0), one, output=output)
    it.poll((302.0, 303.0), other, output=named)
    assert not promises(it)
    it.task((200.0, 201.0), "a", third, **ACCEPTED)
    it.poll((302.0, 303.0), third, output=output)
    assert promises(it) == {"a kept answer of a version that may not be drawn"}


def test_what_is_kept_is_of_the_version_that_the_name_of_who_comes_later_draws(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", output=output)
    it.ask((50.0, 51.0), "a", of_names("3")[0], output=output)
    assert not promises(it)
    it.ask((52.0, 53.0), "a", of_names("4")[0], output=output)
    assert promises(it) == {"another version than its name draws"}


@pytest.mark.parametrize("told", [UNKNOWN, NO_WORKERS])
def test_a_version_that_is_there_is_not_refused(it: Scribe, told: dict[str, Any]) -> None:
    it.ask((106.0, 107.0), "a", wanted="3", **told)  # It drains.
    it.ask((6.0, 7.0), "b", wanted="9", **told)  # It is not there.
    it.history.processes.append(Presence("gateway", "", 4.0))
    it.ask((6.0, 7.0), "c", wanted="3", **told)  # Its gateway has just begun.
    assert not promises(it)
    it.ask((16.0, 17.0), "d", wanted="3", **told)
    wrong = "a version that is there is refused" if told is UNKNOWN else "a request for a version that is there failed"
    assert {promise.partition(" for want")[0] for promise in promises(it)} == {wrong}


@pytest.mark.parametrize("version", ["3", "4", None])
def test_a_ledger_that_tells_another_version_than_ran_or_none_is_found_out(it: Scribe, version: str | None) -> None:
    [output] = it.run("a", at=(1.0, 2.0), version="3")
    it.ask((0.0, 3.0), "a", "id", output=output)
    it.history.tellings.append(Telling("the ledger", "acme", "id", version))
    wrong = {"the ledger tells another version"} if version != "3" else set()
    assert promises(it) - {"another version than its name draws"} == wrong


def test_spans_are_joined_and_compared() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert [touches([(0, 2), (3, 5)], *span) for span in ((2.1, 2.9), (2.0, 2.5), (2.5, 3.5), (6, 7), (-2, -1))] == [
        False, True, True, False, False,
    ]  # fmt: skip
