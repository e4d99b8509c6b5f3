import random
from collections import Counter

import pytest

from headway.core.versions import NoWeights, Versions, position_of, read_weights, versions_of
from headway.model import ModelReport, WorkerInfo, WorkerStatus


def worker(version: str, status: WorkerStatus = WorkerStatus.HEALTHY, id: str = "") -> WorkerInfo:
    runs = ModelReport(version)
    return WorkerInfo(worker_id=id or version, model="m", status=status, runs=runs, version=version)


def drawn(versions: Versions, count: int = 10_000) -> Counter[str]:
    return Counter(versions.drawn((number + 0.5) / count) for number in range(count))


@pytest.mark.parametrize(
    ("text", "weights"), [("", {}), ("3=95,4=5", {"3": 95.0, "4": 5.0}), ("3=0, 4=0.5", {"3": 0.0, "4": 0.5})]
)
def test_weights_are_read(text: str, weights: dict[str, float]) -> None:
    assert read_weights(text) == weights


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3", "'3' is not VERSION=WEIGHT"),
        (" v1.2 = 1", "v1.2"),
        ("3=-1", "'3=-1' is not VERSION=WEIGHT"),
        ("3=1,3=2", "names the version '3' twice"),
        ("3=0,4=0", "gives no version a weight above 0"),
        ("=5", "'=5' is not VERSION=WEIGHT"),
    ],
)
def test_what_are_no_weights_is_said(text: str, why: str) -> None:
    with pytest.raises(NoWeights, match=why):
        read_weights(text)


def test_requests_are_shared_by_weight_whatever_the_slots_and_without_weights_by_slots() -> None:
    versions = Versions({"3": 1, "4": 7}, ("3", "4"), read_weights("3=95,4=5"))
    assert drawn(versions) == {"3": 9500, "4": 500}
    assert versions.only is None
    assert drawn(Versions({"3": 3, "4": 1}, ("3", "4"), {})) == {"3": 7500, "4": 2500}


def test_weights_that_are_all_0_only_take_versions_out_as_long_as_there_are_others() -> None:
    out = {"4": 0.0}
    both = Versions({"2": 1, "3": 3, "4": 4}, ("2", "3", "4"), out)
    assert drawn(both) == {"2": 2500, "3": 7500}
    assert not both.takes("4")
    assert drawn(Versions({"4": 4}, ("4",), out)) == {"4": 10_000}


def test_weights_count_among_the_live_versions() -> None:
    weights = read_weights("3=95,4=5,5=0")
    assert Versions({"3": 1, "5": 1}, ("3", "4", "5"), weights).only == "3"
    assert Versions({"4": 1}, ("4",), weights).only == "4"
    assert Versions({"5": 1}, ("4", "5"), weights).only == "4", "it is there, and may be healthy again"
    assert drawn(Versions({"5": 1}, ("5",), weights)) == {"3": 9500, "4": 500}, "nothing new goes to a version with 0"


def test_a_version_takes_named_requests_unless_its_weight_is_0() -> None:
    versions = Versions({"3": 1, "4": 1, "5": 1}, ("3", "4", "5", "6"), read_weights("3=0,4=1"))
    assert [version for version in ("3", "4", "5", "6", "7") if versions.takes(version)] == ["4", "5", "6"]
    assert versions.open == ["4", "5", "6"]
    assert versions.only == "4", "what the weights leave out is for who names it"


def test_a_position_is_always_the_same_and_evenly_spread() -> None:
    assert position_of("acme", "k") == position_of("acme", "k") != position_of("acme", "l")
    rng = random.Random(5)
    positions = [position_of("t", str(rng.random())) for _ in range(4000)]
    assert all(0.0 <= position < 1.0 for position in positions)
    assert min(Counter(int(position * 10) for position in positions).values()) > 300


def test_versions_are_those_of_workers_that_claim_for_one() -> None:
    assert versions_of([], {}) is None
    assert versions_of([worker(""), worker("3", WorkerStatus.OFFLINE)], {}) is None
    some = [worker("3"), worker("3", id="b"), worker("4", WorkerStatus.DEGRADED), worker("5", WorkerStatus.OFFLINE)]
    versions = versions_of(some, {})
    assert versions is not None
    assert (versions.only, versions.open) == ("3", ["3", "4"])
    ill = versions_of([worker("4", WorkerStatus.DEGRADED)], {})
    assert ill is not None
    assert ill.only == "4", "who waits for it may see it healthy again"
