"""What every Identity promises, and what a file of keys must say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import SettingError
from headway.identity.keys_file import KeysFile
from headway.identity.open import OpenIdentity
from headway.model import Caller
from headway.ports import Identity

TIERS = ("enterprise", "paid", "free")
ODD = (b"", b"Bearer", b"Bearer ", b"Basic dXNlcjpwYXNz", b"\xff\xfe", b"Bearer " + b"x" * 100_000, b"Bearer a b")


def entry(key: str, user: str = "ada", more: str = "") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nsha256 = "{digest}"\nuser = "{user}"\ntenant = "acme"\ntier = "paid"\n{more}\n'


def keys_file(folder: Path, text: str | bytes) -> KeysFile:
    path = folder / "keys.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return KeysFile(path, TIERS)


MAKERS: dict[str, Callable[[Path], Identity]] = {
    "open": lambda folder: OpenIdentity(1),
    "keys_file": lambda folder: keys_file(folder, entry("k1") + entry("k2", "bob")),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_always_says_the_same_of_the_same_and_never_raises(maker: str, tmp_path: Path) -> None:
    identity = MAKERS[maker](tmp_path)
    for authorization in (*ODD, b"Bearer k1", b"Bearer k2"):
        first = identity.identify(authorization)
        assert first == identity.identify(authorization)
        if first is not None:
            assert isinstance(first, Caller)
            assert 0 <= first.tier < len(TIERS)
            assert first.user and first.tenant


def test_open_takes_everybody() -> None:
    assert OpenIdentity(2).identify(b"") == Caller(user="anonymous", tenant="default", tier=2)
    assert OpenIdentity(2).identify(b"Bearer whatever") == OpenIdentity(2).identify(b"")


@pytest.mark.parametrize("authorization", [b"Bearer k1", b"bearer k1", b"BEARER k1", b"Bearer  k1 "])
def test_a_key_is_known_by_its_digest(authorization: bytes, tmp_path: Path) -> None:
    identity = keys_file(tmp_path, entry("k1", more="rate = 60\nburst = 5") + entry("k2", "bob"))
    caller = identity.identify(authorization)
    assert caller is not None
    assert (caller.user, caller.tenant, caller.tier, caller.rate, caller.burst) == ("ada", "acme", 1, 60.0, 5.0)
    other = identity.identify(b"Bearer k2")
    assert other is not None
    assert other.user == "bob"
    assert other.key != caller.key
    assert len(identity) == 2


@pytest.mark.parametrize("authorization", [*ODD, b"k1", b"Bearer K1", b"Bearer k1x", b"Token k1", b"Bearerk1"])
def test_nobody_else_is_known(authorization: bytes, tmp_path: Path) -> None:
    assert keys_file(tmp_path, entry("k1")).identify(authorization) is None


@pytest.mark.parametrize(
    ("more", "rate", "burst"),
    [("", 1000.0, 1000 / 6), ("rate = 0", 0.0, 1.0), ("rate = 60", 60.0, 10.0), ("rate = 2.5", 2.5, 1.0)],
)
def test_the_usual_rate(more: str, rate: float, burst: float, tmp_path: Path) -> None:
    caller = keys_file(tmp_path, entry("k1", more=more)).identify(b"Bearer k1")
    assert caller is not None
    assert (caller.rate, caller.burst) == (rate, burst)


@pytest.mark.parametrize(
    ("text", "setting", "says"),
    [
        (b"\xff", "keys", "not valid TOML"),
        ("[[keys]", "keys", "not valid TOML"),
        ("", "keys", "keys"),
        ("key = 3", "keys", "key"),
        ("keys = 3", "keys", "Expected `array`"),
        (entry("a") + '[[keys]]\nuser = "x"', "keys[2]", "sha256"),
        (entry("a") + entry("b", more="admin = true"), "keys[2]", "admin"),
        (entry("a", more='rate = "fast"'), "keys[1]", "rate"),
        (entry("a", more="rate = -1"), "keys[1].rate", "between"),
        (entry("a", more="rate = nan"), "keys[1].rate", "between"),
        (entry("a", more="burst = inf"), "keys[1].burst", "between"),
        (entry("a") + entry("a", "eve"), "keys[2].sha256", "keys[1]"),
        (entry("a").replace('"paid"', '"gold"'), "keys[1].tier", "no tier"),
        (entry("a", user=""), "keys[1].user", "printable"),
        (entry("a", user="a\\nb"), "keys[1].user", "printable"),
        (entry("a").replace('sha256 = "', 'sha256 = "x'), "keys[1].sha256", "64 hexadecimal digits"),
    ],
)
def test_a_wrong_file_says_where_and_why(text: str | bytes, setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        keys_file(tmp_path, text)
    assert setting in caught.value.setting
    assert says in f"{caught.value.setting} {caught.value.reason}"
    assert caught.value.mend


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        KeysFile(tmp_path, TIERS)


def test_a_key_pasted_in_place_of_its_digest_is_not_repeated(tmp_path: Path) -> None:
    secret = "canary-0123456789"
    for text in (entry("a").replace(hashlib.sha256(b"a").hexdigest(), secret), f'[[keys]]\nsha256 = "{secret}"'):
        with pytest.raises(SettingError) as caught:
            keys_file(tmp_path, text)
        assert secret not in str(caught.value)
