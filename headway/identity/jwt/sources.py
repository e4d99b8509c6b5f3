"""Sources of key sets: URLs and files. Reading either takes bounded time and memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp

from headway.runtime.shared_files import Stamp, stamp
from headway.version import __version__

MAX_BYTES = 256 * 1024
TIMEOUT = 5.0
MAX_REDIRECTS = 3

_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class Unreadable(Exception):
    """The key set cannot be read now. The text says why."""


class Source(Protocol):
    """Source of one key set."""

    @property
    def every(self) -> float:
        """Seconds between two reads."""

    async def read(self) -> bytes | None:
        """Return the key set, or None if it has not changed. Raises Unreadable."""


class UrlSource:
    """A key set behind an http or https URL. Redirects to another scheme are not followed."""

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
