"""Authentication by JSON Web Token.

A token chooses its issuer and nothing else. The algorithm and the source of keys come from the issuer's configuration. `alg`
must agree with it, and links to keys in the token (jku, x5u, jwk) are never followed. Tokens with critical extensions (crit)
are refused, as RFC 7515 asks of those who don't understand them.

A valid token is remembered by its SHA-256, so that it costs one lookup until it expires or its key leaves the issuer's key
set. Clients only learn that a token is not valid or has expired. The reason is logged at debug, without any of the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from binascii import a2b_base64
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import jwt
import msgspec

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, SettingError, Unauthenticated
from headway.identity.jwt.issuers import Issuer
from headway.identity.jwt.keysets import Key, KeySet
from headway.identity.principals import make_principal
from headway.identity.tables import check_model_limit, is_name
from headway.model import ModelLimit, Principal
from headway.runtime.logger import get_logger

log = get_logger(__name__)

MAX_TOKEN = 8192
"""Longest header value that is parsed, in bytes."""
REMEMBERED = 10_000
"""Most tokens to remember. The least recently used goes first."""
LATEST = 1e12
"""Latest instant that a claim may name, in Unix seconds."""

_FORM = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")
_sha256 = hashlib.sha256


class Loops(Protocol):
    """Runner of loops, such as a Supervisor."""

    def start(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Run `loop()` from now on."""


class _TokenRefused(Exception):
    """The token is not valid; the text says why, and quotes none of it."""


class _Expired(_TokenRefused):
    """The token was valid, but has expired."""


class _ModelLimit(msgspec.Struct):
    """A limit in a claim."""

    rate: float
    burst: float | None = None


class _Known:
    """A token that is valid until an instant, and while its key is live."""

    __slots__ = ("key", "principal", "until")

    def __init__(self, principal: Principal, key: Key, until: float) -> None:
        self.principal = principal
        self.key = key
        self.until = until


class Tokens:
    """Identity of JSON Web Tokens. `now` returns Unix time. At most `most` tokens are remembered. `again` reads the issuers
    again, and may raise SettingError."""

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
        self._loops: Loops | None = None
        self._verifiers = {keyset.issuer.algorithm: _verifier(keyset.issuer) for keyset in self._keysets.values()}

    def __len__(self) -> int:
        """Return the number of tokens remembered."""
        return len(self._known)

    async def open(self) -> None:
        """Read the key sets. Raises SettingError if a file holds none. A URL may answer later; until then, tokens of its issuer
        get 503."""
        await asyncio.gather(*(keyset.open() for keyset in self._keysets.values()))

    def start(self, supervisor: Loops) -> None:
        """Start to keep the key sets up to date."""
        self._loops = supervisor
        for name, keyset in self._keysets.items():
            supervisor.start(f"keys of {name}", keyset.run)

    @property
    def rereads(self) -> str:
        """The parts that are reread on SIGHUP; see Rereadable."""
        return "issuers" if self._again is not None else ""

    async def reread(self) -> None:
        """Read the issuers and all their keys again. Tokens of an issuer that is gone or has changed become invalid. Raises
        SettingError if the file of the issuers, or of a key set, cannot be used."""
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
        self._verifiers = {keyset.issuer.algorithm: _verifier(keyset.issuer) for keyset in fresh.values()}
        for name, keyset in known.items():
            if fresh.get(name) is not keyset:
                keyset.retire()
        for name, keyset in fresh.items():
            if known.get(name) is not keyset and self._loops is not None:
                self._loops.start(f"keys of {name}", keyset.run)

    async def close(self) -> None:
        """Forget all tokens."""
        self._known.clear()

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal of an `Authorization` header (`Bearer TOKEN`); None if the token is not valid. Raises RequestError
        if the token has expired, or its issuer's keys are being looked up."""
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
        """Check a token from the outside in: form, issuer, key, signature, and only then its claims."""
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
            raise _TokenRefused(f"it is not signed with {issuer.algorithm}, as this issuer's tokens are")
        if "crit" in header:
            raise _TokenRefused("it has critical extensions")
        key = _key(keyset, header)
        try:
            self._verifiers[issuer.algorithm].decode(token, key.jwk, [issuer.algorithm])
        except (jwt.PyJWTError, ValueError) as exc:
            raise _TokenRefused(f"its signature is wrong: {type(exc).__name__}") from None
        until = _lifetime(issuer, claims, now)
        return _Known(self._principal(issuer, claims), key, until)

    def _principal(self, issuer: Issuer, claims: dict[str, Any]) -> Principal:
        tenant = issuer.tenant or issuer.tenant_prefix + _name(claims, issuer.tenant_claim)
        if not is_name(tenant):
            raise _TokenRefused("its tenant's name is too long")
        tier = issuer.default_tier
        if tier is None or issuer.tier_claim in claims:
            tier = _name(claims, issuer.tier_claim)
        user, models = _name(claims, issuer.user_claim), _models(issuer, claims)
        limits = _model_limits(issuer, claims)
        try:
            return make_principal(self._settings, user, tenant, tier, models=models, model_limits=limits)
        except ValueError:
            raise _TokenRefused("there is no such tier") from None


def _verifier(issuer: Issuer) -> jwt.PyJWS:
    return jwt.PyJWS(algorithms=[issuer.algorithm])


def _key(keyset: KeySet, header: dict[str, Any]) -> Key:
    """Return the key that a token names. Raise RequestError while the issuer is being asked for it."""
    kid = header.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise _TokenRefused("the id of its key is no text")
    if not keyset.there:
        text = "the credential cannot be checked yet: its issuer does not answer"
        raise RequestError(text, code=SERVICE_OVERLOADED, retry_after=keyset.due())
    key = keyset.find(kid)
    if key is None:
        if keyset.want():
            text = "the credential cannot be checked yet: its issuer is being asked"
            raise RequestError(text, code=SERVICE_OVERLOADED, retry_after=1.0)
        raise _TokenRefused("its key is not its issuer's")
    return key


def _table(part: bytes, name: str) -> dict[str, Any]:
    """Decode the JSON object in a part of a token."""
    try:
        text = a2b_base64(part.translate(_TO_BASE64) + b"==").decode()
        table = _decoder.decode(text)
    except (ValueError, RecursionError):
        raise _TokenRefused(f"its {name} is not JSON") from None
    if not isinstance(table, dict):
        raise _TokenRefused(f"its {name} is no object")
    return table


_TO_BASE64 = bytes.maketrans(b"-_", b"+/")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a member is there twice")
    return table


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


_decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def _lifetime(issuer: Issuer, claims: dict[str, Any], now: float) -> float:
    """Return the instant at which a token expires. Raise _TokenRefused if it is not valid now, or not for this audience."""
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
    """Return the only models that the principal may use; empty for all. A configured claim must be there, and name some."""
    if issuer.models_claim is None:
        return []
    named = claims.get(issuer.models_claim)
    if not isinstance(named, list) or not named:
        raise _TokenRefused("its claim of models is missing, or no list of names")
    models = [name for name in named if isinstance(name, str) and is_name(name)]
    if len(models) < len(named):
        raise _TokenRefused("its claim of models holds something that is no name")
    return models


def _model_limits(issuer: Issuer, claims: dict[str, Any]) -> list[ModelLimit]:
    """Return the user's limits for single models. A configured claim must be there, but may be empty."""
    if issuer.model_limits_claim is None:
        return []
    try:
        claim = msgspec.convert(claims.get(issuer.model_limits_claim), dict[str, _ModelLimit])
        limits = [ModelLimit(model, limit.rate, limit.burst) for model, limit in claim.items()]
        return [check_model_limit("model_limits", limit, ()) for limit in limits]
    except msgspec.ValidationError:
        raise _TokenRefused("its claim of model limits is missing, or isn't a table of rates and bursts") from None
    except SettingError as exc:
        raise _TokenRefused(f"its claim of model limits cannot be used: {exc}") from None


def _instant(claims: dict[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LATEST <= value <= LATEST:
        raise _TokenRefused(f"its claim {name} is no instant")
    return float(value)


def _name(claims: dict[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or not is_name(value):
        raise _TokenRefused(f"its claim {claim} is missing, or no name")
    return value
