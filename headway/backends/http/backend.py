"""A fixed remote API that takes a batch: one POST per batch.

The body is a JSON list of the inputs, or `{"inputs": […]}` with, if any request has them, `"parameters"`: one
object per input. (A bare list has no room for parameters; they are not sent.) The answer: `remote_answer.py`.

| the API says | what it means | what is done |
|---|---|---|
| nothing, 408, 429, 5xx | it is in trouble | up to `max_tries`, after an exponential pause or what Retry-After asks for |
| 400, 413, 422 | it turns down what is in the batch | final; the culprit is searched for among the inputs |
| any other status | it is not the one that was meant, or the credential is wrong | final; no input is to blame |

All tries and pauses together stay within the batch's timeout; a pause that would not is not begun. What Retry-After
asks for is kept by all slots, as they share the breaker.

Neither the URL's query nor what the API writes into an error's body leaves this module but for the log.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import time
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import aiohttp
import msgspec
import structlog

from headway import __version__
from headway.backends.http import reader
from headway.backends.http.answer import NoOutputs
from headway.backends.process.output_lines import printable
from headway.config.target import RemoteTarget
from headway.core.breaker import Breaker
from headway.core.retry import backoff
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteError, RemoteRefused, TargetError
from headway.model import WARM_UP, Entry, ItemResult, Signature

log = structlog.get_logger(__name__)

MAX_ANSWER = 64 << 20
"""Largest body of an answer, in bytes after decompression."""
_MAX_SHOWN = 200
_AT_ONCE = 1 << 20
"""Bytes of a body above which it is written piece by piece, so that other tasks get their turn."""
_REFUSALS = frozenset([400, 413, 422])
"""Statuses that blame what was sent."""
_KEEP_ALIVE = 60.0
"""Seconds for which an idle connection is kept."""


class HttpBackend:
    """Backend of one slot of a remote API: one call at a time, on a connection of its own.

    Arguments:
        spec: the API's URL.
        format: shape of the request body, `list` or `inputs`.
        token: bearer token; empty for none.
        start_timeout: seconds for the warm-up request, its tries included.
        max_tries: most tries for one batch.
        breaker: keeps the rest that the API asks for; slots of one API share it. None: one of its own.
        clock: monotonic seconds, as the breaker takes them.
        rng: uniform in [0, 1), for the jitter of pauses.
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
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._bare = spec, format == "list"
        self._headers = {"Content-Type": "application/json", "User-Agent": f"headway/{__version__}"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._start_timeout, self._max_tries = start_timeout, max_tries
        self._breaker, self._clock = breaker or Breaker(1, 0.0), clock
        self._rng, self._wall = rng, wall
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int:
        """Process id, always 0: the API runs elsewhere."""
        return 0

    @property
    def signature(self) -> Signature:
        """Signature of the API: texts in, texts out."""
        return Signature()

    @property
    def warm_up(self) -> Sequence[tuple[int, float]]:
        """Batches that are known to be warm: none, as each further call may cost money."""
        return ()

    async def start(self) -> float:
        """Send a batch of one warm-up input; returns its run time in seconds.

        Raises:
            TargetError: the API did not answer it as a batch must be answered.
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

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch.

        Raises:
            RemoteError: its tries are spent, or no try makes sense.
            RemoteRefused: the API rejected an input of it, or all together.
            BadOutput: the answer is no list of as many outputs.
            BatchTimeout: no complete answer came within `timeout` seconds.
        """
        texts = {place: entry.input for place, entry in enumerate(entries) if isinstance(entry.input, str)}
        items = [ItemResult(None, "a remote API takes text only", True)] * len(entries)
        if texts:
            found = await self._call(list(texts.values()), [entries[place].parameters for place in texts], timeout)
            for place, item in zip(texts, found, strict=True):
                items[place] = item
        return items

    async def gone(self) -> None:
        """Wait for ever, as there is no process here that could die."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, inputs: list[str], parameters: list[bytes], timeout: float) -> list[ItemResult]:
        body = self._body(inputs, parameters)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                return await self._items(await self._answer(body, deadline), len(inputs))
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
            raise RemoteRefused(f"an input is no proper Unicode text: {exc}") from None

    async def _answer(self, body: bytes, deadline: float) -> bytearray:
        """Body of the first answer with a status of success."""
        loop = asyncio.get_running_loop()
        for count in range(1, self._max_tries + 1):
            kind: type[BackendError] = RemoteError
            asked, answer = None, bytearray()
            try:
                status, rest, answer = await self._post(body)
            except BackendError:
                raise
            except Exception as exc:  # Whatever a library makes of what came over the wire.
                problem, shown = self._told(exc), type(exc).__name__
                final = not isinstance(exc, aiohttp.ClientError | OSError) or isinstance(exc, aiohttp.InvalidURL)
            else:
                if 200 <= status < 300:
                    return answer
                problem = shown = f"HTTP {status}"
                final = status not in (408, 429) and status < 500
                kind = RemoteRefused if status in _REFUSALS else RemoteError
                asked = None if final else retry_after(rest, self._wall())
            if asked is not None:
                self._breaker.rest(self._clock(), asked)
            pause = max(backoff(count, self._rng()), asked or 0.0, self._breaker.rest_left(self._clock()))
            if final or count == self._max_tries or loop.time() + pause >= deadline:
                wish = f"; it asks for {asked:g} s of rest" if asked is not None else ""
                failed = f"failed at try {count}: "
                if answer:
                    self._note(problem, answer)
                raise self._error(kind, f"{failed}{problem}{wish}", f"{failed}{shown}{wish}")
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _post(self, body: bytes) -> tuple[int, str, bytearray]:
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
            return response.status, response.headers.get("Retry-After", ""), answer

    async def _items(self, answer: bytearray, expected: int) -> list[ItemResult]:
        try:
            return await reader.read(answer, expected)
        except NoOutputs as exc:
            self._note(f"answered {exc}", answer)
            raise self._error(BadOutput, f"answered {exc}") from None

    def _note(self, what: str, answer: bytearray) -> None:
        """Log the beginning of a body that nobody else may read: it may hold credentials, hosts, or others' data."""
        shown = printable(bytes(answer[:_MAX_SHOWN]))
        log.warning("the remote API answered no outputs", api=str(self._spec), answer=what, body=shown)

    def _told(self, exc: Exception) -> str:
        """Type of a connection's error, and its text where that quotes neither the API nor the URL's query."""
        quotes = isinstance(exc, aiohttp.ClientError) and not isinstance(exc, OSError)
        text = "" if quotes else str(exc)
        secrets = [value for _, value in parse_qsl(urlsplit(self._spec.url).query) if value]
        if not text or any(secret in unquote_plus(text) for secret in secrets):
            return type(exc).__name__
        return f"{type(exc).__name__}: {text}"

    def _error(self, kind: type[BackendError], what: str, shown: str = "") -> BackendError:
        """Error that names the API to operators. Clients do not learn where it is."""
        return kind(f"the remote API {self._spec} {what}", f"the remote API {shown or what}")


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
