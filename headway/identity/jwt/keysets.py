"""The public keys of an issuer. Its key set is read every few minutes. It is also read when a token names an unknown key,
but not within AGAIN seconds of the last time. If the issuer is unreachable, or returns something other than a key set, the last
known keys stay valid. An empty key set revokes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp
import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from headway.config import shown_url
from headway.errors import SettingError
from headway.identity.jwt.issuers import Issuer
from headway.runtime.logger import get_logger
from headway.runtime.shared_files import Stamp, stamp
from headway.version import __version__

log = get_logger(__name__)

MAX_BYTES = 256 * 1024
TIMEOUT = 5.0
MAX_REDIRECTS = 3

_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class Unreadable(Exception):
    """The key set can't be read now. The message says why."""


class Source(Protocol):
    """Source of one key set."""

    @property
    def every(self) -> float:
        """Seconds between reads."""

    async def read(self) -> bytes | None:
        """Return the key set, or None if it hasn't changed. Raises Unreadable."""


class UrlSource:
    """A key set at an http or https URL. Redirects to another scheme aren't followed."""

    every = 300.0

    def __init__(self, url: str) -> None:
        self._url = url

    async def read(self) -> bytes | None:
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                aiohttp.ClientSession(
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    headers={
                        "Accept": "application/jwk-set+json, application/json",
                        "Accept-Encoding": "identity",
                        "User-Agent": f"headway/{__version__}",
                    },
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
            ):
                return await self._fetched(session)
        except TimeoutError:
            raise Unreadable(f"no answer within {TIMEOUT:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise Unreadable(f"it cannot be fetched: {type(exc).__name__}") from None

    async def _fetched(self, session: aiohttp.ClientSession) -> bytes:
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    url = urljoin(url, response.headers.get("Location", ""))
                    if urlsplit(url).scheme != urlsplit(self._url).scheme:
                        raise Unreadable("it is redirected to another scheme")
                    continue
                if response.status != 200:
                    raise Unreadable(f"the answer has status {response.status}")
                return await _bounded(response.content)
        raise Unreadable(f"it is redirected more than {MAX_REDIRECTS} times")


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    while piece := await content.read(MAX_BYTES + 1 - len(body)):
        body += piece
        if len(body) > MAX_BYTES:
            raise Unreadable(f"it is larger than {MAX_BYTES} bytes")
    return bytes(body)


class FileSource:
    """A key set in a file."""

    every = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None

    async def read(self) -> bytes | None:
        seen = stamp(self._path)
        if seen is not None and seen == self._seen:
            return None
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as exc:
            self._seen = None
            raise Unreadable(f"it cannot be read: {exc.strerror}") from None
        if len(content) > MAX_BYTES:
            raise Unreadable(f"it is larger than {MAX_BYTES} bytes")
        self._seen = seen
        return content


AGAIN = 10.0  # Minimum seconds between reads for unknown keys, and maximum seconds between reads after a failure.
SOON = 1.0  # Seconds between the first failure and the next read. This pause doubles with each further failure.
MAX_KEYS = 100
RSA_BITS = range(2048, 8193)  # Sizes at which RSA keys are neither too weak nor too slow.

_FORMS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {  # Fixed fields of a key, and the names of the others.
    "RS256": ({"kty": "RSA"}, ("n", "e")),
    "ES256": ({"kty": "EC", "crv": "P-256"}, ("x", "y")),
    "EdDSA": ({"kty": "OKP", "crv": "Ed25519"}, ("x",)),
}


class Key(msgspec.Struct, eq=False):
    """Public key for one algorithm. Identical keys have the same `material`. `live` is False once its key set no longer contains it."""

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
        """Return the key whose id is `kid`, or the only key if `kid` is None. Return None if there is no such key."""
        keys = self._keys or {}
        if kid is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(kid)

    def due(self) -> float:
        """Return an upper bound on the seconds until the next read, at least 1."""
        return max(1.0, self._asked_at + self._pause() - self._clock())

    def want(self) -> bool:
        """Request that the key set be read, unless it was read recently. Return True if reading it is due or in progress."""
        if not self._reading and not self._wanted.is_set() and self._clock() - self._asked_at >= AGAIN:
            self._wanted.set()
        return self._reading or self._wanted.is_set()

    async def open(self) -> None:
        """Read the key set. Raises SettingError if a file contains none. A URL may still return one later."""
        if self.issuer.exposed:
            event = "the issuer's keys are fetched without TLS, so anyone on the network path can forge tokens"
            log.warning(event, **self._about())
        await self.refresh()
        if not self.there and not self.issuer.remote:
            reason, hint = "contains no key set", 'Name a file that contains a JWK set, {"keys": […]}.'
            raise SettingError(f"jwks of {self.issuer.issuer}", self.issuer.jwks, reason, hint)

    async def run(self) -> None:
        while not self._retired:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wanted.wait()
            if not self._retired:
                await self.refresh()

    def retire(self) -> None:
        """Stop accepting signatures by these keys, and end `run`."""
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
            log.warning("the issuer has no usable key", **self._about())
        elif self._failures:
            log.info("the issuer's keys can be read again", keys=len(keys), **self._about())
        self._keys = keys

    def _log_failure(self, reason: str) -> None:
        if not self._failures:
            still_used, lacking = (
                "the issuer's last known keys stay in use",
                "no token of the issuer can be checked yet",
            )
            log.warning(still_used if self.there else lacking, error=reason, **self._about())
        self._failures += 1

    def _about(self) -> dict[str, str]:
        jwks = shown_url(self.issuer.jwks) if self.issuer.remote else self.issuer.jwks
        return {"issuer": self.issuer.issuer, "jwks": jwks}


def read_keys(text: bytes, algorithm: str) -> dict[str, Key]:
    """Return the keys in a JWK set for signatures with `algorithm`, by id. Raises Unreadable if it isn't a JWK set.
    Keys for other uses and keys with a repeated id are skipped. Only the public part of a private key is used."""
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise Unreadable("it is not JSON") from None
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise Unreadable('it is not a JWK set: it has no list "keys"')
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
