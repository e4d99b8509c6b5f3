"""A fixed remote API that takes a batch: one POST per batch.

The body is a JSON list of the inputs, or `{"inputs": […]}` with, if any request has them, `"parameters"`: one
object per input. (A bare list has no room for parameters; they are not sent.) The answer is a JSON list of as
many strings, or an object that holds one under `outputs`, `results` or `predictions`.

A try that fails by the connection, or with 408, 429 or 5xx, is repeated, up to `max_tries`, after an exponential
pause or after what Retry-After asks for. All tries and pauses together stay within the batch's timeout; a pause
that would not is not begun. Any other status says that the batch itself is refused, and is final.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime

import aiohttp
import msgspec

from headway import __version__
from headway.backends.frames import MAX_OUTPUT
from headway.backends.lines import printable
from headway.core.retry import backoff
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteError, TargetError
from headway.model import WARM_UP, Entry, Item
from headway.target import RemoteTarget

MAX_ANSWER = 64 << 20
"""Largest body of an answer, in bytes after decompression."""
_MAX_SHOWN = 200
_AT_ONCE = 1 << 20
"""Bytes of a body above which it is written piece by piece, so that others get their turn."""
_MEMBERS = ("outputs", "results", "predictions")
_KEEP_ALIVE = 60.0
"""Seconds an idle connection is kept."""


class HttpBackend:
    """One slot: one call at a time, on its own connection.

    Arguments:
        spec: the API's URL.
        format: `list` or `inputs`, the body it takes.
        token: bearer token, empty for none.
        start_timeout: seconds for the warm-up request, its tries included.
        max_tries: most tries for one batch.
        dice: uniform in [0, 1), for the jitter of pauses.
        wall: Unix time in seconds, for a Retry-After that names a date.
    """

    def __init__(
        self,
        spec: RemoteTarget,
        *,
        format: str = "list",
        token: str = "",
        start_timeout: float,
        max_tries: int = 3,
        dice: Callable[[], float] = random.random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._bare = spec, format == "list"
        self._headers = {"Content-Type": "application/json", "User-Agent": f"headway/{__version__}"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._start_timeout, self._max_tries = start_timeout, max_tries
        self._dice, self._wall = dice, wall
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int:
        """0: nothing of it runs here."""
        return 0

    async def start(self) -> float:
        """Send a batch of one warm-up input; returns its run time in seconds.

        Raises:
            TargetError: it was not answered as a batch must be.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            )
        begun = time.monotonic()
        passed = False
        try:
            items = await self._call([WARM_UP], [b""], self._start_timeout)
            if items[0].fault:
                raise BadOutput(items[0].error or "")
            passed = True
        except BackendError as exc:
            raise TargetError(
                f"target {self._spec}: the warm-up batch {[WARM_UP]} failed: {exc}. "
                "Check the URL, remote_format and remote_token, and that the API is up."
            ) from None
        finally:
            if not passed:
                await self.stop()
        return time.monotonic() - begun

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[Item]:
        """Run a batch.

        Raises:
            RemoteError: the API refused it, or its tries are spent.
            BadOutput: the answer is no list of as many outputs.
            BatchTimeout: no complete answer within `timeout`.
        """
        return await self._call([entry.input for entry in entries], [entry.parameters for entry in entries], timeout)

    async def gone(self) -> None:
        """Never returns: there is nothing here that could die."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, inputs: list[str], parameters: list[bytes], timeout: float) -> list[Item]:
        body = self._body(inputs, parameters)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                return self._items(await self._answer(body, deadline), len(inputs))
        except TimeoutError:
            raise self._error(BatchTimeout, f"had no complete answer within {timeout:g} s") from None

    def _body(self, inputs: list[str], parameters: list[bytes]) -> bytes:
        try:
            if self._bare:
                return msgspec.json.encode(inputs)
            if not any(parameters):
                return msgspec.json.encode({"inputs": inputs})
            return msgspec.json.encode(
                {"inputs": inputs, "parameters": [msgspec.Raw(text or b"{}") for text in parameters]}
            )
        except UnicodeEncodeError as exc:
            raise RemoteError(f"an input is no proper Unicode text: {exc}") from None

    async def _answer(self, body: bytes, deadline: float) -> bytes:
        """The body of the first answer with a status of success."""
        loop = asyncio.get_running_loop()
        for count in range(1, self._max_tries + 1):
            asked: float | None = None
            try:
                status, rest, answer = await self._post(body)
            except (aiohttp.ClientError, OSError) as exc:
                problem, shown = f"{type(exc).__name__}: {exc}", type(exc).__name__
                final = isinstance(exc, aiohttp.InvalidURL)
            else:
                if 200 <= status < 300:
                    return answer
                problem = shown = f"HTTP {status}: {printable(answer[:_MAX_SHOWN])}"
                final = status not in (408, 429) and status < 500
                asked = retry_after(rest, self._wall())
            pause = max(backoff(count, self._dice()), asked or 0.0)
            if final or count == self._max_tries or loop.time() + pause >= deadline:
                wish = f"; it asks for {asked:g} s of rest" if asked is not None else ""
                failed = f"failed at try {count}: "
                raise self._error(RemoteError, f"{failed}{problem}{wish}", f"{failed}{shown}{wish}")
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _post(self, body: bytes) -> tuple[int, str, bytes]:
        """Status, Retry-After and body of one try's answer."""
        if self._session is None:
            raise self._error(RemoteError, "was not started")
        data = io.BytesIO(body) if len(body) > _AT_ONCE else body
        post = self._session.post(self._spec.url, data=data, headers=self._headers, allow_redirects=False)
        async with post as response:
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > MAX_ANSWER:
                    raise self._error(BadOutput, f"answered more than {MAX_ANSWER} bytes")
            return response.status, response.headers.get("Retry-After", ""), bytes(answer)

    def _items(self, answer: bytes, expected: int) -> list[Item]:
        try:
            value = msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            shown = printable(answer[:_MAX_SHOWN])
            raise self._error(BadOutput, f"answered something that is no JSON ({exc}): {shown}") from None
        if isinstance(value, dict):
            value = next((value[member] for member in _MEMBERS if member in value), value)
        if not isinstance(value, list):
            raise self._error(BadOutput, f"answered neither a list nor an object with one of {', '.join(_MEMBERS)}")
        if len(value) != expected:
            raise self._error(BadOutput, f"answered {len(value)} outputs for {expected} inputs")
        return [Item(one) if type(one) is str and len(one) <= MAX_OUTPUT else _fault(one) for one in value]

    def _error(self, kind: type[BackendError], what: str, shown: str = "") -> BackendError:
        """An error that tells operators which API it was; where it stands is no client's business."""
        return kind(f"the remote API {self._spec} {what}", f"the remote API {shown or what}")


def _fault(output: object) -> Item:
    if isinstance(output, str):
        return Item(None, f"the remote API answered {len(output)} characters, the limit is {MAX_OUTPUT}", True)
    kind = "null" if output is None else type(output).__name__
    return Item(None, f"the remote API answered {kind} for this input, expected a string", True)


def retry_after(value: str, now: float) -> float | None:
    """Seconds to wait that a Retry-After header asks for (RFC 9110, 10.2.3); None when it asks for nothing.

    Arguments:
        value: the header's value, a number of seconds or an HTTP date.
        now: Unix time in seconds.
    """
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
