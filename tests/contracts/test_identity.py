"""Promises of every Identity."""

from collections.abc import Callable

import pytest

from headway.config import Settings
from headway.identity.api_keys.cache import ApiKeyCache
from headway.identity.principals import AnonymousIdentity, CombinedIdentity
from headway.model import ApiKey, Principal
from headway.ports import Identity, KeyIdentity
from headway.runtime.counters import StoreCounts
from tests.identity.store import StoreInMemory
from tests.identity.writing import digest_of, id_of, key_of
from tests.virtual_time import run

ODD = (
    b"",
    b"Bearer",
    b"Bearer ",
    b"Basic dXNlcjpwYXNz",
    b"\xff\xfe",
    b"Bearer " + b"x" * 100_000,
    b"Bearer a b",
    b"Bearer a.b.c",
    b"Bearer hw_live_",
    b"Bearer hw_live_" + b"0" * 41,
)
GOOD = tuple(f"Bearer {key_of(name)}".encode() for name in ("k1", "k2"))


def ring() -> ApiKeyCache:
    keys = [
        ApiKey(id=id_of(name), digest=digest_of(name), user=user, tenant="acme", tier="paid", created_at=0.0)
        for name, user in (("k1", "ada"), ("k2", "bob"))
    ]
    made = ApiKeyCache(StoreInMemory(*keys), Settings(), StoreCounts(), lambda: 0.0, lambda: 0.0)

    async def opened(clock: Callable[[], float]) -> None:
        await made.open()

    run(opened)
    return made


MAKERS: dict[str, Callable[[], Identity]] = {
    "open": lambda: AnonymousIdentity(1),
    "keys": ring,
    "either": lambda: CombinedIdentity(ring(), ring()),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_always_says_the_same_of_the_same_and_never_raises(maker: str) -> None:
    identity = MAKERS[maker]()
    for authorization in (*ODD, *GOOD):
        first = identity.identify(authorization)
        assert first == identity.identify(authorization)
        if first is not None:
            assert isinstance(first, Principal)
            assert 0 <= first.tier < len(Settings().tier_names)
            assert first.user and first.tenant
    assert all(identity.identify(authorization) is not None for authorization in GOOD)


def test_without_keys_everybody_is_the_same_anonymous_user() -> None:
    assert AnonymousIdentity(2).identify(b"") == Principal(user="anonymous", tenant="default", tier=2)
    assert AnonymousIdentity(2).identify(b"Bearer whatever") == AnonymousIdentity(2).identify(b"")


@pytest.mark.parametrize("maker", ["keys", "either"])
def test_a_key_has_the_same_principal_by_its_id(maker: str) -> None:
    identity = MAKERS[maker]()
    assert isinstance(identity, KeyIdentity)
    assert identity.principal_of(id_of("k1")) == identity.identify(GOOD[0])
    assert identity.principal_of("unknown") is None
