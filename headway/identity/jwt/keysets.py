"""Public keys of an issuer, kept up to date.

A key set is read every few minutes, and at once if a token names an unknown key, though at most every AGAIN seconds. If the
issuer cannot be reached, or doesn't answer with a key set, the last known keys stay valid. But an empty key set revokes them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from headway.config import shown_url
from headway.errors import SettingError
from headway.identity.jwt.issuers import Issuer
from headway.identity.jwt.sources import Source, Unreadable
from headway.runtime.logger import get_logger

log = get_logger(__name__)

AGAIN = 10.0
"""Fewest seconds between two reads for unknown keys, and most seconds between two reads after a failure."""
SOON = 1.0
"""Seconds until the next read after a failure. Each further failure doubles them."""
MAX_KEYS = 100
RSA_BITS = range(2048, 8193)
"""Sizes of RSA keys that are neither too weak nor too slow."""

_FORMS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "RS256": ({"kty": "RSA"}, ("n", "e")),
    "ES256": ({"kty": "EC", "crv": "P-256"}, ("x", "y")),
    "EdDSA": ({"kty": "OKP", "crv": "Ed25519"}, ("x",)),
}
"""Members of a key for each algorithm: those that all keys have alike, and the names of the others."""


class Key(msgspec.Struct, eq=False):
    """A public key for one algorithm. `material` is equal for equal keys. `live` is False once the key has left its key set."""

    jwk: jwt.PyJWK
    material: tuple[str, ...]
    live: bool = True


class KeySet:
    """Keys of one issuer."""

    def __init__(self, issuer: Issuer, source: Source, clock: Callable[[], float]) -> None:
        self.issuer, self._source, self._clock = issuer, source, clock
        self._keys: Mapping[str, Key] | None = None
        self._wanted = asyncio.Event()
        self._reading = False
        self._failures = 0
        self._asked_at = -AGAIN
        self._retired = False

    @property
    def there(self) -> bool:
        return self._keys is not None

    def find(self, kid: str | None) -> Key | None:
        """Return the key with an id, or without an id the only key; None if there is none."""
        keys = self._keys or {}
        if kid is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(kid)

    def due(self) -> float:
        """Return the most seconds until the next read, at least 1."""
        return max(1.0, self._asked_at + self._pause() - self._clock())

    def want(self) -> bool:
        """Have the key set read, unless that was done recently. Return True while it is being read."""
        if not self._reading and not self._wanted.is_set() and self._clock() - self._asked_at >= AGAIN:
            self._wanted.set()
        return self._reading or self._wanted.is_set()

    async def open(self) -> None:
        """Read the key set. Raises SettingError if a file holds none. A URL may still answer later."""
        if self.issuer.exposed:
            event = "the issuer's keys are fetched without TLS, so anyone on the way can forge tokens"
            log.warning(event, **self._about())
        await self.refresh()
        if not self.there and not self.issuer.remote:
            reason, hint = "there is no key set in it", 'Name a file with {"keys": […]} in it, a JWK set.'
            raise SettingError(f"jwks of {self.issuer.issuer}", self.issuer.jwks, reason, hint)

    async def run(self) -> None:
        while not self._retired:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wanted.wait()
            if not self._retired:
                await self.refresh()

    def retire(self) -> None:
        """Stop accepting signatures of these keys, and end `run`."""
        self._retired = True
        for key in (self._keys or {}).values():
            key.live = False
        self._wanted.set()

    async def refresh(self) -> None:
        self._asked_at = self._clock()
        self._reading = True
        try:
            text = await self._source.read()
            if text is not None:
                self._take(read_keys(text, self.issuer.algorithm))
                self._failures = 0
        except Unreadable as exc:
            self._log_failure(str(exc))
        finally:
            self._reading = False
            self._wanted.clear()

    def _pause(self) -> float:
        if not self._failures:
            return self._source.every
        return min(SOON * 2.0 ** min(self._failures - 1, 10), AGAIN, self._source.every)

    def _take(self, fresh: Mapping[str, Key]) -> None:
        before = self._keys or {}
        keys = {}
        for kid, key in fresh.items():
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

    def _log_failure(self, reason: str) -> None:
        if not self._failures:
            kept, lacking = "the issuer's last known keys stay in use", "no token of the issuer can be checked yet"
            log.warning(kept if self.there else lacking, error=reason, **self._about())
        self._failures += 1

    def _about(self) -> dict[str, str]:
        jwks = shown_url(self.issuer.jwks) if self.issuer.remote else self.issuer.jwks
        return {"issuer": self.issuer.issuer, "jwks": jwks}


def read_keys(text: bytes, algorithm: str) -> dict[str, Key]:
    """Return the keys of a JWK set for signatures of `algorithm`, by id. Raises Unreadable if the text is no JWK set. Keys for
    other uses and keys with a repeated id are skipped. Only the public part of a private key is read."""
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
    fixed, names = _FORMS[algorithm]
    public = fixed | {name: row.get(name) for name in names}
    if any(row.get(name) != value for name, value in fixed.items()):
        return None
    if not all(isinstance(public[name], str) for name in names):
        return None
    try:
        jwk = jwt.PyJWK(public, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(jwk.key, RSAPublicKey) and jwk.key.key_size not in RSA_BITS:
        return None
    return Key(jwk, tuple(str(value) for value in public.values()))
