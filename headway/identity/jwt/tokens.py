"""Authentication by JSON Web Token.

A token only selects its issuer. The issuer's configuration determines the source of keys, and the algorithm, which `alg` must match.
Keys in the token and links to keys (jku, x5u, jwk) are ignored. Tokens with critical extensions (crit) are refused, as RFC 7515
requires of a receiver that doesn't understand them.

Valid tokens are remembered by their SHA-256. They then cost only a lookup, until they expire or their key is removed from
the issuer's key set. Clients only learn that a token is invalid or expired. The debug log says why, without quoting it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from binascii import a2b_base64
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import jwt
import msgspec

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, SettingError, Unauthenticated
from headway.identity.jwt.issuers import ALGORITHMS, Issuer
from headway.identity.jwt.keysets import Key, KeySet
from headway.identity.principals import make_principal
from headway.identity.tables import check_model_limit, is_name
from headway.model import ModelLimit, Principal
from headway.runtime.logger import get_logger
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

MAX_TOKEN = 8192  # Maximum size in bytes of a header value to parse.
REMEMBERED = 10_000  # Maximum number of tokens to remember. The least recently used are dropped first.
LATEST = 1e12  # Latest time in a claim, in Unix seconds.

_FORM = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")
_VERIFIERS = {algorithm: jwt.PyJWS(algorithms=[algorithm]) for algorithm in ALGORITHMS}
_sha256 = hashlib.sha256


class _TokenRefused(Exception):
    """The token is invalid. The message says why, and contains no part of the token."""


class _Expired(_TokenRefused):
    """The token was valid, but has expired."""


class _ModelLimit(msgspec.Struct):
    rate: float
    burst: float | None = None


class _Known(msgspec.Struct, frozen=True):
    """A token that is valid `until` a Unix time in seconds, as long as its key is live."""

    principal: Principal
    key: Key
    until: float


class Tokens:
    """Identity for JSON Web Tokens, of which it remembers up to `most`. `now` returns Unix time. `again` rereads the
    issuers."""

    def __init__(
        self,
        keysets: Iterable[KeySet],
        settings: Settings,
        now: Callable[[], float],
        most: int = REMEMBERED,
        again: Callable[[], Iterable[KeySet]] | None = None,
    ) -> None:
        self._keysets = {keyset.issuer.issuer: keyset for keyset in keysets}
        self._settings, self._now, self._most = settings, now, most
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._again = again
        self._supervisor: Supervisor | None = None

    def __len__(self) -> int:
        return len(self._known)

    async def open(self) -> None:
        """Read the key sets. Raises SettingError if a file has none. Until a URL returns one, its issuer's tokens get
        503."""
        await asyncio.gather(*(keyset.open() for keyset in self._keysets.values()))

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        for name, keyset in self._keysets.items():
            supervisor.start(f"keys of {name}", keyset.run)

    @property
    def rereads(self) -> str:
        return "issuers" if self._again is not None else ""

    async def reread(self) -> None:
        """Reread the issuers and their keys. Tokens of a removed or changed issuer become invalid. Raises SettingError."""
        if self._again is None:
            return
        known, fresh = self._keysets, {}
        for keyset in await asyncio.to_thread(self._again):
            name = keyset.issuer.issuer
            before = known.get(name)
            if before is not None and before.issuer == keyset.issuer:
                fresh[name] = before
                await before.refresh()
            else:
                fresh[name] = keyset
                await keyset.open()
        self._keysets = fresh
        for name, keyset in known.items():
            if fresh.get(name) is not keyset:
                keyset.retire()
        for name, keyset in fresh.items():
            if known.get(name) is not keyset and self._supervisor is not None:
                self._supervisor.start(f"keys of {name}", keyset.run)

    async def close(self) -> None:
        self._known.clear()

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal of a header value (`Bearer TOKEN`), or None if the token is invalid. Raises RequestError if
        the token has expired, or its issuer's keys are being read."""
        if len(authorization) > MAX_TOKEN or authorization[:7].lower() != b"bearer ":
            return None
        token = authorization[7:].strip()
        digest = _sha256(token).digest()
        now = self._now()
        known = self._known.get(digest)
        if known is not None:
            if known.key.live and now < known.until:
                self._known.move_to_end(digest)
                return known.principal
            del self._known[digest]
        try:
            known = self._verified(token, now)
        except _Expired:
            log.debug("token refused", reason="it has expired")
            raise Unauthenticated("the credential has expired") from None
        except _TokenRefused as exc:
            log.debug("token refused", reason=str(exc))
            return None
        self._known[digest] = known
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return known.principal

    def _verified(self, token: bytes, now: float) -> _Known:
        parts = _FORM.fullmatch(token)
        if parts is None:
            raise _TokenRefused("it does not have the form of a signed token")
        header, claims = _table(parts[1], "header"), _table(parts[2], "payload")
        issuer_name = claims.get("iss")
        keyset = self._keysets.get(issuer_name) if isinstance(issuer_name, str) else None
        if keyset is None:
            raise _TokenRefused("its issuer is not in the file of issuers")
        issuer = keyset.issuer
        if header.get("alg") != issuer.algorithm:
            raise _TokenRefused(f"it is not signed with {issuer.algorithm}, unlike this issuer's tokens")
        if "crit" in header:
            raise _TokenRefused("it has critical extensions")
        key = _key(keyset, header)
        try:
            _VERIFIERS[issuer.algorithm].decode(token, key.jwk, [issuer.algorithm])
        except (jwt.PyJWTError, ValueError) as exc:
            raise _TokenRefused(f"its signature is wrong: {type(exc).__name__}") from None
        until = _lifetime(issuer, claims, now)
        return _Known(self._principal(issuer, claims), key, until)

    def _principal(self, issuer: Issuer, claims: dict[str, Any]) -> Principal:
        tenant = issuer.tenant or issuer.tenant_prefix + _name(claims, issuer.tenant_claim)
        if not is_name(tenant):
            raise _TokenRefused("its tenant name is too long")
        tier = issuer.default_tier
        if tier is None or issuer.tier_claim in claims:
            tier = _name(claims, issuer.tier_claim)
        user, models = _name(claims, issuer.user_claim), _models(issuer, claims)
        limits = _model_limits(issuer, claims)
        try:
            return make_principal(self._settings, user, tenant, tier, models=models, model_limits=limits)
        except ValueError:
            raise _TokenRefused("there is no such tier") from None


def _key(keyset: KeySet, header: dict[str, Any]) -> Key:
    """Return the key that a token names. Raises RequestError while the issuer's keys are being read."""
    kid = header.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise _TokenRefused("its key id is not a string")
    if not keyset.there:
        text = "the credential cannot be checked yet: its issuer does not respond"
        raise RequestError(text, code=SERVICE_OVERLOADED, retry_after=keyset.due())
    key = keyset.find(kid)
    if key is None:
        if keyset.want():
            text = "the credential cannot be checked yet: its issuer's keys are being read"
            raise RequestError(text, code=SERVICE_OVERLOADED, retry_after=1.0)
        raise _TokenRefused("its key does not belong to its issuer")
    return key


def _table(part: bytes, name: str) -> dict[str, Any]:
    try:
        text = a2b_base64(part.translate(_TO_BASE64) + b"==").decode()
        table = _decoder.decode(text)
    except (ValueError, RecursionError):
        raise _TokenRefused(f"its {name} is not JSON") from None
    if not isinstance(table, dict):
        raise _TokenRefused(f"its {name} is not an object")
    return table


_TO_BASE64 = bytes.maketrans(b"-_", b"+/")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a member occurs twice")
    return table


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _lifetime(issuer: Issuer, claims: dict[str, Any], now: float) -> float:
    """Return the Unix time at which a token expires. Raises _TokenRefused if it is not valid now, or not for this audience."""
    audience = claims.get("aud")
    if issuer.audience not in (audience if isinstance(audience, list) else [audience]):
        raise _TokenRefused("it is for another audience")
    _name(claims, "sub")
    leeway = issuer.leeway_s
    until = _instant(claims, "exp") + leeway
    if "nbf" in claims and _instant(claims, "nbf") > now + leeway:
        raise _TokenRefused("it is not valid yet")
    if "iat" in claims and _instant(claims, "iat") > now + leeway:
        raise _TokenRefused("it was issued in the future")
    if now >= until:
        raise _Expired
    return until


def _models(issuer: Issuer, claims: dict[str, Any]) -> list[str]:
    """Return the only models that the principal may use, or [] for all. If a claim is configured, it must name at least one."""
    if issuer.models_claim is None:
        return []
    named = claims.get(issuer.models_claim)
    if not isinstance(named, list) or not named:
        raise _TokenRefused("its models claim is missing, or not a list of names")
    models = [name for name in named if isinstance(name, str) and is_name(name)]
    if len(models) < len(named):
        raise _TokenRefused("its models claim contains something that is not a valid model name")
    return models


def _model_limits(issuer: Issuer, claims: dict[str, Any]) -> list[ModelLimit]:
    """Return the user's limits for individual models. If a claim is configured, it must exist, but may be empty."""
    if issuer.model_limits_claim is None:
        return []
    try:
        claim = msgspec.convert(claims.get(issuer.model_limits_claim), dict[str, _ModelLimit])
        limits = [ModelLimit(model, limit.rate, limit.burst) for model, limit in claim.items()]
        return [check_model_limit("model_limits", limit, ()) for limit in limits]
    except msgspec.ValidationError:
        raise _TokenRefused("its model limits claim is missing, or not an object of rates and bursts") from None
    except SettingError as exc:
        raise _TokenRefused(f"its model limits claim cannot be used: {exc}") from None


def _instant(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LATEST <= value <= LATEST:
        raise _TokenRefused(f"its claim {name} is not a time")
    return float(value)


def _name(claims: dict[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or not is_name(value):
        raise _TokenRefused(f"its claim {claim} is missing, or not a name")
    return value
