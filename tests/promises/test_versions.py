"""The checker on model versions: allowed histories, and broken ones of each kind."""

import pytest

from headway.core.versions import Versions, position_of
from tests.promises.histories import Scribe
from tests.promises.operation import Presence, Telling
from tests.promises.spans import common, touches, union

BOTH = Versions({"3": 1, "4": 1}, "34", {"3": 1.0, "4": 1.0})
NAMES = [name for name in map(str, range(99)) if BOTH.drawn(position_of("acme", name)) == "3"]
OTHERS = [name for name in map(str, range(99)) if name not in NAMES]
"""Keys and ids that draw 3, and those that draw 4, if both have the same weight."""
DRAINS = "a version that drains runs a new request"
DRAWS = "another version than its name draws"
KEPT = "a kept answer of a version that may not be drawn"
NOT_DRAWN = "an answer of a version that was not drawn"
ANOTHER = "an answer tells another version than ran it"


def rollout(story: str) -> Scribe:
    """Versions 3 and 4 get half of the requests each until 3 drains at 100. Version 5 has no weight."""
    it = Scribe(shares=True)
    it.weigh(v3=1.0, v4=1.0)
    it.weigh(100.0, v3=0.0, v4=1.0)
    for version in "345":
        it.host(version)
    it.write(story)
    return it


DRAINED = "108-109 run a version=3; 106-112 ask a: run0.0; "
"""A request that the version runs after its drain began."""
KEPT_OF_3 = "1-2 run a version=3; 0-3 ask a: run0.0; "


@pytest.mark.parametrize(
    ("story", "broken"),
    [
        ("1-2 run a version=3; 1-2 run b version=4; 0-3 ask a version=3: run0.0; 0-3 ask b version=4: run1.0", ""),
        ("1-2 run a version=3; 0-3 ask a version=4: run0.0", ANOTHER),
        ("1-2 run a version=3; 0-3 ask a wanted=3: run0.0", ""),
        ("1-2 run a version=4; 0-3 ask a wanted=3: run0.0", "a request that names a version is answered by another"),
        ("1-2 run a version=5; 0-3 ask a wanted=5: run0.0", ""),
        ("1-2 run a version=5; 0-3 ask a: run0.0", NOT_DRAWN),
        # A draining version runs what came before.
        ("110-111 run a version=3; 104-112 ask a: run0.0", ""),
        (DRAINED, DRAINS),
        (DRAINED + "99-109 fault gateway paused", ""),
        # Another version only helps one that has no worker.
        (DRAINED + "105-107 fault gpu killed of=host_of_4", ""),
        (DRAINED + "105-107 fault redis paused of=redis", ""),
        (DRAINED + "105-107 fault gpu killed of=another", DRAINS),
        (DRAINED + "105-107 fault worker killed of=host_of_4; 111-112 ask a: run0.0", KEPT),
        # Kept outcomes.
        (
            "1-2 run a version=3; 0-3 ask a wanted=3: run0.0; 4-5 ask a: run0.0",
            "answer to another request, output of a run at another time",
        ),
        (f"1-2 run a version=3; 0-3 ask a key={NAMES[0]}: run0.0; 200-201 ask a key={NAMES[0]}: run0.0", ""),
        ("202-203 run b version=4; 199-204 ask b key=other wanted=4: run0.0", ""),
        (KEPT_OF_3 + f"50-51 ask a id={NAMES[0]}: run0.0", ""),
        (KEPT_OF_3 + f"52-53 ask a id={OTHERS[0]}: run0.0", DRAWS),
        # A key, an id and a list draw one version, and rows any.
        (f"1-2 run a version=3; 0-3 ask a key={NAMES[0]}: run0.0", ""),
        (f"1-2 run a version=3; 0-3 ask a key={OTHERS[0]}: run0.0", DRAWS),
        (f"1-2 run a version=3; 0-3 ask a id={NAMES[0]}: run0.0", ""),
        (f"1-2 run a version=3; 0-3 ask a id={OTHERS[0]}: run0.0", DRAWS),
        (f"1-2 run a b version=3; 0-3 ask a b id={NAMES[0]}: run0.0 run0.1", ""),
        (f"1-2 run a b version=3; 0-3 ask a b id={OTHERS[0]}: run0.0 run0.1", DRAWS),
        # A list reports each version that answered.
        (f"1-2 run a b version=3; 0-3 ask a b id={NAMES[0]} version=3: run0.0 run0.1", ""),
        (f"1-2 run a b version=3; 0-3 ask a b id={NAMES[0]} version=3,4: run0.0 run0.1", ANOTHER),
        *(
            (
                f"1-2 run a version=3; 1-2 run b version=4; 0-3 ask a b id={NAMES[0]} version={told}: run0.0 run1.0",
                DRAWS if told != "3" else f"{ANOTHER}, {DRAWS}",
            )
            for told in ("3,4", "4,3", "3")
        ),
        # A task is run by a version that was drawn when it arrived, or gets the kept outcome of one.
        (f"300-301 run a version=3; 0-1 task a id={NAMES[0]}: accepted; 302-303 poll {NAMES[0]}: run0.0", ""),
        ("300-301 run b version=3; 200-201 task b id=t: accepted; 302-303 poll t: run0.0", DRAINS),
        (KEPT_OF_3 + f"50-51 task a id={NAMES[0]}: accepted; 302-303 poll {NAMES[0]}: run0.0", ""),
        (f"51-52 run b version=4; 50-51 task b id={NAMES[0]} wanted=4: accepted; 302-303 poll {NAMES[0]}: run0.0", ""),
        (KEPT_OF_3 + "200-201 task a id=t: accepted; 302-303 poll t: run0.0", KEPT),
        # An available version is not refused. At 106 it drains, and there is no version 9.
        ("106-107 ask a wanted=3: unknown; 106-107 ask a wanted=3: no-workers", ""),
        ("6-7 ask a wanted=9: unknown; 6-7 ask a wanted=9: no-workers", ""),
        ("16-17 ask a wanted=3: unknown", "a version that is there is refused"),
        ("16-17 ask a wanted=3: no-workers", "a request for a version that is there failed for want of workers"),
    ],
)
def test_a_history_of_versions(story: str, broken: str) -> None:
    assert ", ".join(sorted(rollout(story).broken)) == broken


def test_another_version_helps_where_the_only_host_of_one_has_gone() -> None:
    it = rollout(DRAINED)
    it.history.processes[1].gone = 105.0
    assert not it.broken


@pytest.mark.parametrize(("rows", "wrong"), [(True, set()), (False, {DRAWS})])
def test_rows_are_one_request_of_which_any_version_may_be_drawn(rows: bool, wrong: set[str]) -> None:
    flag = "rows=1" if rows else ""
    it = rollout(f"1-2 run a b version=3; 0-3 ask a b id={OTHERS[0]} {flag}: run0.0 run0.1")
    it.history.operations[-1].chosen = False
    assert it.broken == wrong


def test_a_gateway_that_has_just_begun_may_not_know_of_a_version() -> None:
    it = rollout("6-7 ask c wanted=3: unknown; 6-7 ask c wanted=3: no-workers")
    it.history.processes.append(Presence("gateway", "", 4.0))
    assert not it.broken


@pytest.mark.parametrize("version", ["3", "4", None])
def test_a_ledger_that_tells_another_version_than_ran_or_none_is_found_out(version: str | None) -> None:
    it = rollout(f"1-2 run a version=3; 0-3 ask a id={NAMES[0]}: run0.0")
    it.history.tellings.append(Telling("the ledger", "acme", NAMES[0], version))
    assert it.broken == ({"the ledger tells another version"} if version != "3" else set())


def test_spans_are_joined_and_compared() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    compared = [((2.1, 2.9), False), ((2.0, 2.5), True), ((2.5, 3.5), True), ((6, 7), False), ((-2, -1), False)]
    for (begin, end), touched in compared:
        assert touches([(0, 2), (3, 5)], begin, end) == touched
