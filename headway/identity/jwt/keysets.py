"""Public keys of an issuer, kept up to date.

A key set is read again every few minutes, and at once, though not too often, when a token names a key that is not
known. An issuer that cannot be reached, or answers with no key set, changes nothing: the last known keys go on. A key
set is believed, even when no key is left in it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from headway.config import shown_url
from headway.errors import SettingError
from headway.identity.jwt.issuers import Issuer
from headway.identity.jwt.sources import Source, Unreadable
from headway.runtime.logger import get_logger

log = get_logger(__name__)

AGAIN = 10.0
"""Least seconds between two reads for unknown keys, and most seconds between two reads when the last one failed."""
SOON = 1.0
"""Seconds after which to read again after the first failure; they double with each further failure."""
MAX_KEYS = 100
"""Most keys of a set, usable or not."""
RSA_BITS = range(2048, 8193)
"""Sizes of an RSA key that are neither too weak nor too slow."""

_MEMBERS: dict[str, tuple[str, ...]] = {
    "RS256": ("kty", "n", "e"),
    "ES256": ("kty", "crv", "x", "y"),
    "EdDSA": ("kty", "crv", "x"),
}
_FIXED: dict[str, dict[str, str]] = {
    "RS256": {"kty": "RSA"},
    "ES256": {"kty": "EC", "crv": "P-256"},
    "EdDSA": {"kty": "OKP", "crv": "Ed25519"},
}


class Key:
    """One public key.

    Attributes:
        jwk: key that verifies signatures, by one algorithm only.
        material: text that is equal for equal keys.
        live: whether the key is in its issuer's key set.
    """

    __slots__ = ("jwk", "live", "material")

    def __init__(self, jwk: jwt.PyJWK, material: tuple[str, ...]) -> None:
        self.jwk = jwk
        self.material = material
        self.live = True


class KeySet:
    """Keys of one issuer.

    Arguments:
        issuer: the issuer.
        source: source of the key set.
        clock: monotonic seconds.
    """

    def __init__(self, issuer: Issuer, source: Source, clock: Callable[[], float]) -> None:
        self.issuer = issuer
        self._source = source
        self._clock = clock
        self._keys: Mapping[str, Key] | None = None
        self._wanted = asyncio.Event()
        self._reading = False
        self._failures = 0
        self._asked_at = -AGAIN
        self._retired = False

    @property
    def there(self) -> bool:
        """Whether the key set has been read at least once."""
        return self._keys is not None

    def find(self, kid: str | None) -> Key | None:
        """Key of an id; without an id the only key, if there is only one."""
        keys = self._keys or {}
        if kid is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(kid)

    def due(self) -> float:
        """Most seconds until the next read, at least 1."""
        return max(1.0, self._asked_at + self._pause() - self._clock())

    def want(self) -> bool:
        """Have the key set read now, unless that was done of late; True while it is being read."""
        if not self._reading and not self._wanted.is_set() and self._clock() - self._asked_at >= AGAIN:
            self._wanted.set()
        return self._reading or self._wanted.is_set()

    async def open(self) -> None:
        """Read the key set. Raises SettingError when it is in a file that holds none; a URL may answer later."""
        if self.issuer.exposed:
            log.warning(
                "the issuer's keys are fetched without TLS: who is in between can forge tokens", **self._about()
            )
        await self.refresh()
        if not self.there and not self.issuer.remote:
            reason, hint = "there is no key set in it", 'Name a file with {"keys": […]} in it, a JWK set.'
            raise SettingError(f"jwks of {self.issuer.issuer}", self.issuer.jwks, reason, hint)

    async def run(self) -> None:
        """Keep the key set up to date until it is retired."""
        while not self._retired:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wanted.wait()
            if not self._retired:
                await self.refresh()

    def retire(self) -> None:
        """Stop accepting what these keys have signed."""
        self._retired = True
        for key in (self._keys or {}).values():
            key.live = False
        self._wanted.set()

    async def refresh(self) -> None:
        """Read the key set now."""
        self._asked_at = self._clock()
        self._reading = True
        try:
            text = await self._source.read()
            if text is not None:
                self._take(read_keys(text, self.issuer.algorithm))
                self._failures = 0
        except Unreadable as exc:
            self._lament(str(exc))
        finally:
            self._reading = False
            self._wanted.clear()

    def _pause(self) -> float:
        if not self._failures:
            return self._source.every
        return min(SOON * 2.0 ** min(self._failures - 1, 10), AGAIN, self._source.every)

    def _take(self, found: Mapping[str, Key]) -> None:
        before = self._keys or {}
        keys = {}
        for kid, key in found.items():
            old = before.get(kid)
            keys[kid] = old if old is not None and old.material == key.material else key
        for kid, old in before.items():
            if keys.get(kid) is not old:
                old.live = False
        if not keys:
            log.warning("the issuer has no key that can be used", **self._about())
        elif self._failures:
            log.info("the issuer's keys can be read again", keys=len(keys), **self._about())
        self._keys = keys

    def _lament(self, why: str) -> None:
        if not self._failures:
            event = (
                "the last known keys of the issuer go on" if self.there else "no token of the issuer can be checked yet"
            )
            log.warning(event, error=why, **self._about())
        self._failures += 1

    def _about(self) -> dict[str, str]:
        jwks = shown_url(self.issuer.jwks) if self.issuer.remote else self.issuer.jwks
        return {"issuer": self.issuer.issuer, "jwks": jwks}


def read_keys(text: bytes, algorithm: str) -> dict[str, Key]:
    """Keys of a JWK set that can check signatures of `algorithm`, by id.

    A key that is for something else, has no id beside others, or repeats an id, is left out. Of private keys only the
    public part is read.

    Raises:
        Unreadable: the text is no JWK set.
    """
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise Unreadable("it is not JSON") from None
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise Unreadable('it is no JWK set: it has no list "keys"')
    if len(rows) > MAX_KEYS:
        raise Unreadable(f"it has more than {MAX_KEYS} keys")
    keys: dict[str, Key] = {}
    for row in rows:
        kid = row.get("kid", "") if isinstance(row, dict) else None
        if isinstance(kid, str) and kid not in keys and (key := _key(row, algorithm)) is not None:
            keys[kid] = key
    return keys


def _key(row: dict[str, Any], algorithm: str) -> Key | None:
    operations = row.get("key_ops", ["verify"])
    if (
        row.get("use", "sig") != "sig"
        or row.get("alg", algorithm) != algorithm
        or not (isinstance(operations, list) and "verify" in operations)
    ):
        return None
    public = {name: row.get(name) for name in _MEMBERS[algorithm]}
    if not all(isinstance(value, str) for value in public.values()):
        return None
    if any(public[name] != value for name, value in _FIXED[algorithm].items()):
        return None
    try:
        jwk = jwt.PyJWK(public, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(jwk.key, RSAPublicKey) and jwk.key.key_size not in RSA_BITS:
        return None
    return Key(jwk, tuple(str(value) for value in public.values()))
