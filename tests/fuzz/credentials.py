"""Authentication: keys, tokens, key sets, and files of trusted issuers."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import jwt
import msgspec

from headway.config import Settings
from headway.errors import RequestError, SettingError
from headway.identity.api_keys import credential, file
from headway.identity.jwt.issuers import ALGORITHMS, read_issuers
from headway.identity.jwt.keysets import KeySet, Unreadable, read_keys
from headway.identity.jwt.tokens import Tokens
from headway.identity.principals import CombinedIdentity
from headway.identity.tables import is_name
from headway.model import ApiKey, Principal
from tests.identity.issuing import ISSUER, NOW, claims, issuer, jwk, jwks, private_key, token

_SETTINGS = Settings()
_TIERS = _SETTINGS.tier_names


class _Shelf:
    every = 300.0

    async def read(self) -> bytes | None:
        return jwks(jwk("EdDSA"), jwk("ES256", "other"))


class _NoKeys:
    def identify(self, authorization: bytes) -> Principal | None:
        return None


def _tokens() -> Tokens:
    tokens = Tokens([KeySet(issuer("EdDSA", models_claim=None), _Shelf(), lambda: 0.0)], _SETTINGS, lambda: NOW, 100)
    asyncio.run(tokens.open())
    return tokens


_TOKENS = _tokens()
_EITHER = CombinedIdentity(_NoKeys(), _TOKENS)
_GENUINE = frozenset(token("EdDSA", jti=str(number)) for number in range(3))

TOKENS = (
    *(b"Bearer " + text for text in sorted(_GENUINE)),
    b"Bearer " + token("EdDSA", "stranger", header={"kid": "first"}),
    b"Bearer " + token("EdDSA", exp=1),
    b"Bearer " + token("EdDSA").replace(b"eyJhbGciOiJFZERTQSI", b"eyJhbGciOiJFUzI1NiI"),
)
TOKEN_WORDS = (
    b".", b"eyJhbGciOiJub25lIn0", b"eyJhbGciOiJIUzI1NiJ9", b"eyJ", b"=", b"-", b"_", b"bearer ", b"Basic ", b"hw_live_",
    b"eyJhbGciOiJFZERTQSIsImNyaXQiOlsiYjY0Il0sImI2NCI6ZmFsc2V9",
)  # fmt: skip

CLAIMS = (
    json.dumps(claims()).encode(),
    json.dumps(claims(nbf=NOW, iat=NOW - 1.5, aud=["headway", "x"], models=["a"])).encode(),
    json.dumps(claims(sub="ädä", extra={"a": [1, 2, {"b": "c"}]}), ensure_ascii=False).encode(),
)
CLAIM_WORDS = (
    b'"iss":', b'"aud":', b'"sub":', b'"exp":', b'"nbf":', b'"iat":', b'"tenant":', b'"tier":', b'"models":', b"1800000600",
    b'"headway"', b'"paid"', b"[]", b"{}", b'""', b'"' + ISSUER.encode() + b'"', b"[" * 2000, b'{"a":' * 1000,
)  # fmt: skip

_KEY = credential.generate(credential.LIVE, bytes(range(32))).encode()
KEYS = (
    _KEY,
    credential.generate(credential.LIVE, b"\xff" * 32).encode(),
    credential.generate(credential.SERVICE, bytes(32)).encode(),
)
KEY_WORDS = (b"hw_live_", b"hw_svc_", b"_", b"Bearer ", "٣".encode(), b"\n")

KEY_SETS = (
    jwks(jwk("EdDSA"), jwk("ES256", "other"), {"kty": "RSA", "kid": "third", "n": "x" * 342, "e": "AQAB"}),
    jwks(jwk("ES256", use="sig", alg="ES256", key_ops=["verify"])),
)
KEY_SET_WORDS = (
    b'"kty":', b'"EC"', b'"RSA"', b'"OKP"', b'"crv":', b'"P-256"', b'"Ed25519"', b'"x":', b'"y":', b'"n":', b'"e":', b'"AQAB"',
    b'"AQ"', b'"kid":', b'"use":', b'"alg":', b'"key_ops":', b'"keys":', b"null", b"{}", b'"d":"AA"', b'"oct"', b'"k":',
)  # fmt: skip

ISSUERS = (
    b'[[issuers]]\nissuer = "https://a/"\naudience = "h"\njwks = "https://a/jwks"\nalgorithm = "RS256"\nleeway_s = 30\n',
    (
        b'[[issuers]]\nissuer = "b"\naudience = "h"\njwks = "b.json"\nalgorithm = "EdDSA"\ntenant_prefix = "b/"\n'
        b'default_tier = "free"\nmodels_claim = "m"\n[[issuers]]\nissuer = "c"\naudience = "h"\njwks = "http://c:1/x"\n'
        b'algorithm = "ES256"\ntenant = "c"\n'
    ),
)
KEY_FILES = (
    (
        b'[[keys]]\nid = "4hT9bLq2XwZ0"\nsha256 = "%b"\nuser = "u"\ntenant = "t"\ntier = "paid"\nrate = 60\nburst = 5\n'
        b'models = ["a", "b"]\ncreated_at = 2026-11-01T12:00:00Z\nexpires_at = 1800000000\nreplaces = "4hT9bLq2XwZ1"\n'
    )
    % sha256(b"x").hexdigest().encode(),
)
TOML_WORDS = (
    b"[[issuers]]\n", b"[[keys]]\n", b"[issuers]\n", b'"""', b"'''", b" = ", b"[", b"]", b"{", b"}", b"nan", b"inf", b"1979-05-27T07:32:00Z",
    b"leeway_s = ", b"tenant_prefix = ", b"shared_tenants = true\n", b"http://", b"https://[", b"://", b"@", b"a.b.c = 1\n",
    b"\\U0010ffff", b"x = 1\n", b"[" * 500, b"a." * 500, b"rate = ", b"sha256 = ",
    b"9999-12-31T23:59:59-23:59", b"0001-01-01T00:00:00+23:59", b"expires_at = ", b"1e300", b"-1", b"user = ", b"\\u0085",
)  # fmt: skip


def check_key(data: bytes) -> None:
    """Check that a key is only parsed in its one valid form."""
    found = credential.parse(data)
    if found is not None:
        id, secret = found
        assert credential.is_id(id)
        assert data.startswith(b"hw_live_%b_%b" % (id.encode(), secret))
        assert (len(data), len(secret)) == (len(_KEY), 22)
        assert data.isascii()


def check_token(data: bytes) -> None:
    """Check that only genuine tokens are accepted."""
    try:
        principal = _EITHER.identify(data)
    except RequestError as exc:
        assert exc.code in ("UNAUTHENTICATED", "SERVICE_OVERLOADED")
        return
    if principal is not None:
        assert data[7:].strip() in _GENUINE
        assert (principal.user, principal.tenant, principal.tier) == ("ada", "acme", 1)
    assert len(_TOKENS) <= 100


_HEADER = b"eyJhbGciOiJFZERTQSIsImtpZCI6ImZpcnN0In0"
_EDDSA = jwt.algorithms.get_default_algorithms()["EdDSA"]


def check_claims(data: bytes) -> None:
    """Check that callers are valid, whatever claims an issuer signs."""
    body = _HEADER + b"." + jwt.utils.base64url_encode(data)
    signature = jwt.utils.base64url_encode(_EDDSA.sign(body, private_key("EdDSA")))
    try:
        principal = _TOKENS.identify(b"Bearer " + body + b"." + signature)
    except RequestError as exc:
        assert exc.code == "UNAUTHENTICATED"
        return
    if principal is not None:
        assert is_name(principal.user)
        assert is_name(principal.tenant)
        said = json.loads(data)
        assert said["iss"] == ISSUER
        assert _TIERS[principal.tier] == said["tier"]
        assert said["exp"] > NOW - 30


def check_jwks(data: bytes) -> None:
    """A key set has keys for the requested algorithm, or is unreadable."""
    for algorithm in ALGORITHMS:
        try:
            keys = read_keys(data, algorithm)
        except Unreadable as exc:
            assert str(exc).isprintable()
        else:
            assert all(key.jwk.algorithm_name == algorithm for key in keys.values())


LARGEST_FILE = 4096
"""Bytes. The files are the operator's own, and the standard library takes quadratic time for long dotted names."""


class Files:
    """Checks each input as a file at a path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check_issuers(self, data: bytes) -> None:
        self._path.write_bytes(data[:LARGEST_FILE])
        try:
            issuers = read_issuers(self._path, _TIERS)
        except SettingError as exc:
            assert exc.reason
            assert exc.hint
        else:
            assert issuers
            assert all(one.algorithm in ALGORITHMS and 0 <= one.leeway_s <= 300 for one in issuers)

    def check_keys(self, data: bytes) -> None:
        self._path.write_bytes(data[:LARGEST_FILE])
        try:
            keys = file._parsed(self._path)
        except SettingError as exc:
            assert exc.reason
            assert exc.hint
            return
        self._path.write_text(file._written(list(keys.values())), encoding="utf-8")
        again = file._parsed(self._path)
        assert {id: _whole(key) for id, key in again.items()} == {id: _whole(key) for id, key in keys.items()}


def _whole(key: ApiKey) -> ApiKey:
    """Drop fractions of a microsecond, which a file can't hold."""
    end = None if key.expires_at is None else round(key.expires_at)
    return msgspec.structs.replace(key, created_at=round(key.created_at), expires_at=end)
