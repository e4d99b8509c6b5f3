"""A remote API that takes a batch: one call per batch, in one of the dialects (`headway.dialects`).

A batch needs several concurrent requests if its inputs have too many rows together, or differ in the shape of their rows or in
parameters that apply to a whole request.

All attempts and pauses together stay within the batch's timeout. If a pause doesn't fit, there are no more attempts. If the API
requests a rest, all slots observe it, because they share the breaker. Once a byte was sent, the batch counts as run; without a
connection, it doesn't. Credentials and the URL's query never leave the backends. The body of an error is only written to the log.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import msgspec

from headway.backends.process.output_lines import printable
from headway.backends.remote import reader
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.core.breaker import Breaker
from headway.core.excerpt import excerpt
from headway.core.ratelimit import CallPace
from headway.core.retry import backoff
from headway.core.tensors import NoTensors, check_heads, header_of, rows_of
from headway.core.values import as_tensors, octets, shown
from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs, NotSendable, Remote, RemoteCall
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
from headway.model import Entry, ItemResult, Signature, Tensors, TokenCount, Value, ValueKind
from headway.runtime.certificates import RemoteCertificates
from headway.runtime.logger import get_logger
from headway.runtime.spans import OUTGOING, RUN

log = get_logger(__name__)


AT_ONCE = 8  # Maximum number of concurrent requests of a slot for one batch.

T = TypeVar("T")


class NotStarted(Exception):
    """Connections were used before they were opened."""


class Generation(msgspec.Struct, Generic[T], eq=False):
    """Connections that are used and retired together. `stamp` was current when they were made."""

    content: T
    stamp: object
    running: int = 0


class Generations(Generic[T]):
    """Generations of one slot's connections to a remote API: the current one, and retired ones that still run requests. A
    generation is retired after `idle` seconds without requests, by `give_up`, and when `stamp` returns another object
    because certificates changed. Its requests finish on it, and the next use creates a new generation."""

    def __init__(
        self,
        make: Callable[[], T],
        end: Callable[[T], Awaitable[None]],
        stamp: Callable[[], object],
        clock: Callable[[], float],
        idle: float,
    ) -> None:
        self._make, self._end, self._stamp, self._clock, self.idle = make, end, stamp, clock, idle
        self.current: Generation[T] | None = None
        self.retired: list[Generation[T]] = []
        self._places = asyncio.Semaphore(AT_ONCE)
        self._opened = False
        self._used_at = 0.0

    def open(self) -> None:
        self._opened = True

    async def close(self) -> None:
        self._opened = False
        all = [*self.retired, *([] if self.current is None else [self.current])]
        self.current = None
        self.retired.clear()
        for generation in all:
            await self._end(generation.content)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Generation[T]]:
        """Yield connections for one request, once fewer than AT_ONCE requests are running. Raises NotStarted before `open`."""
        async with self._places:
            generation, former = self._next()
            generation.running += 1  # Before any await, because a generation without requests may be closed.
            try:
                if former is not None:
                    await self._end_unused(former)
                yield generation
            finally:
                generation.running -= 1
                self._used_at = self._clock()
                await self._end_unused(generation)

    def give_up(self, generation: Generation[T]) -> None:
        """Retire a generation, so that the next use creates new connections."""
        if self.current is generation:
            self.current = None
            self.retired.append(generation)

    def _next(self) -> tuple[Generation[T], Generation[T] | None]:
        """Return the generation for the next use, and the previous generation if it was just retired."""
        if not self._opened:
            raise NotStarted
        former, stamp = self.current, self._stamp()
        if former is not None:
            idle = not former.running and self._clock() - self._used_at > self.idle
            if not idle and former.stamp is stamp:
                return former, None
            self.give_up(former)
        self.current = Generation(self._make(), stamp)
        return self.current, former

    async def _end_unused(self, generation: Generation[T]) -> None:
        if not generation.running and generation in self.retired:
            self.retired.remove(generation)
            await asyncio.shield(self._end(generation.content))


MAX_ANSWER = 64 << 20  # Maximum size of an answer's body, in bytes after decompression.
METADATA_TIMEOUT = 10.0  # Seconds for asking the API about its model, including all attempts.
_NO_ITEM = ItemResult(None)
_MAX_SHOWN = 200
_MODELS_TIMEOUT = 2.0  # Seconds for requesting the API's list of models after a failed start.
_MODELS_SHOWN = 10

_BY_STATUS = {
    401: "It requires a credential, or a different one: set HEADWAY_REMOTE_TOKEN or --remote-headers-file.",
    403: "It knows the credential, but does not allow it to do this: use one that may, and check --remote-model.",
    404: "It has nothing at this URL: check the path, and --remote-model.",
    405: "It does not accept POST at this URL: check the path.",
    407: "A proxy in between requires a credential.",
    413: "It takes fewer inputs at a time: lower --max-batch-size.",
    429: "It asks for fewer calls: limit them with --remote-rate, and check its quota.",
}
OF_FORM = (400, 415, 422)  # Statuses by which an API rejects the format of a request.
_ANY = "Check the URL, --remote-format, --remote-model, the credentials and certificates, and that the API is up."
_WORDS = ((r"datatype|tensor", "oip"), (r"messages|prompt", "openai-completions"), (r"inputs", "inputs"), (r"input", "openai-embeddings"))  # fmt: skip
"""Patterns for a member of each format. An API's error may name such a member as missing."""
_READ = 4096


class Answered(NamedTuple):
    """Answer to a successful attempt. `json_bytes` is the length of the JSON in `body` if binary data follows it, or else -1."""

    body: bytes | bytearray
    json_bytes: int = -1


class TryVerdict(NamedTuple):
    """Verdict on the status of a failed attempt. If `final`, another attempt would be pointless."""

    final: bool
    kind: type[BackendError]
    rest: float | None = None


class Tried(NamedTuple):
    """Outcome of a failed attempt. `problem` is for operators, and `shown` for clients. `rest` is how many seconds of rest
    the API requests, if any. `body` is only for the log. `status` is 0 if there was no answer."""

    problem: str
    shown: str
    kind: type[BackendError]
    final: bool
    rest: float | None = None
    body: bytes | bytearray = b""
    status: int = 0

    @classmethod
    def judged(cls, verdict: TryVerdict, problem: str, body: bytes | bytearray, status: int = 0) -> Tried:
        """Return the outcome of an attempt with a failure status. Clients may see the whole `problem`."""
        return cls(problem, problem, verdict.kind, verdict.final, verdict.rest, body, status)


class RequestGroup(NamedTuple):
    """The entries of one request: their places in the batch, and their inputs as the dialect takes them."""

    places: list[int]
    inputs: list[Value]
    parameters: list[bytes]


class RemoteBackend(ABC):
    """Backend for one slot of a remote API: runs one batch at a time, on connections that the subclass creates.

    Arguments:
        certificates: certificates for the connections. By default, they trust the system's authorities, and present none.
        start_timeout: seconds for the warm-up request, including all attempts.
        max_tries: limit on attempts for one request.
        max_rows: limit on rows of tensors in a request with several entries, or 0 for none.
        breaker: breaker that the slots of one API share. It knows when the API rests or is down.
        clock: monotonic seconds for the breaker.
        pace: limits the calls of all slots that share it.

    Attributes:
        retries: number of attempts after the first one for each request.
        rested: total seconds of rest that the API has requested.
    """

    pid = 0
    warm_up: Sequence[tuple[int, float]] = ()  # Empty, because each warm-up batch may cost money.
    _generations: Generations[Any]  # Connections, which the subclass sets.

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
    async def _try(self, call: RemoteCall, left: float) -> Answered | Tried:
        """Make one attempt. Raises TimeoutError after `left` seconds, or BackendError if no attempt can succeed."""

    @property
    def signature(self) -> Signature:
        return self._dialect.signature

    async def start(self) -> float:
        """Run a warm-up batch of one input, if one is known. Return how many seconds it took, or 0 if none was sent. Raises
        TargetError if it fails."""
        self._generations.open()
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
            RemoteError: the last attempt failed, or another one would be pointless.
            RemoteRefused: the API rejected an input, or the batch, for example because it is too large.
            BadOutput, BatchTimeout: the answer doesn't have an output for each input, or didn't arrive in time.
        """
        groups, unsendable = grouped(entries, self._dialect, self._max_rows)
        items = [unsendable.get(place, _NO_ITEM) for place in range(len(entries))]
        for group, results in await self._run_groups(groups, timeout):
            for place, item in zip(group.places, results, strict=True):
                items[place] = item
        return items

    async def gone(self) -> None:
        await asyncio.Event().wait()  # There is no process that could die.

    async def stop(self) -> None:
        await self._generations.close()

    async def _learn(self) -> None:
        """Apply the model's metadata if the API provides any. Raises RemoteAbsent, or TargetError if the model is unusable."""
        if (call := self._remote.metadata) is None:
            return
        try:
            answer = await self._answer(call, min(METADATA_TIMEOUT, self._start_timeout))
        except RemoteAbsent:
            raise
        except BackendError as exc:
            log.warning("the remote API provides no metadata for its model", api=str(self._spec), reason=str(exc))
            return
        try:
            self._dialect = self._remote.dialect.learn(answer.body)
        except BadMetadata as exc:
            raise TargetError(f"target {self._spec}: {exc}") from None

    @property
    def misread(self) -> bool:
        """True if the last failure may come from the format of requests or answers."""
        return self._failed is None or self._failed.status in OF_FORM

    def _advice(self, error: BackendError) -> str:
        tried = self._failed
        return advice(error, 0, b"") if tried is None else advice(error, tried.status, tried.body)

    async def _other_models(self, error: BackendError) -> str:
        """Return a sentence that lists the API's models if the requested one isn't among them, or else ""."""
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
        listed = ", ".join(f"`{excerpt(name)}`" for name in dict.fromkeys(names[:_MODELS_SHOWN]))
        more = ", …" if len(names) > _MODELS_SHOWN else ""
        return f" It has no model `{excerpt(model)}`; it lists {listed}{more}."

    async def _run_groups(
        self, groups: list[RequestGroup], timeout: float
    ) -> list[tuple[RequestGroup, list[ItemResult]]]:
        """Return each group's results. If one of several groups is rejected and has only one input, only that input fails."""
        calls = [self._ask(group.inputs, group.parameters, timeout) for group in groups]
        if len(calls) == 1:
            return [(groups[0], await calls[0])]
        results: list[list[ItemResult]] = []
        failed: list[BackendError] = []
        for group, outcome in zip(groups, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, RemoteRefused) and len(group.places) == 1:
                results.append([ItemResult(None, outcome.shown)])
            elif isinstance(outcome, BackendError):
                failed.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        if failed:
            raise _worst(failed, some_ran=bool(results))
        return list(zip(groups, results, strict=True))

    async def _ask(self, inputs: Sequence[Value], parameters: Sequence[bytes], timeout: float) -> list[ItemResult]:
        try:
            call = self._dialect.encode(inputs, parameters)
        except UnicodeEncodeError as exc:
            raise RemoteRefused(f"an input is not valid Unicode text: {exc}") from None
        except NotSendable as exc:
            raise RemoteRefused(str(exc)) from None
        try:
            answer = await self._answer(call, timeout)
        except RemoteExhausted as exc:
            if len(inputs) == 1:
                raise
            raise RemoteRefused(str(exc), exc.shown) from None  # Fewer inputs may fit.
        except RemoteError:
            self._breaker.lost(self._clock())
            raise
        try:
            items = await reader.read(self._dialect, answer.body, len(inputs), answer.json_bytes, rows_of_each(inputs))
        except NoOutputs as exc:
            self._log_answer(f"answered {exc}", answer.body)
            raise self._error(BadOutput, f"answered {exc}") from None
        if (away := self._breaker.regained(self._clock())) is not None:
            log.info("the remote API answers again", api=str(self._spec), away_s=round(away, 1))
        return items if items[0].tokens is None else _shared_out(inputs, items, items[0].tokens)

    async def _answer(self, call: RemoteCall, timeout: float) -> Answered:
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
                    self._log_answer(tried.problem, tried.body)
                kind = RemoteError if sent and tried.kind is RemoteAbsent else tried.kind
                raise self._error(kind, f"{failed}{tried.problem}{wish}", f"{failed}{tried.shown}{wish}")
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _traced_try(self, call: RemoteCall, left: float, number: int) -> Answered | Tried:
        """Make one attempt. In a sampled batch, it gets a span, which is sent to the API as the parent."""
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

    def _log_answer(self, what: str, body: bytes | bytearray) -> None:
        """Log the beginning of a body. It may contain credentials or others' data, and so is shown nowhere else."""
        shown = printable(bytes(body[:_MAX_SHOWN]))
        log.warning("the remote API returned no outputs", api=str(self._spec), answer=what, body=shown)

    def _is_secret(self, text: str) -> bool:
        """Return True if a string contains part of the URL's query or of a credential."""
        secrets = [value for _, value in parse_qsl(urlsplit(self._remote.url).query) if value]
        secrets += [part for value in self._credentials.current().values() for part in value.split()]
        return any(secret in unquote_plus(text) for secret in secrets)

    def _error(self, kind: type[BackendError], what: str, shown: str = "") -> BackendError:
        return kind(f"the remote API {self._spec} {what}", f"the remote API {shown or what}")


def _shown(value: Value | None) -> str:
    return repr(value) if isinstance(value, str) or value is None else shown(value)


def _worst(failed: Sequence[BackendError], *, some_ran: bool) -> BackendError:
    """Choose the error for a batch whose requests failed, preferably one after which an input may have run."""
    ran = next((error for error in failed if not isinstance(error, RemoteAbsent)), None)
    return ran or (RemoteError(str(failed[0]), failed[0].shown) if some_ran else failed[0])


def _shared_out(inputs: Sequence[Value], items: Sequence[ItemResult], all: TokenCount) -> list[ItemResult]:
    """Divide the API's token count among the inputs: prompt tokens by input length, the others by output length. Failed
    inputs get none, so that the tokens of the answered inputs add up to the charged tokens."""
    answered = [place for place, item in enumerate(items) if item.output is not None]
    prompts = shares(all.prompt, [len(octets(inputs[place])) for place in answered])
    completions = shares(all.used - all.prompt, [len(items[place].output or "") for place in answered])
    tokens = {
        place: TokenCount(prompt + completion, prompt)
        for place, prompt, completion in zip(answered, prompts, completions, strict=True)
    }
    return [msgspec.structs.replace(item, tokens=tokens.get(place)) for place, item in enumerate(items)]


def advice(error: BackendError, status: int, body: bytes | bytearray) -> str:
    """Return advice after a failed start. `status` is the HTTP status of the last attempt, or 0 if there was no answer."""
    if isinstance(error, RemoteAbsent):
        return "There was no connection: check host and port, the certificates, and that the API is up."
    if isinstance(error, BatchTimeout):
        return "Check if it hangs. If it is only slow, raise --start-timeout-ms."
    if isinstance(error, BadOutput):
        return "Its answers do not have the format in --remote-format: check the URL, and set the format."
    if status in OF_FORM:
        named = guessed_format(body)
        more = (
            f"its answer mentions what --remote-format {named} sends, so try that"
            if named
            else "check --remote-format, and --remote-model"
        )
        return f"It rejected the format of the request: {more}."
    if 300 <= status < 400:
        return "It redirects: use the URL that it redirects to."
    if status >= 500:
        return "It has an internal problem: see its log."
    return _BY_STATUS.get(status, _ANY)


def guessed_format(body: bytes | bytearray) -> str:
    """Guess the API's format from the missing member that its error names. Return "" if it names none."""
    text = bytes(body[:_READ]).decode("latin-1").lower()
    return next((name for words, name in _WORDS if re.search(rf"\b({words})\b", text)), "")


def grouped(
    entries: Sequence[Entry], dialect: Dialect, most_rows: int = 0
) -> tuple[list[RequestGroup], dict[int, ItemResult]]:
    """Divide a batch into requests. All entries of a request have the same row shape and, if parameters apply to a whole
    request, the same parameters. A request with several entries has at most `most_rows` rows (0: no limit). Return the
    requests, and a result for each entry whose input can't be sent, by its place in the batch."""
    signature = dialect.signature
    of_form: dict[Hashable, list[RequestGroup]] = {}
    rows: dict[Hashable, int] = {}
    wrong: dict[int, ItemResult] = {}
    for place, entry in enumerate(entries):
        try:
            value = _taken(entry.input, signature)
        except _NotTaken as exc:
            wrong[place] = exc.item
            continue
        key = (entry.parameters if dialect.shared_parameters else b"", _form_of(value, signature))
        count = rows_of(value)
        groups = of_form.setdefault(key, [])
        if not groups or (most_rows and rows[key] + count > most_rows):
            groups.append(RequestGroup([], [], []))
            rows[key] = 0
        rows[key] += count
        group = groups[-1]
        group.places.append(place)
        group.inputs.append(value)
        group.parameters.append(entry.parameters)
    return [group for groups in of_form.values() for group in groups], wrong


def rows_of_each(inputs: Sequence[Value]) -> list[int]:
    """Return the number of rows of each input, for `Dialect.decode`, or [] if the inputs aren't tensors."""
    headers = [header_of(value) for value in inputs if isinstance(value, Tensors)]
    return [0 if header.single else header.rows for header in headers]


class _NotTaken(Exception):
    def __init__(self, item: ItemResult) -> None:
        super().__init__(item.error)
        self.item = item


def _taken(value: Value, signature: Signature) -> Value:
    if signature.takes is ValueKind.TENSORS:
        try:
            tensors = as_tensors(value, signature.inputs)
            check_heads(header_of(tensors).heads, signature.inputs)
        except NoTensors as exc:
            raise _NotTaken(ItemResult(None, str(exc))) from None
        return tensors
    if isinstance(value, str) or signature.takes is ValueKind.JSON:
        return value
    what = "text" if signature.takes is ValueKind.TEXT else "bytes, in base64"
    raise _NotTaken(ItemResult(None, f"the remote API takes {what}", True))


def _form_of(value: Value, signature: Signature) -> Hashable:
    """Return the row shapes of an input, which must be the same for all inputs of a request."""
    if signature.takes is not ValueKind.TENSORS or not isinstance(value, Tensors):
        return ()
    heads = header_of(value).heads
    named = len(signature.inputs) > 1  # If there is only one input, it may have any name.
    return tuple(sorted((head.name if named else "", head.shape[1:]) for head in heads))


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide tokens in proportion to the weights, or evenly if all weights are 0. The parts add up to `total`."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts, before, done = [], 0, 0
    for weight in weights:  # Rounding the running total instead of each part ensures that no token is lost.
        before += weight
        end = total * before // whole
        parts.append(end - done)
        done = end
    return parts
