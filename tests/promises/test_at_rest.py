"""The checker on what is left in Redis: kinds that may be, and planted keys that may not."""

from __future__ import annotations

import pytest

from tests.promises.checker import check
from tests.promises.evidence import Key
from tests.promises.histories import Scribe

LEFT = [
    Key("headway:{fleet}:w", "hash", 4, 3600.0),
    Key("headway:{fleet}:row:1764000000", "hash", 29, 1800.0),
    Key("headway:{limits}:ko:acme", "zset", 400, 89_998.0),
    Key("headway:{id:0000bc91d846dfb1079c5698a152f2b2}:o", "string", 14, 3542.0),
    Key("headway:{default:0}:q", "string", 880, 2988.0),
    Key("headway:{default:0}@3:k:i\0acme\0key: with colons", "string", 200, 3598.0),
    Key("headway:{default:0}:r:gateway-7", "stream", 0, 118.0),
    Key("headway:{default:0}:z", "hash", 19, 604_798.0),
    Key("headway:{default:0}:P:token", "string", 90_000, 40.0),
    Key("headway:{default:0}:R:shared", "string", 90_000, 230.0),
    Key("headway:{default:0}:Q:shared", "set", 1, 230.0),
    Key("headway:{default:0}:R:kept", "string", 90_000, 3800.0),
    Key("headway:{default:0}:K:kept", "set", 2, 3800.0),
]
"""What a fleet leaves."""


def found(*keys: Key) -> set[str]:
    """Promises that are broken by keys beside those that may be left."""
    it = Scribe()
    it.history.evidence.keys = [*LEFT, *keys]
    return {violation.promise for violation in check(it.history)}


def test_what_a_fleet_leaves_may_be_left() -> None:
    assert not found()


@pytest.mark.parametrize(
    "name",
    [
        "headway:{default:0}:other",
        "headway:{fleet}:q",
        "headway:{limits}:z",
        "headway:stray",
        "headway:{default:0}:l12",
        "headway:{id:0000bc91d846dfb1079c5698a152f2b2}:q",
    ],
)
def test_a_planted_key_of_no_kind_is_found_out(name: str) -> None:
    assert found(Key(name, "string", 1, 60.0)) == {"a key in Redis of a kind that nobody knows"}


def test_a_key_without_an_end_is_found_out() -> None:
    assert found(Key("headway:{default:0}:R:token", "string", 90_000, -1.0)) == {"a key in Redis without an end"}


@pytest.mark.parametrize(
    "key",
    [
        Key("headway:{default:0}:q", "string", 880, 7200.0),
        Key("headway:{default:0}:R:of-none", "string", 90_000, 3800.0),
        Key("headway:{default:0}@3:R:kept", "string", 90_000, 3800.0),
        Key("headway:{default:0}:Q:kept", "set", 1, 3800.0),
    ],
    ids=str,
)
def test_a_key_that_ends_too_late_is_found_out(key: Key) -> None:
    assert found(key) == {"a key in Redis that ends too late"}


@pytest.mark.parametrize("kind", ["l2", "a1", "x", "y", "s", "p", "e", "v", "v:flight", "vs", "vd", "d", "tw", "b"])
def test_what_must_be_empty_when_all_is_answered_is_found_out(kind: str) -> None:
    assert found(Key(f"headway:{{default:0}}@3:{kind}", "hash", 1, 3000.0)) == {"a key in Redis that should be empty"}
