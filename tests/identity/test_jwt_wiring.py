"""Identities of a process, with issuers named and not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headway.app import stores
from headway.config import Settings
from headway.errors import SettingError
from headway.identity.jwt.tokens import Tokens
from headway.identity.principals import CombinedIdentity
from headway.runtime.counters import StoreCounts
from tests.identity.issuing import ISSUER, jwk, jwks


@pytest.fixture
def issuers(tmp_path: Path) -> str:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk("ES256")))
    path = tmp_path / "issuers.toml"
    path.write_text(
        f'[[issuers]]\nissuer = "{ISSUER}"\naudience = "headway"\njwks = "jwks.json"\nalgorithm = "ES256"\n'
    )
    return str(path)


async def test_issuers_without_keys_make_an_identity_of_tokens(issuers: str) -> None:
    identity, resources = stores.make_identity(Settings(jwt=issuers), StoreCounts())
    assert isinstance(identity, Tokens)
    assert list(resources) == [identity]
    for resource in resources:
        await resource.open()
    for resource in resources:
        await resource.close()


async def test_issuers_beside_keys_make_an_identity_of_both(issuers: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("keys = []\n")
    identity, resources = stores.make_identity(Settings(jwt=issuers, keys=str(keys)), StoreCounts())
    assert isinstance(identity, CombinedIdentity)
    assert any(isinstance(resource, Tokens) for resource in resources)


@pytest.mark.parametrize("package", ["jwt", "cryptography"])
def test_without_what_checks_tokens_naming_issuers_is_a_bad_setting(
    package: str, issuers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or ".identity.jwt." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        SettingError, match=r"PyJWT\[crypto\], which is not installed. Run pip install 'PyJWT\[crypto\]>="
    ):
        stores.make_identity(Settings(jwt=issuers), StoreCounts())
