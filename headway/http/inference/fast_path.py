"""Fast path: the inference routes answered on the connection itself, all other routes left to their handlers.

A request costs one lookup of the principal, one decode, one submit, one encode and one write: no ASGI scope, no task,
no future, no timer. The connection is the reply sink, since it has one request in hand at a time.

A client on a kept connection sends the same head with every request, but for its Content-Length. So a head that was
once parsed and found good is remembered as the bytes around that number; a request that begins with the same bytes
means the same, and is not parsed again. Nothing is remembered beyond the connection, and the credential is looked up
every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic

from headway.core.failures import error_of, failure_of, no_text, unread
from headway.core.json_pages import SHORT, Steps
from headway.doors.answer_pieces import is_large
from headway.doors.entrance import bad_credential
from headway.doors.exchange import Exchange, Outcome, ReadRequest, Usual, outcome_headers, unusual
from headway.doors.fields import ID_PREFIX, with_time_left
from headway.doors.large_answers import LargeAnswer
from headway.errors import AnyError, RequestError
from headway.gateway.fan_out import FanOut, joined
from headway.gateway.lane import CLOSED
from headway.gateway.served_models import KnownModels
from headway.http.inference.async_handoff import AsyncHandoff, task_answer
from headway.http.inference.body_receiver import BodyPieces, BodyReceiver
from headway.http.inference.codecs import NO_ROUTE, Codec
from headway.http.inference.compressed_bodies import Unpacker
from headway.http.inference.context import InferenceContext
from headway.http.inference.cross_origin import Origins, asks_leave, permission
from headway.http.inference.inference_head import HEAD, InferenceHead, read_inference_head, several_as_task
from headway.http.inference.target import RequestTarget
from headway.http.server.connection import ASKED, BODY, CONTINUE, FAR, IDLE, MOST_BUFFERED, ROUTE, WRITING, Connection
from headway.http.server.connection_context import LARGE
from headway.http.server.head import Head
from headway.model import Principal, Reply, RequestOptions, TokenCount, Value
from headway.runtime.fair_turns import MILLISECOND

MOST_DIGITS = 9
"""Most digits of the length of a body whose head is remembered."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % MOST_DIGITS)
_NOBODY = Principal(user="", tenant="", tier=0)
_UNKNOWN = InferenceHead(NO_ROUTE, RequestOptions(0.0), NO_ROUTE.read_json)
_OUTPUT, _TOKENS = attrgetter("output"), attrgetter("tokens")
_NO_WAY = Usual(unusual, NO_ROUTE.write, b"", NO_ROUTE.write_one)
_ZERO = ord("0")
_UNASKED = object()
"""Model of a request that no lane is for."""


def _nobody() -> Principal | None:
    return None


def _at_once(read: ReadRequest, body: bytes, options: RequestOptions, models: KnownModels) -> Steps[Exchange]:
    """Read a body that takes no long time in one step."""
    yield 0
    return read(body, options, models)


class FastPathConnection(Connection):
    """Connection of the public port.

    Arguments:
        inference: context shared with the listener's other connections.
    """

    far = FAR

    __slots__ = (
        "after",
        "alarm",
        "before",
        "begin",
        "begun",
        "codec",
        "exchange",
        "fan_out",
        "handoff",
        "inference",
        "kind",
        "known",
        "lane",
        "large",
        "latest",
        "memo",
        "memo_marks",
        "open_by",
        "origin",
        "owner",
        "pieces",
        "plain",
        "principal",
        "request",
        "reserved",
        "skipped",
        "still",
        "unfetched",
        "usual",
    )  # fmt: skip

    def __init__(self, inference: InferenceContext) -> None:
        super().__init__(inference)
        self.inference = inference
        self.request: InferenceHead | None = None
        self.codec = _UNKNOWN.codec
        self.exchange: Exchange | None = None
        self.principal = self.known = _NOBODY
        self.origin: str | None = None
        self.owner: str | None = None
        self.reserved = self.unfetched = 0
        self.handoff: AsyncHandoff | None = None
        self.fan_out: FanOut | None = None
        self.large: LargeAnswer | None = None
        self.begun = 0.0
        self.alarm: asyncio.TimerHandle | None = None
        """Timer of the request in hand while its long body waits to be read."""
        self.pieces = BodyPieces()
        self.memo = _UNKNOWN
        self.memo_marks = b""
        """Marks of answers to requests with the remembered head."""
        self.still: Callable[[], Principal | None] = _nobody
        """Principal of the credential in the remembered head, as it is now."""
        self.lane, self.plain, self.usual, self.kind = CLOSED, False, _NO_WAY, b""
        """Lane of requests with the remembered head."""
        self.open_by: object = None
        """Facts for which that lane takes them with nothing more to be asked; None where it does not, or the last was no such request."""
        self.before: bytes | tuple[()] = ()
        """Beginning of a request with the remembered head. Nothing begins with `()`."""
        self.after = b""
        self.begin = self.latest = self.skipped = 0

    @property
    def silent(self) -> bool:
        """Whether no request of its client is under way."""
        return self.phase not in (BODY, ASKED, ROUTE, WRITING)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it when there are too many, in all or of its client."""
        super().connection_made(transport)
        if self.phase == IDLE and self in self.inference.connections:
            address = str((transport.get_extra_info("peername") or ("",))[0])
            self.origin = address if self.inference.entrance.anonymous else None
            if not self.inference.quotas.enter(self, address):
                self.brief = self.owner is None
                self.reject(self.inference.quotas.too_many())

    def data_received(self, data: bytes) -> None:
        """Take the bytes that came. A whole request under a known head goes straight on: to the queue, where its lane is open."""
        begin = self.begin
        if self.phase != IDLE or not data.startswith(self.before):
            super().data_received(data)
            return
        try:
            end = data.index(self.after, begin, self.latest)
        except ValueError:
            super().data_received(data)
            return
        inference = self.inference
        begun = end + self.skipped
        length = len(data) - begun
        if data[begin:end] != b"%d" % length or length > inference.most_at_once:
            if not self._repeat_large(data[begin:end], data, begun):
                super().data_received(data)
            return
        body = data[begun:]
        try:
            gateway = inference.gateway
            lane = self.lane
            model: str | object | None
            try:
                if self.open_by is not gateway.facts or self.still() is not self.known:
                    model = _UNASKED
                else:
                    self.id = inference.new_id()
                    self.principal = lane.principal
                    self.begun = monotonic()
                    model, text, parameters = self.usual.read(body)
            except RequestError:  # It is told why, or there is another reader for it.
                model = _UNASKED
            if model != lane.asked:
                self._repeat(body)
                return
            self.phase = ASKED
            gateway.enter(self, lane, self.id, text, parameters)
        except Exception as exc:
            self.fault(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon the request in hand."""
        try:
            if self.phase == ASKED:
                self._abandon()
            self._end_alarm()
            self._end_handoff()
            self._end_fan_out()
        finally:
            self.request, self.memo = None, _UNKNOWN
            self.still, self.before = _nobody, ()
            self.pieces.clear()
            self.inference.quotas.leave(self)
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client does not take its answer."""
        super().pause_writing()
        if self.large is not None and self.fan_out is None:
            self.large.left_since = self.large.left_since or self.unread.since
            self.unread.count_whole(self.large.left_since, self.large.total)
        self._count_unfetched()

    def resume_writing(self) -> None:
        """Note that the client has taken all of its answer."""
        super().resume_writing()
        if self.large is None:
            self.inference.quotas.keep(self, 0)
        else:
            self._count_unfetched()
            self._send_later()

    def inspect(self, now: float) -> None:
        """End what takes too long; `now` is a monotonic instant in seconds."""
        super().inspect(now)
        if self.unread.since:
            self._count_unfetched()

    def answer(self, reply: Reply, outputs: Sequence[Value] = (), tokens: Sequence[TokenCount | None] = ()) -> None:
        """Take the reply to the request in hand; one to any other request is never written.

        Arguments:
            reply: the reply.
            outputs: outputs of the request's inputs where there are several.
            tokens: tokens of these.
        """
        if self.phase != ASKED or reply.id != self.id:
            return
        try:
            output = reply.output
            if not self.plain or type(output) is not str or len(output) > LARGE:
                self._answer_rarely(reply, outputs, tokens)
                return
            now = monotonic()
            inference = self.inference
            ran = reply.ran
            version = inference.version if ran is None else ran.version or inference.version
            try:
                body = self.usual.write(
                    ID_PREFIX + self.id, output, int((now - self.begun) * 1e6) / 1000, version, reply.tokens
                )
            except UnicodeEncodeError:
                self.write_error(no_text())
                self.rest_from(now)
                return
            limits = self.principal.limits
            lines = self.codec.limit_lines(inference.rate_limits, limits) if limits else b""
            head = HEAD % (inference.opening, self.id.encode(), lines, self.kind, len(body))
            self.transport.write(head + body)
            self.principal = _NOBODY
            self.phase = IDLE
            self.since = now
            if self.unread.since:
                self.finish()
            if self.buffer:
                self.advance()
        except Exception as exc:
            self.fault(exc)

    def _answer_rarely(self, reply: Reply, outputs: Sequence[Value], tokens: Sequence[TokenCount | None]) -> None:
        """Write an answer that is no text alone, that is large or marked, or that ends the connection."""
        inference = self.inference
        if self.handoff is not None:
            if reply.output is not None and self.handoff.due:
                self._hand_over()
                return
            self._end_handoff()
        now = monotonic()
        shared = b""
        if reply.shared is not None or reply.unkept:
            shared = "".join(f"{name}: {value}\r\n" for name, value in outcome_headers(reply)).encode()
        output = reply.output
        if output is None:
            self.write_error(failure_of(reply), shared)
        else:
            try:
                milliseconds = int((now - self.begun) * 1e6) / 1000
                shown = ID_PREFIX + self.id
                ran = reply.ran
                version = (ran.version if ran is not None else "") or inference.version
                exchange = self.exchange
                usual = self.usual if exchange is None else exchange.usual
                more: bytes
                body: bytes | Iterator[bytes]
                if usual is not None and type(output) is str and len(output) <= LARGE:
                    more, body = usual.kind, usual.write(shown, output, milliseconds, version, reply.tokens)
                else:
                    write = self.usual.write_any if exchange is None else exchange.write
                    more, body = write(
                        Outcome(shown, outputs or (output,), milliseconds, version, tokens or (reply.tokens,))
                    )
                if isinstance(body, Iterator):
                    room = None if self.fan_out is None else self.fan_out.room
                    if is_large(output) if room is None else room.held > 0:
                        self.large = LargeAnswer(body, room)
                        self._in_turn(partial(self._make, self.large, more, shared))
                        return
                    body = b"".join(body)
                shared += more
            except UnicodeEncodeError:
                self.write_error(no_text(), shared)
            except RequestError as exc:
                self.write_error(exc)
            else:
                head = HEAD % (inference.opening, self.id.encode(), self._ending(), shared, len(body))
                if len(body) < LARGE:
                    self.transport.write(head + body)
                else:  # What is large is not copied.
                    self.transport.write(head)
                    self.transport.write(body)
        self.rest_from(now)

    def _ending(self) -> bytes:
        """Lines of an answer's header on the end of the connection and on the principal's limits, and its marks."""
        ending = b"connection: close\r\n" + self.marks if self.last or self.inference.closing else self.marks
        if self.principal.limits:
            ending += self.codec.limit_lines(self.inference.rate_limits, self.principal.limits)
        return ending

    def _in_turn(self, work: Callable[[], None]) -> None:
        """Have some of a large body read, or of a large answer made or sent, when it is the turn of the connection's tenant."""
        self.inference.large_bodies.wait(self.known_tenant(), work)

    def _make(self, answer: LargeAnswer, kind: bytes, marks: bytes) -> None:
        """Make some of a large answer, and begin to send it when it is whole.

        Arguments:
            answer: the answer, which is dropped if its request has ended meanwhile.
            kind: lines of its header that say what it is.
            marks: further lines, which the header of its failure has, too.
        """
        if self.large is not answer:
            return
        try:
            if not answer.make():
                self._in_turn(partial(self._make, answer, kind, marks))
                return
        except UnicodeEncodeError:
            self.write_error(no_text(), marks)
        except RequestError as exc:
            self.write_error(exc)
        except Exception as exc:
            self.fault(exc)
            return
        else:
            self.phase, answer.total = WRITING, answer.length
            opening, id = self.inference.opening, self.id.encode()
            self.transport.write(HEAD % (opening, id, self._ending(), marks + kind, answer.length))
            self._send_later()
            return
        self.rest_from()

    def _send_later(self) -> None:
        """Send some of a large answer when it is its turn, unless the client leaves what was sent."""
        if self.phase == WRITING and self.large is not None and not self.unread.since:
            self._in_turn(partial(self._send, self.large))

    def _send(self, answer: LargeAnswer) -> None:
        if self.large is not answer or self.phase != WRITING or self.unread.since:
            return
        self.transport.write(answer.take())
        if answer.length:
            self._send_later()
        else:
            self.rest_from()

    def serve(self, head: Head, raw: bytes) -> None:
        """Start on a request: the inference routes here, all others by their handlers."""
        self.request = self.open_by = None
        inference = self.inference
        if inference.origins is not None:
            self.marks = inference.origins.marks(head)
            if asks_leave(head):
                self._give_leave(inference.origins, head)
                return
        routes = inference.routes
        if head.method == b"POST" and (found := routes.find(head.target)) is not None:
            self._serve_inference(*found, head, raw)
            return
        self.encode_error = routes.error_form(head.target)
        try:
            self._tell_owner(head)
        except RequestError as exc:
            self.refuse(exc, head)
        else:
            super().serve(head, raw)

    def _give_leave(self, origins: Origins, head: Head) -> None:
        """Answer a browser that asks whether it may send a request."""
        if not self.marks:
            self.refuse(origins.refusal(head), head)
            return
        self.transport.write(permission(head, ID_PREFIX + self.id, self.context.date, self._ending()))
        if self.expect_body(head):
            self._drop_body()
        else:
            self.finish()

    def reserve(self, amount: int) -> bool:
        """Let the connection hold `amount` bytes of bodies, in all; False, and nothing is changed, when it may not."""
        return amount == self.reserved or self.inference.quotas.reserve(self, amount)

    def take(self, content: bytes) -> None:
        """Take a piece of the body."""
        if self.request is None:
            super().take(content)
        elif self.chunks is None or self.reserve(self.reserved + len(content)):
            self.pieces.append(content)
        else:
            self.reject(self.inference.quotas.no_room(self))

    def complete(self) -> None:
        """Note that the body is complete."""
        request = self.request
        if request is None:
            super().complete()
            return
        body = self.pieces.take()
        self.begun = monotonic()
        if len(body) <= SHORT and not request.coding:
            self._give_back()
            self._ask(request, body)
            return
        self.phase = ASKED
        alarm = self.alarm = self.inference.loop.call_later(request.options.timeout, self._expire, request)
        if request.coding:
            unpacker = Unpacker(body, request.coding, self.inference.settings)
            self._in_turn(partial(self._unpack, request, unpacker, alarm))
        else:
            self._in_turn(partial(self._take_large, request, body, alarm))

    def _unpack(self, request: InferenceHead, unpacker: Unpacker, alarm: asyncio.TimerHandle) -> None:
        """Unpack some of a compressed body, unless its request has ended meanwhile, and its alarm with it."""
        if self.alarm is not alarm:
            return
        try:
            if unpacker.step():
                self._in_turn(partial(self._take_large, request, unpacker.whole(), alarm))
            elif self.reserve(unpacker.size):
                self._in_turn(partial(self._unpack, request, unpacker, alarm))
            else:
                raise self.inference.quotas.no_room(self)
        except RequestError as exc:
            self._give_back()
            self._charge_and_deny(request, exc)
            self.advance()
        except Exception as exc:
            self.fault(exc)

    def _take_large(self, request: InferenceHead, body: bytes, alarm: asyncio.TimerHandle) -> None:
        """Begin to read a large body, unless its request has ended meanwhile."""
        if self.alarm is alarm:
            only, served = self.principal.models, self.inference.served
            known = served.seen_by(only) if only else served
            read = partial(_at_once, request.read) if request.read_long is None else request.read_long
            self._read_long(request, read(body, request.options, known), self.principal, alarm, 0)

    def _read_long(
        self, request: InferenceHead, steps: Steps[Exchange], principal: Principal, alarm: asyncio.TimerHandle, size: int
    ) -> None:  # fmt: skip
        """Read some more of a long body, of which `size` bytes outside strings were read, unless its request has ended meanwhile.

        Its principal is charged for what was read in any case.
        """
        if self.alarm is not alarm:
            self.inference.entrance.charge_pages(principal, size)
            return
        end = monotonic() + MILLISECOND
        try:
            while monotonic() < end:
                size += next(steps)
        except StopIteration as stop:
            exchange: Exchange = stop.value
            self._give_back()
            if request.wish is not None and isinstance(exchange.input, list):
                self._charge_and_deny(request, several_as_task())
            else:
                exchange.options = with_time_left(exchange.options, monotonic() - self.begun)
                self._ask(request, b"", exchange)
        except RequestError as exc:
            self._give_back()
            self._charge_and_deny(request, exc)
        except Exception as exc:
            self.fault(exc)
            return
        else:
            self._in_turn(partial(self._read_long, request, steps, principal, alarm, size))
            return
        self.inference.entrance.charge_pages(principal, size)
        self.advance()

    def _expire(self, request: InferenceHead) -> None:
        """Answer the request in hand, whose time has passed before its body was read; that is dropped in its turn."""
        try:
            self._end_alarm()
            self.reserve(0)
            self._deny(request, error_of(unread(request.options.timeout)), self.inference.tiers[self.principal.tier])
            self.advance()
        except Exception as exc:
            self.fault(exc)

    def _end_alarm(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None

    def _give_back(self) -> None:
        """Give back the reservation of a body that came in pieces, and the charge of its request."""
        self._end_alarm()
        self.reserve(0)
        self.inference.entrance.refund(self.principal)

    def write_error(self, error: AnyError, fields: bytes = b"") -> None:
        """Write the answer of an error, with the principal's limits."""
        if self.principal.limits:
            fields += self.codec.limit_lines(self.inference.rate_limits, self.principal.limits)
        self.principal = _NOBODY
        super().write_error(error, fields)

    def reject(self, error: RequestError, tier: str | None = "none") -> None:
        """Answer an error that ends the connection."""
        if self.principal is not _NOBODY and tier is not None:
            tier = self.inference.tiers[self.principal.tier]
        if self.phase == ASKED:
            self._end_alarm()
            self._abandon()
            self._end_handoff()
        elif self.phase == BODY and self.request is not None:
            self.inference.trace_refused(self.request.options, ID_PREFIX + self.id, error, self.since)
        self.request = None
        self.pieces.clear()
        super().reject(error, tier)

    def retire(self) -> None:
        """Let the answer in hand be the last, as the listener is closing."""
        super().retire()
        self.plain, self.open_by = False, None

    def close_over_quota(self) -> None:
        """End a connection between two requests, since its owner holds too much."""
        self.encode_error = self.inference.encode_error
        self.reject(self.inference.quotas.no_room(self))

    def _abandon(self) -> None:
        """Let go of the request in hand, as its client has left."""
        self.inference.gateway.abandon(self, self.principal.tenant, self.id)
        if self.fan_out is not None:
            self.fan_out.abandon()

    def _count_unfetched(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self.large is not None and self.fan_out is None:
            left += self.large.length
        self.inference.quotas.keep(self, left if left > MOST_BUFFERED else 0)

    def _serve_inference(self, codec: Codec, target: RequestTarget, head: Head, raw: bytes) -> None:
        inference, entrance = self.inference, self.inference.entrance
        self.codec, self.encode_error = codec, codec.encode_error
        try:
            principal = entrance.identify(head.single.get(b"authorization", b""))
            if principal is not self.known:
                self._belong(principal)
        except RequestError as exc:
            self.refuse(exc, head)
            return
        self.principal = principal
        try:
            request = read_inference_head(codec, head, target, inference.codec_context, self.origin, principal.models)
        except RequestError as exc:
            over = entrance.charge_wrong(principal, self.id)
            self.refuse(over or exc, head, None if over else inference.tiers[principal.tier])
            return
        length, buffer = head.length, self.buffer
        whole = 0 <= length <= len(buffer) and length <= SHORT and not (request.coding and length)
        if not whole and (over := entrance.excess(principal, self.id)) is not None:
            self.refuse(over, head, None)
            return
        if length > 0 and not whole and not self.reserve(length):
            self.refuse(inference.quotas.no_room(self), head, inference.tiers[principal.tier])
            return
        if not whole:
            entrance.charge(principal)  # Until the body is there: else any number could be on their way.
        self.request = request
        if request.repeatable:
            self._remember(request, raw)
        if whole:
            self.buffer = buffer[length:]
            self.begun = monotonic()
            self._ask(request, buffer[:length])
            return
        self.phase = BODY
        if length >= LARGE:
            self._make_room(length, len(buffer))
        self.expect_body(head)
        if request.expects and not buffer:
            self.transport.write(CONTINUE)

    def _remember(self, request: InferenceHead, raw: bytes) -> None:
        found = _LENGTH.search(raw)
        if found is not None and len(raw) + MOST_DIGITS <= self.context.most_header:
            self.memo, self.memo_marks, self.lane, self.open_by = request, self.marks, CLOSED, None
            self.still = self.inference.entrance.watch(request.authorization)
            self.before = raw[: found.start(1)]
            self.after = raw[found.end(1) :]
            self.begin, self.skipped = len(self.before), len(self.after)
            self.latest = self.begin + MOST_DIGITS + self.skipped

    def _repeat(self, body: bytes) -> None:
        """Start on a request that came whole, under the remembered head."""
        request, inference = self.memo, self.inference
        self.open_by, self.marks = None, self.memo_marks
        self.id = request.id or inference.new_id()
        self.codec, self.encode_error = request.codec, request.codec.encode_error
        try:
            if (found := self.still()) is not self.known:
                if found is None:
                    raise bad_credential(request.authorization)
                self._belong(found)
        except RequestError as exc:
            self._deny(request, exc)
            return
        self.request, self.principal = request, self.known
        self.begun = monotonic()
        self._ask(request, body)

    def _repeat_large(self, digits: bytes, data: bytes, begun: int) -> bool:
        """Start on a request under the remembered head whose large body is there or on its way; False: its head is to be read.

        Arguments:
            digits: length of the body, as the head has it.
            data: bytes that have come.
            begun: where the body begins among them.
        """
        length = int(digits) if digits.isdigit() and digits[0] != _ZERO else 0
        entrance, principal, there = self.inference.entrance, self.known, len(data) - begun
        if not SHORT < length <= self.context.most_body or there > length or self.still() is not principal:
            return False
        if (principal.limits and entrance.over(principal) is not None) or not self.reserve(length):
            return False
        entrance.charge(principal)
        self.since, self.phase, self.open_by, request = monotonic(), BODY, None, self.memo
        self.marks = self.memo_marks
        self.id = request.id or self.inference.new_id()
        self.codec, self.encode_error = request.codec, request.codec.encode_error
        self.request, self.principal = request, principal
        self.open, self.expects, self.missing = there < length, False, length - there
        if length >= LARGE:
            self._make_room(length, there)
        self.pieces.append(memoryview(data)[begun:])
        if not self.open:
            try:
                self.complete()
            except Exception as exc:
                self.fault(exc)
        return True

    def _make_room(self, length: int, there: int) -> None:
        """Make room for a large body, of which some bytes are there, and have the system write the others there, if they are many."""
        self.pieces.expect(length)
        if length - there >= LARGE and not self.ahead and self.inference.scheme == "http":
            BodyReceiver(self, self.pieces).begin()

    def _belong(self, principal: Principal) -> None:
        """Count the connection for its principal's tenant from now on.

        Raises:
            RequestError: the tenant has too many connections: this one is not kept.
        """
        try:
            self.inference.quotas.belong(self, principal.tenant)
        except RequestError:
            self.last = True
            raise
        self.known, self.lane, self.open_by = principal, CLOSED, None

    def known_tenant(self) -> str:
        """Tenant that the connection counts for."""
        return self.owner or ""

    def _tell_owner(self, head: Head) -> None:
        """Count the connection for the tenant that asks for an ordinary route. The route decides whether it may ask."""
        authorization = head.single.get(b"authorization", b"")
        principal = None
        if authorization:
            with contextlib.suppress(RequestError):
                principal = self.inference.entrance.identify(authorization)
        if principal is not None:
            self._belong(principal)

    def _ask(self, request: InferenceHead, body: bytes, exchange: Exchange | None = None) -> None:
        """Read a body, unless it is read already, and hand its request in, on the lane for it if that is open."""
        if exchange is None:
            only = self.principal.models
            served = self.inference.served
            try:
                exchange = request.read(body, request.options, served.seen_by(only) if only else served)
                if request.wish is not None and isinstance(exchange.input, list):
                    raise several_as_task()
            except RequestError as exc:
                self._charge_and_deny(request, exc)
                return
        self.phase = ASKED
        self.exchange = exchange
        self.plain = False
        if request.wish is not None:
            self.handoff = AsyncHandoff(self.inference.loop, request.wait, self._hand_over)
        model = exchange.model
        text = exchange.input
        parameters = exchange.parameters
        if isinstance(text, list) or exchange.options is not request.options:
            self._ask_rarely(exchange)
            return
        gateway = self.inference.gateway
        is_known = request is self.memo
        lane = self.lane if is_known else CLOSED
        if lane.asked != model or lane.asker is not self.principal or lane.facts is not gateway.facts:
            lane = gateway.lane(self.principal, request.options, model)
            if is_known:
                self.lane = lane
        self.principal = lane.principal
        if lane.open:
            usual, self.open_by = exchange.usual, None
            self.plain = usual is not None and not (self.last or self.inference.closing)
            if usual is not None and self.plain:
                self.usual, self.kind, self.exchange = usual, self.marks + usual.kind, None
                if is_known and usual.read is not unusual and not (request.id or self.known.models):
                    self.open_by = lane.facts
            gateway.enter(self, lane, self.id, text, parameters)
        elif lane.rows and gateway.served[lane.model].takes_unweighed(text):
            gateway.enter(self, lane, self.id, text, parameters)
        else:
            gateway.take_in(self, lane, request.options, self.id, text, parameters)
        exchange.input = ""  # The gateway has it.

    def _ask_rarely(self, exchange: Exchange) -> None:
        """Submit several inputs, or what asks for something that its head does not."""
        entrance = self.inference.entrance
        principal = self.principal = entrance.principal_for(exchange, self.principal)
        self.fan_out = entrance.submit(self, principal, self.id, exchange, self.owner or principal.tenant)

    def _charge_and_deny(self, request: InferenceHead, error: RequestError) -> None:
        over = self.inference.entrance.charge_wrong(self.principal, self.id)
        self._deny(request, over or error, None if over else self.inference.tiers[self.principal.tier])

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to all inputs of the request in hand, or the failure of one."""
        self.answer(joined(self.id, replies), list(map(_OUTPUT, replies)), list(map(_TOKENS, replies)))

    def admitted(self) -> None:
        """Note that the request in hand will have its outcome, whoever waits for it."""
        if self.handoff is not None:
            self.handoff.admitted()

    def _hand_over(self) -> None:
        """Answer with the id of the task that the request in hand has become."""
        try:
            self._end_handoff()
            request, inference = self.request, self.inference
            if request is not None and request.wish is not None:
                inference.gateway.detach(self.principal.tenant, self.id)
                self.transport.write(task_answer(ID_PREFIX + self.id, request.wish, inference.date, self._ending()))
                self.rest_from()
        except Exception as exc:
            self.fault(exc)

    def _end_handoff(self) -> None:
        if self.handoff is not None:
            self.handoff.end()
            self.handoff = None

    def _end_fan_out(self) -> None:
        if self.fan_out is not None:
            self.fan_out.room.shrink(0)
        self.fan_out = self.large = None

    def rest_from(self, now: float = 0.0) -> None:
        """End the request in hand, which has been answered; `now` is a monotonic instant in seconds, 0 for the present one."""
        self.request = self.exchange = None
        self.principal = _NOBODY
        if self.fan_out is not None or self.large is not None:
            counted = self.large is not None or (self.fan_out is not None and self.fan_out.room.held > 0)
            self._end_fan_out()
            if counted:
                self._count_unfetched()
        if self.last or self.inference.closing or self.unread.since:
            self.finish()
        else:
            self.phase = IDLE
            self.since = now or monotonic()
        if self.buffer:
            self.advance()

    def _deny(self, request: InferenceHead, error: RequestError, tier: str | None = "none") -> None:
        """Answer an error to a request that was read to its end; see `refuse`."""
        self.inference.trace_refused(request.options, ID_PREFIX + self.id, error, monotonic())
        self.request = None
        self.write_error(error)
        self.context.refused(error, tier)
        self.finish()
