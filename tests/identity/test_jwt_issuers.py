"""Issuer files: the accepted forms, and how a process uses them."""

import sys
from pathlib import Path

import pytest

from headway.app import stores
from headway.config import Settings
from headway.errors import SettingError
from headway.identity.jwt.issuers import Issuer, read_issuers
from headway.identity.jwt.tokens import Tokens
from headway.identity.principals import CombinedIdentity
from headway.runtime.counters import StoreCounts
from tests.identity.issuing import ISSUER, jwk, jwks

TIERS = ("enterprise", "paid", "free")


def row(name: str = "https://a.example/", more: str = "", **changed: str) -> str:
    usual = {"audience": "headway", "jwks": "https://a.example/jwks", "algorithm": "RS256"}
    members = {"issuer": f'"{name}"', **{key: f'"{value}"' for key, value in usual.items()}, **changed}
    return "[[issuers]]\n" + "\n".join(f"{key} = {value}" for key, value in members.items() if value) + f"\n{more}\n"


def read(folder: Path, text: str) -> list[Issuer]:
    path = folder / "issuers.toml"
    path.write_text(text)
    return read_issuers(path, TIERS)


def test_an_issuer_that_sets_nothing_has_defaults_and_its_keys_are_beside_the_file(tmp_path: Path) -> None:
    (one,) = read(tmp_path, row())
    assert (one.leeway_s, one.user_claim, one.tenant_claim, one.tier_claim) == (30.0, "sub", "tenant", "tier")
    assert (one.tenant, one.default_tier, one.models_claim) == (None, None, None)
    (one,) = read(tmp_path, row(jwks='"keys/jwks.json"'))
    assert one.jwks == str(tmp_path / "keys" / "jwks.json")
    assert not one.remote


@pytest.mark.parametrize(
    ("text", "setting", "says"),
    [
        ("", "jwt", "issuers"),
        ("issuers = []", "jwt", "no issuer"),
        (row() + '[[issuers]]\nissuer = "x"', "issuers[2]", "audience"),
        (row(more="admin = true"), "issuers[1]", "admin"),
        (row(algorithm=""), "issuers[1]", "algorithm"),
        (row(algorithm='["RS256", "ES256"]'), "issuers[1]", "algorithm"),
        (row(algorithm='"HS256"'), "issuers[1].algorithm", "not supported"),
        (row(algorithm='"none"'), "issuers[1].algorithm", "not supported"),
        (row(issuer='""'), "issuers[1].issuer", "printable"),
        (row(audience='"a\\nb"'), "issuers[1].audience", "printable"),
        (row(jwks='""'), "issuers[1].jwks", "empty"),
        (row(jwks='"ftp://a.example/jwks"'), "issuers[1].jwks", "is not a URL"),
        (row(jwks='"https://a.example:x/"'), "issuers[1].jwks", "is not a URL"),
        (row(more="leeway_s = 301"), "issuers[1].leeway_s", "between"),
        (row(more="leeway_s = nan"), "issuers[1].leeway_s", "between"),
        (row(more='leeway_s = "30"'), "issuers[1]", "leeway_s"),
        (row(more='user_claim = ""'), "issuers[1].user_claim", "printable"),
        (row(more='default_tier = "gold"'), "issuers[1].default_tier", "is not a tier"),
        (row(more='tenant = "acme"\ntenant_prefix = "a/"'), "issuers[1].tenant", "excludes tenant_claim"),
        (row(more='tenant = "acme"\ntenant_claim = "org"'), "issuers[1].tenant", "excludes tenant_claim"),
        (row(more=f'tenant_prefix = "{"x" * 65}"'), "issuers[1].tenant_prefix", "at most 64"),
        (row() + row(), "issuers[2].issuer", "issuers[1]"),
    ],
)
def test_a_wrong_file_says_where_and_why(text: str, setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, text)
    assert setting in caught.value.setting
    assert says in f"{caught.value.setting} {caught.value.reason}"
    assert caught.value.hint


def test_a_password_in_a_url_is_refused_and_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, row(jwks='"https://ada:canary@a.example/jwks"'))
    assert "canary" not in str(caught.value)


APART = [
    ('tenant_prefix = "a/"', 'tenant_prefix = "b/"'),
    ('tenant = "acme"', 'tenant = "globex"'),
    ('tenant = "acme"', 'tenant_prefix = "b/"'),
    ("shared_tenants = true", "shared_tenants = true"),
]
MEETING = [
    ("", ""),
    ('tenant_prefix = "a/"', ""),
    ('tenant_prefix = "a/"', 'tenant_prefix = "a/b/"'),
    ('tenant = "acme"', ""),
    ('tenant = "acme"', 'tenant = "acme"'),
    ('tenant = "b/acme"', 'tenant_prefix = "b/"'),
    ("shared_tenants = true", ""),
]


@pytest.mark.parametrize(("one", "other"), APART)
def test_issuers_whose_tenants_cannot_meet(one: str, other: str, tmp_path: Path) -> None:
    assert len(read(tmp_path, row("a", one) + row("b", other))) == 2
    assert len(read(tmp_path, row("b", other) + row("a", one))) == 2


@pytest.mark.parametrize(("one", "other"), MEETING)
def test_issuers_whose_tenants_could_meet_are_refused(one: str, other: str, tmp_path: Path) -> None:
    for first, second in ((one, other), (other, one)):
        with pytest.raises(SettingError, match=r"tenants of issuers\[1\]") as caught:
            read(tmp_path, row("a", first) + row("b", second))
        named, _, value = second.partition(" = ") if second.startswith("tenant") else ("tenant_prefix", "", '""')
        assert caught.value.setting.endswith(f": issuers[2].{named}")
        assert repr(caught.value.value) == value.replace('"', "'")


@pytest.fixture
def issuers(tmp_path: Path) -> str:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk("ES256")))
    path = tmp_path / "issuers.toml"
    path.write_text(row(ISSUER, jwks='"jwks.json"', algorithm='"ES256"'))
    return str(path)


async def test_issuers_make_an_identity_of_tokens_and_beside_keys_one_of_both(issuers: str, tmp_path: Path) -> None:
    identity, resources = stores.make_identity(Settings(jwt=issuers), StoreCounts())
    assert isinstance(identity, Tokens)
    assert list(resources) == [identity]
    await identity.open()
    await identity.close()
    keys = tmp_path / "keys.toml"
    keys.write_text("keys = []\n")
    identity, resources = stores.make_identity(Settings(jwt=issuers, keys=str(keys)), StoreCounts())
    assert isinstance(identity, CombinedIdentity)
    assert any(isinstance(resource, Tokens) for resource in resources)


@pytest.mark.parametrize("package", ["jwt", "cryptography"])
def test_without_a_checker_issuers_are_refused(package: str, issuers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or ".identity.jwt." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingError, match=r"which is not installed. Run pip install 'PyJWT\[crypto\]>="):
        stores.make_identity(Settings(jwt=issuers), StoreCounts())
