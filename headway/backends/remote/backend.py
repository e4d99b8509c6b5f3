"""A remote API that takes a batch: one call per batch, in one of the dialects (`headway.dialects`).

If parameters apply to a whole request, inputs with different ones go in separate requests, a few at a time. So do
tensors whose rows are of another shape, and rows beyond the largest batch.

All tries and pauses together stay within the batch's timeout; a pause that wouldn't is skipped. A rest that the API asks
for is kept by all slots, as they share the breaker. A batch that found no connection, so that nothing was sent, has
not run. Once a byte was sent it may have, and counts as a run.

Credentials and the URL's query never leave the backends. The body of an API's error goes to the log alone.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import msgspec

from headway.backends.process.output_lines import printable
from headway.backends.remote import reader
from headway.backends.remote.credentials import Credentials
from headway.backends.remote.grouping import RequestGroup, grouped, rows_of_each, shares
from headway.config.target import RemoteTarget
from headway.core.breaker import Breaker
from headway.core.excerpt import excerpt
from headway.core.ratelimit import CallPace
from headway.core.retry import backoff
from headway.core.values import octets, shown
from headway.dialects.dialect import BadMetadata, NoOutputs, NotSendable, Remote, RemoteCall
from headway.errors import (
    BackendError,
    BadOutput,
    BatchTimeout,
    RemoteAbsent,
    RemoteError,
    RemoteExhausted,
    RemoteRefused,
    TargetError,
)
from headway.model import Entry, ItemResult, Signature, TokenCount, Value
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.logger import get_logger
from headway.runtime.spans import OUTGOING, RUN

log = get_logger(__name__)

MAX_ANSWER = 64 << 20
"""Largest body of an answer, in bytes after decompression."""
METADATA_TIMEOUT = 10.0
"""Seconds for asking the API about its model, tries included."""
_NO_ITEM = ItemResult(None)
_MAX_SHOWN = 200
_MODELS_TIMEOUT = 2.0
"""Seconds for asking for the API's list of models after a failed start."""
_MODELS_SHOWN = 10

_BY_STATUS = {
    401: "It wants a credential, or another one: set HEADWAY_REMOTE_TOKEN or --remote-headers-file.",
    403: "It knows the credential, which may not do this: use one that may, and check --remote-model.",
    404: "It has nothing at this URL: check the path, and --remote-model.",
    405: "It takes no POST at this URL: check the path.",
    407: "A proxy on the way wants a credential.",
    413: "It takes less at once: lower --max-batch-size.",
    429: "It asks for fewer calls: bound them by --remote-rate, and check its quota.",
}
OF_FORM = (400, 415, 422)
"""Statuses of an API that expects another format."""
_ANY = "Check the URL, --remote-format, --remote-model, the credentials and certificates, and that the API is up."
_TOLD = ((r"datatype|tensor", "oip"), (r"messages|prompt", "openai-completions"), (r"inputs", "inputs"), (r"input", "openai-embeddings"))  # fmt: skip
"""Names of a missing member in an API's error, and the format that has it."""
_READ = 4096
"""Bytes of an answer that are searched for it."""


class Answered(NamedTuple):
    """Answer of a successful try.

    Attributes:
        body: body of the answer.
        json_bytes: bytes of it that are JSON, where binary data follows; -1 where nothing says so.
    """

    body: bytes | bytearray
    json_bytes: int = -1


class TryVerdict(NamedTuple):
    """Verdict on the status of a failed try.

    Attributes:
        final: whether no other try makes sense now.
        kind: error that it comes to.
        rest: seconds of rest that the API asks for; None when it asks for none.
    """

    final: bool
    kind: type[BackendError]
    rest: float | None = None


class Tried(NamedTuple):
    """Outcome of a failed try.

    Attributes:
        problem: what went wrong, for operators.
        shown: the part of it that a client may read.
        kind: error that it comes to.
        final: whether no other try makes sense.
        rest: seconds of rest that the API asks for; None when it asks for none.
        body: what the API says of it, for the log alone.
        status: HTTP status of it; 0 where there is none.
    """

    problem: str
    shown: str
    kind: type[BackendError]
    final: bool
    rest: float | None = None
    body: bytes | bytearray = b""
    status: int = 0

    @classmethod
    def judged(cls, verdict: TryVerdict, problem: str, body: bytes | bytearray, status: int = 0) -> Tried:
        """Return the outcome of a try with a failure status, about which a client may read."""
        return cls(problem, problem, verdict.kind, verdict.final, verdict.rest, body, status)


class RemoteBackend(ABC):
    """Backend of one slot of a remote API: one batch at a time, on its own connections. Subclasses make these.

    Arguments:
        spec: the API's URL.
        remote: the API with its dialect.
        credentials: header fields that go with each request; None for none.
        certificates: certificates of the connections; None: the system's authorities are trusted, and none is shown.
        start_timeout: seconds for the warm-up request, its tries included.
        max_tries: limit on tries for one request.
        max_rows: limit on rows of tensors in one request, unless a single entry has more; 0 for none.
        breaker: knows the rest that the API asked for, and since when it is away; slots of one API share it. None: its own.
        clock: monotonic seconds, as the breaker takes them.
        rng: uniform in [0, 1), for the jitter of pauses.
        pace: limits the calls of all slots that share it; None: no limit.

    Attributes:
        retries: tries after the first of a request.
        rested: seconds of rest that the API has asked for.
    """

    def __init__(
        self,
        spec: RemoteTarget,
        remote: Remote,
        *,
        credentials: Credentials | None = None,
        certificates: RemoteCertificates | None = None,
        start_timeout: float,
        max_tries: int = 3,
        max_rows: int = 0,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        pace: CallPace | None = None,
    ) -> None:
        self._spec, self._remote = spec, remote
        self._dialect = self._remote.dialect
        self._credentials, self._certificates = credentials or Credentials(), certificates
        self._start_timeout, self._max_tries, self._max_rows = start_timeout, max_tries, max_rows
        self._breaker, self._clock = breaker or Breaker(1, 0.0), clock
        self._rng, self._pace = rng, pace or CallPace(0.0)
        self._failed: Tried | None = None
        self.retries, self.rested = 0, 0.0
        parts = urlsplit(remote.url)
        port = parts.port or (443 if spec.secure else 80)
        self._place = ("server.address", parts.hostname or ""), ("server.port", port)

    @abstractmethod
    def _open(self) -> None:
        """Get ready to connect."""

    @abstractmethod
    async def _close(self) -> None:
        """Close all connections."""

    @abstractmethod
    async def _try(self, call: RemoteCall, left: float) -> Answered | Tried:
        """Try once, within `left` seconds.

        Raises:
            BackendError: no try can succeed.
            TimeoutError: the time is over.
        """

    @property
    def pid(self) -> int:
        """Process id, always 0: the API runs elsewhere."""
        return 0

    @property
    def signature(self) -> Signature:
        """Signature of the API, as its dialect says."""
        return self._dialect.signature

    @property
    def warm_up(self) -> Sequence[tuple[int, float]]:
        """Batches run while warm: none, as each further call may cost money."""
        return ()

    async def start(self) -> float:
        """Send a batch of one warm-up input, unless none is known to fit.

        Returns its run time in seconds; 0 without one.

        Raises:
            TargetError: the API did not answer it as a batch must be answered.
        """
        self._open()
        passed = False
        try:
            await self._learn()
            value = self.signature.warm_up_input
            begun = time.monotonic()
            if value is not None:
                items = await self._ask([value], [b""], self._start_timeout)
                if items[0].fault:
                    raise BadOutput(items[0].error or "")
            passed = True
        except BackendError as exc:
            raise TargetError(
                f"target {self._spec}: the warm-up batch [{_shown(self.signature.warm_up_input)}] failed: {exc}."
                f"{await self._other_models(exc)} {self._advice(exc)}"
            ) from None
        finally:
            if not passed:
                await self.stop()
        return time.monotonic() - begun if value is not None else 0.0

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Run a batch.

        Raises:
            RemoteAbsent: there was no connection, so nothing was sent.
            RemoteError: no tries are left, or none makes sense.
            RemoteRefused: the API rejected an input, or the batch, which may be too large.
            BadOutput: the answer doesn't have an output for each input.
            BatchTimeout: no complete answer came within `timeout` seconds.
        """
        groups, wrong = grouped(entries, self._dialect, self._max_rows)
        items = [wrong.get(place, _NO_ITEM) for place in range(len(entries))]
        for group, found in await self._run_groups(groups, timeout):
            for place, item in zip(group.places, found, strict=True):
                items[place] = item
        return items

    async def gone(self) -> None:
        """Wait for ever: there is no process here that could die."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the connections."""
        await self._close()

    async def _learn(self) -> None:
        """Adopt what the API says about its model, if it says anything.

        Raises:
            TargetError: the model takes or gives something that can't be sent or read.
            RemoteAbsent: no connection came about.
        """
        if (call := self._remote.metadata) is None:
            return
        try:
            answer = await self._answer(call, min(METADATA_TIMEOUT, self._start_timeout))
        except RemoteAbsent:
            raise
        except BackendError as exc:
            log.warning("the remote API says nothing of its model", api=str(self._spec), reason=str(exc))
            return
        try:
            self._dialect = self._remote.dialect.learn(answer.body)
        except BadMetadata as exc:
            raise TargetError(f"target {self._spec}: {exc}") from None

    @property
    def misread(self) -> bool:
        """True if the API's last failure may come from the form of the requests or answers: it answered, and took no offence
        otherwise."""
        return self._failed is None or self._failed.status in OF_FORM

    def _advice(self, error: BackendError) -> str:
        tried = self._failed
        return advice(error, 0, b"") if tried is None else advice(error, tried.status, tried.body)

    async def _other_models(self, error: BackendError) -> str:
        """Return a sentence on the API's models if the requested one isn't among them; else empty."""
        call, model = self._remote.models, self._remote.model
        if call is None or not isinstance(error, RemoteError | RemoteRefused) or isinstance(error, RemoteAbsent):
            return ""
        try:
            async with asyncio.timeout(_MODELS_TIMEOUT):
                tried = await self._try(call, _MODELS_TIMEOUT)
        except (BackendError, TimeoutError):
            return ""
        names = self._dialect.models(tried.body) if isinstance(tried, Answered) else []
        if not names or model in names or any(self._is_secret(name) for name in names):
            return ""
        told = ", ".join(f"`{excerpt(name)}`" for name in dict.fromkeys(names[:_MODELS_SHOWN]))
        more = ", …" if len(names) > _MODELS_SHOWN else ""
        return f" It has no model `{excerpt(model)}`; it says that it has {told}{more}."

    async def _run_groups(
        self, groups: list[RequestGroup], timeout: float
    ) -> list[tuple[RequestGroup, list[ItemResult]]]:
        """Return the items of each group. If there are several, a lone input that the API rejects fails alone."""
        calls = [self._ask(group.inputs, group.parameters, timeout) for group in groups]
        if len(calls) == 1:
            return [(groups[0], await calls[0])]
        found: list[list[ItemResult]] = []
        failed: list[BackendError] = []
        for group, came in zip(groups, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(came, RemoteRefused) and len(group.places) == 1:
                found.append([ItemResult(None, came.shown)])
            elif isinstance(came, BackendError):
                failed.append(came)
            elif isinstance(came, BaseException):
                raise came
            else:
                found.append(came)
        if failed:
            raise _worst(failed, some_ran=bool(found))
        return list(zip(groups, found, strict=True))

    async def _ask(self, inputs: Sequence[Value], parameters: Sequence[bytes], timeout: float) -> list[ItemResult]:
        """Return the items of one request."""
        try:
            call = self._dialect.encode(inputs, parameters)
        except UnicodeEncodeError as exc:
            raise RemoteRefused(f"an input is no proper Unicode text: {exc}") from None
        except NotSendable as exc:
            raise RemoteRefused(str(exc)) from None
        try:
            answer = await self._answer(call, timeout)
        except RemoteExhausted as exc:
            if len(inputs) == 1:
                raise
            raise RemoteRefused(str(exc), exc.shown) from None  # Fewer may fit.
        except RemoteError:
            self._breaker.lost(self._clock())
            raise
        try:
            items = await reader.read(self._dialect, answer.body, len(inputs), answer.json_bytes, rows_of_each(inputs))
        except NoOutputs as exc:
            self._note(f"answered {exc}", answer.body)
            raise self._error(BadOutput, f"answered {exc}") from None
        if (away := self._breaker.regained(self._clock())) is not None:
            log.info("the remote API answers again", api=str(self._spec), away_s=round(away, 1))
        return items if items[0].tokens is None else _shared_out(inputs, items, items[0].tokens)

    async def _answer(self, call: RemoteCall, timeout: float) -> Answered:
        """Return the first answer with a status of success."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                return await self._tries(call, deadline)
        except TimeoutError:
            raise self._error(BatchTimeout, f"had no complete answer within {timeout:g} s") from None

    async def _tries(self, call: RemoteCall, deadline: float) -> Answered:
        loop = asyncio.get_running_loop()
        sent = False
        for count in range(1, self._max_tries + 1):
            self.retries += count > 1
            if turn := self._pace.take(loop.time()):
                await asyncio.sleep(turn)
            tried = await self._traced_try(call, deadline - loop.time(), count)
            if not isinstance(tried, Tried):
                return tried
            sent = sent or tried.kind is not RemoteAbsent
            self._failed = tried
            if tried.rest is not None:
                self.rested += tried.rest
                self._breaker.rest(self._clock(), tried.rest)
            pause = max(backoff(count, self._rng()), tried.rest or 0.0, self._breaker.rest_left(self._clock()))
            if tried.final or count == self._max_tries or loop.time() + pause >= deadline:
                wish = f"; it asks for {tried.rest:g} s of rest" if tried.rest is not None else ""
                failed = f"failed at try {count}: "
                if tried.body:
                    self._note(tried.problem, tried.body)
                kind = RemoteError if sent and tried.kind is RemoteAbsent else tried.kind
                raise self._error(kind, f"{failed}{tried.problem}{wish}", f"{failed}{tried.shown}{wish}")
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _traced_try(self, call: RemoteCall, left: float, number: int) -> Answered | Tried:
        """Try once; see `_try`. If the batch is sampled, the try has a span, which the API gets as its parent."""
        run = RUN.get()
        if run is None:
            return await self._try(call, left)
        begun, context, problem = run.clock(), run.begin_try(), "cut short"
        token = OUTGOING.set(context)
        try:
            tried = await self._try(call, left)
            problem = tried.shown if isinstance(tried, Tried) else ""
            return tried
        except BackendError as exc:
            problem = exc.shown
            raise
        finally:
            OUTGOING.reset(token)
            run.end_try(context, begun, number, problem, self._place)

    def _note(self, what: str, body: bytes | bytearray) -> None:
        """Log the beginning of a body. Nobody else may read it: it may hold credentials, hosts, or others' data."""
        shown = printable(bytes(body[:_MAX_SHOWN]))
        log.warning("the remote API answered no outputs", api=str(self._spec), answer=what, body=shown)

    def _is_secret(self, text: str) -> bool:
        """Return True if a text quotes the URL's query or a credential."""
        secrets = [value for _, value in parse_qsl(urlsplit(self._remote.url).query) if value]
        secrets += [part for value in self._credentials.current().values() for part in value.split()]
        return any(secret in unquote_plus(text) for secret in secrets)

    def _error(self, kind: type[BackendError], what: str, shown: str = "") -> BackendError:
        """Return an error that names the API to operators, but not to clients."""
        return kind(f"the remote API {self._spec} {what}", f"the remote API {shown or what}")


def _shown(value: Value | None) -> str:
    return repr(value) if isinstance(value, str) or value is None else shown(value)


def _worst(failed: Sequence[BackendError], *, some_ran: bool) -> BackendError:
    """Return the error of a batch of several requests: the first that doesn't rule out a run."""
    for error in failed:
        if not isinstance(error, RemoteAbsent):
            return error
    return RemoteError(str(failed[0]), failed[0].shown) if some_ran else failed[0]


def _shared_out(inputs: Sequence[Value], items: Sequence[ItemResult], all: TokenCount) -> list[ItemResult]:
    """Give items their shares of the tokens: of prompt tokens by the lengths of inputs, of the others by those of outputs.

    Failed items get none, so that the tokens of the answered inputs add up to what the API charged.
    """
    there = [place for place, item in enumerate(items) if item.output is not None]
    prompts = shares(all.prompt, [len(octets(inputs[place])) for place in there])
    rest = shares(all.used - all.prompt, [len(items[place].output or "") for place in there])
    told = {place: TokenCount(own + more, own) for place, own, more in zip(there, prompts, rest, strict=True)}
    return [msgspec.structs.replace(item, tokens=told.get(place)) for place, item in enumerate(items)]


def advice(error: BackendError, status: int, body: bytes | bytearray) -> str:
    """Return a sentence on what to check.

    Arguments:
        error: error of the batch.
        status: HTTP status of the last try; 0 where there was none.
        body: body that came with it.
    """
    if isinstance(error, RemoteAbsent):
        return "No connection came about: check host and port, the certificates, and that the API is up."
    if isinstance(error, BatchTimeout):
        return "Look at whether it hangs; if it only takes long, raise --start-timeout-ms."
    if isinstance(error, BadOutput):
        return "It answers in another form than --remote-format says: check the URL, and set the format."
    if status in OF_FORM:
        named = asked_for(body)
        more = (
            f"its answer names what --remote-format {named} sends: try that"
            if named
            else "check --remote-format, and --remote-model"
        )
        return f"It turned the request down for its form: {more}."
    if 300 <= status < 400:
        return "It sends elsewhere: name the URL to which it leads."
    if status >= 500:
        return "It is in trouble itself: its log tells more."
    return _BY_STATUS.get(status, _ANY)


def asked_for(body: bytes | bytearray) -> str:
    """Return the format that has the member an API's error names as missing; empty if it names none."""
    text = bytes(body[:_READ]).decode("latin-1").lower()
    return next((name for words, name in _TOLD if re.search(rf"\b({words})\b", text)), "")
