"""An inference request, from its head to its answer.

    BODY ──▶ (a long body is decoded in turns) ──▶ ASKED: the gateway has it ──▶ answered ──▶ next request
                                                   └── handed over: the client gets a task id instead

RequestInHand receives its own reply. It ignores the reply if the connection has dropped the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from time import monotonic

import msgspec

from headway.core.failures import error_of, failure_of, no_text, unread
from headway.core.json_pages import SHORT, Steps
from headway.doors.answer_pieces import LargeAnswer, is_large
from headway.doors.exchange import Exchange, Outcome, Reader, outcome_headers, unusual
from headway.doors.fields import ID_PREFIX, with_time_left
from headway.errors import AnyError, RequestError
from headway.gateway.fan_out import FanOut, joined
from headway.http.inference.context import InferenceContext
from headway.http.inference.incoming_bodies import BodyPieces, Unpacker
from headway.http.inference.inference_head import HEAD, KnownHead, Wish, several_as_task
from headway.http.server.connection import ASKED, BODY, IDLE, Connection
from headway.http.server.connection_context import LARGE
from headway.http.tasks import PATH, Result
from headway.model import Principal, Reply, TokenCount, Value
from headway.runtime.fair_turns import MILLISECOND

NOBODY = Principal(user="", tenant="", tier=0)
_OUTPUT, _TOKENS = attrgetter("output"), attrgetter("tokens")


class RequestInHand(msgspec.Struct, eq=False):
    """A request to an inference route; see `headway.http.server.connection.InHand`.

    `principal` is NOBODY until the client is known. `begun` is the monotonic time at which the body was complete. If `plain`,
    `known.usual` writes the answer, the connection stays open, and `exchange` is None. `long` is set while
    a long body is being decoded in turns, and `large` while a large answer is being made and sent."""

    connection: Connection
    inference: InferenceContext
    id: str
    known: KnownHead
    principal: Principal = NOBODY
    begun: float = 0.0
    plain: bool = False
    exchange: Exchange | None = None
    pieces: BodyPieces | None = None
    long: LongBody | None = None
    handoff: AsyncHandoff | None = None
    fan_out: FanOut | None = None
    large: LargeSending | None = None

    @property
    def shown(self) -> str:
        return ID_PREFIX + self.id

    @property
    def tier(self) -> str:
        return "none" if self.principal is NOBODY else self.inference.tiers[self.principal.tier]

    def take(self, content: bytes) -> None:
        connection, quotas = self.connection, self.inference.quotas
        # For a body of known length, the memory has already been reserved.
        if connection.reader.missing < 0 and not quotas.reserve(connection, connection.reserved + len(content)):
            connection.reject(quotas.no_room(connection))
        elif self.pieces is not None:
            self.pieces.append(content)

    def complete(self) -> None:
        body = b"" if self.pieces is None else self.pieces.take()
        self.pieces = None
        self.begun = monotonic()
        if len(body) <= SHORT and not self.known.head.coding:
            self.give_back()
            self.ask(body)
        else:
            self.connection.phase = ASKED
            self.long = LongBody(self)
            self.long.begin(body)

    def give_back(self) -> None:
        """Release the memory reserved for a body that arrived in pieces, and refund the charge for it."""
        if self.long is not None:
            self.long.end()
        self.inference.quotas.reserve(self.connection, 0)
        self.inference.entrance.refund(self.principal)

    def ask(self, body: bytes, exchange: Exchange | None = None) -> None:
        """Decode the body, unless an `exchange` is given. Then submit the request, if possible on an open lane."""
        known = self.known
        inference = self.inference
        principal = self.principal
        head = known.head
        if exchange is None:
            only, served = principal.models, inference.served
            try:
                exchange = head.read(body, head.options, served.seen_by(only) if only else served)
                if head.wish is not None and isinstance(exchange.input, list):
                    raise several_as_task()
            except RequestError as exc:
                self.charge_and_deny(exc)
                return
        connection = self.connection
        connection.phase = ASKED
        self.exchange = exchange
        if head.wish is not None:
            self.handoff = AsyncHandoff(inference.loop, head.wait, self._hand_over)
        model = exchange.model
        text = exchange.input
        parameters = exchange.parameters
        if isinstance(text, list) or exchange.options is not head.options:
            self._submit_slow(exchange)
            return
        gateway = inference.gateway
        lane = known.lane
        if lane.asked != model or lane.asker is not principal or lane.facts is not gateway.facts:
            lane = known.lane = gateway.lane(principal, head.options, model)
        self.principal = lane.principal
        if lane.open:
            usual, known.open_by = exchange.usual, None
            if usual is not None and not (connection.writer.last or inference.closing):
                self.plain, self.exchange = True, None
                known.usual, known.kind = usual, known.marks + usual.kind
                if known.before and usual.read is not unusual and not (head.id or principal.models):
                    known.open_by = lane.facts
            gateway.enter(self, lane, self.id, text, parameters)
        elif lane.rows and gateway.served[lane.model].takes_unweighed(text):
            gateway.enter(self, lane, self.id, text, parameters)
        else:
            gateway.take_in(self, lane, head.options, self.id, text, parameters)
        exchange.input = ""  # Only the gateway holds a reference now.

    def _submit_slow(self, exchange: Exchange) -> None:
        """Submit a request that has several inputs, or whose body overrides options from its head."""
        entrance = self.inference.entrance
        principal = self.principal = entrance.principal_for(exchange, self.principal)
        owner = self.connection.owner or principal.tenant
        self.fan_out = entrance.submit(self, principal, self.id, exchange, owner)

    def charge_and_deny(self, error: RequestError) -> None:
        over = self.inference.entrance.charge_wrong(self.principal, self.id)
        self.deny(over or error, over is not None)

    def deny(self, error: RequestError, counted: bool = False) -> None:
        """Refuse the request after its body was read. `counted` is True if the refusal has already been counted."""
        self.inference.trace_refused(self.known.head.options, self.shown, error, monotonic())
        self.write_error(error)
        self.inference.refused(error, None if counted else self.tier)
        self.connection.finish()

    def answer(self, reply: Reply, outputs: Sequence[Value] = (), tokens: Sequence[TokenCount | None] = ()) -> None:
        """Write the answer. `outputs` and `tokens` are for requests with several inputs."""
        connection = self.connection
        if connection.in_hand is not self:
            return
        try:
            output = reply.output
            if not self.plain or type(output) is not str or len(output) > LARGE:
                self._answer_slow(reply, outputs, tokens)
                return
            now = monotonic()
            inference = self.inference
            known = self.known
            ran = reply.ran
            version = inference.version if ran is None else ran.version or inference.version
            try:
                body = known.usual.write(
                    ID_PREFIX + self.id, output, int((now - self.begun) * 1e6) / 1000, version, reply.tokens
                )
            except UnicodeEncodeError:
                self.write_error(no_text())
                self.end(now)
                return
            connection.transport.write(
                HEAD
                % (
                    inference.opening,
                    self.id.encode(),
                    known.codec.limit_lines(inference.rate_limits, self.principal.limits)
                    if self.principal.limits
                    else b"",
                    known.kind,
                    len(body),
                )
                + body
            )
            connection.in_hand = None
            connection.phase = IDLE
            connection.since = now
            if connection.unread.since:
                connection.finish()
            if connection.reader.buffer:
                connection.advance()
        except Exception as exc:
            connection.fault(exc)

    def answer_all(self, replies: Sequence[Reply]) -> None:
        self.answer(joined(self.id, replies), list(map(_OUTPUT, replies)), list(map(_TOKENS, replies)))

    def admitted(self) -> None:
        if self.handoff is not None:
            self.handoff.admitted()

    def _answer_slow(self, reply: Reply, outputs: Sequence[Value], tokens: Sequence[TokenCount | None]) -> None:
        if self.handoff is not None:
            if reply.output is not None and self.handoff.due:
                self._hand_over()
                return
            self._end_handoff()
        now = monotonic()
        inference = self.inference
        marks = b""
        if reply.shared is not None or reply.unkept:
            marks = "".join(f"{name}: {value}\r\n" for name, value in outcome_headers(reply)).encode()
        output = reply.output
        if output is None:
            self.write_error(failure_of(reply), marks)
        else:
            try:
                milliseconds = int((now - self.begun) * 1e6) / 1000
                shown = ID_PREFIX + self.id
                ran = reply.ran
                version = (ran.version if ran is not None else "") or inference.version
                exchange = self.exchange
                usual = self.known.usual if exchange is None else exchange.usual
                kind: bytes
                body: bytes | Iterator[bytes]
                if usual is not None and type(output) is str and len(output) <= LARGE:
                    kind, body = usual.kind, usual.write(shown, output, milliseconds, version, reply.tokens)
                else:
                    write = self.known.usual.write_any if exchange is None else exchange.write
                    kind, body = write(
                        Outcome(shown, outputs or (output,), milliseconds, version, tokens or (reply.tokens,))
                    )
                if isinstance(body, Iterator):
                    room = None if self.fan_out is None else self.fan_out.room
                    if is_large(output) if room is None else room.held > 0:
                        self.large = LargeSending(self, LargeAnswer(body, room), kind, marks)
                        self.large.wait()
                        return
                    body = b"".join(body)
            except UnicodeEncodeError:
                self.write_error(no_text(), marks)
            except RequestError as exc:
                self.write_error(exc)
            else:
                head = HEAD % (inference.opening, self.id.encode(), self.ending(), marks + kind, len(body))
                if len(body) < LARGE:
                    self.connection.transport.write(head + body)
                else:  # Don't copy a large body.
                    self.connection.transport.write(head)
                    self.connection.transport.write(body)
        self.end(now)

    def ending(self) -> bytes:
        """Return the header lines that end every answer: marks, `Connection: close` if it applies, and rate limits."""
        known, inference = self.known, self.inference
        ending = known.marks
        if self.connection.writer.last or inference.closing:
            ending += b"connection: close\r\n"
        if self.principal.limits:
            ending += known.codec.limit_lines(inference.rate_limits, self.principal.limits)
        return ending

    def write_error(self, error: AnyError, lines: bytes = b"") -> None:
        """Answer with an error. `lines` has additional header lines, with line endings."""
        codec, limits = self.known.codec, self.principal.limits
        if limits:
            lines += codec.limit_lines(self.inference.rate_limits, limits)
        encoded = codec.encode_error(error, self.shown)
        self.connection.writer.write_error(error.code, self.shown, encoded, lines + self.known.marks)

    def _hand_over(self) -> None:
        try:
            self._end_handoff()
            inference, wish = self.inference, self.known.head.wish
            if wish is not None:
                inference.gateway.detach(self.principal.tenant, self.id)
                self.connection.transport.write(task_answer(ID_PREFIX + self.id, wish, inference.date, self.ending()))
                self.end()
        except Exception as exc:
            self.connection.fault(exc)

    def end(self, now: float = 0.0) -> None:
        """End the request after its answer. `now` is the monotonic time, or 0 to read the clock."""
        connection = self.connection
        connection.in_hand = None
        if self.fan_out is not None or self.large is not None:
            counted = self.large is not None or (self.fan_out is not None and self.fan_out.room.held > 0)
            self._end_outputs()
            if counted:
                connection.count_unfetched()
        if connection.writer.last or self.inference.closing or connection.unread.since:
            connection.finish()
        else:  # The common case, inlined from `finish` to save a call.
            connection.phase = IDLE
            connection.since = now or monotonic()
        if connection.reader.buffer:
            connection.advance()

    def leave(self) -> None:
        if self.connection.phase == ASKED and not self._sending:
            self.inference.gateway.abandon(self, self.principal.tenant, self.id)
            if self.fan_out is not None:
                self.fan_out.abandon()
        if self.long is not None:
            self.long.end()
        if self.pieces is not None:
            self.pieces.clear()
        self._end_handoff()
        self._end_outputs()

    def reject(self, error: RequestError) -> bool:
        connection, sending = self.connection, self._sending
        if connection.phase == BODY:
            self.inference.trace_refused(self.known.head.options, self.shown, error, connection.since)
        self.leave()
        return not sending

    def resume(self) -> None:
        if self._sending and self.large is not None:
            self.large.wait()

    @property
    def _sending(self) -> bool:
        return self.large is not None and self.large.answer.total > 0

    def _end_handoff(self) -> None:
        if self.handoff is not None:
            self.handoff.end()
            self.handoff = None

    def _end_outputs(self) -> None:
        if self.fan_out is not None:
            self.fan_out.room.shrink(0)
        self.fan_out = self.large = None
        self.connection.unsent = 0


class LongBody:
    """Decodes a long or compressed body in turns until the request's deadline. Stops if the request ends."""

    __slots__ = ("_alarm", "_request")

    def __init__(self, request: RequestInHand) -> None:
        self._request = request
        timeout = request.known.head.options.timeout
        self._alarm = request.inference.loop.call_later(timeout, self._expire)

    def begin(self, body: bytes) -> None:
        request = self._request
        if coding := request.known.head.coding:
            self._wait(partial(self._unpack, Unpacker(body, coding, request.inference.settings)))
        else:
            self._wait(partial(self._take, body))

    def end(self) -> None:
        self._alarm.cancel()
        self._request.long = None

    @property
    def _ended(self) -> bool:
        return self._request.long is not self

    def _wait(self, work: Callable[[], None]) -> None:
        request = self._request
        request.inference.large_bodies.wait(request.connection.owner or "", work)

    def _unpack(self, unpacker: Unpacker) -> None:
        if self._ended:
            return
        request = self._request
        connection, quotas = request.connection, request.inference.quotas
        try:
            if unpacker.step():
                self._wait(partial(self._take, unpacker.whole()))
            elif quotas.reserve(connection, unpacker.size):
                self._wait(partial(self._unpack, unpacker))
            else:
                raise quotas.no_room(connection)
        except RequestError as exc:
            request.give_back()
            request.charge_and_deny(exc)
            connection.advance()
        except Exception as exc:
            connection.fault(exc)

    def _take(self, body: bytes) -> None:
        if self._ended:
            return
        request = self._request
        head, only, served = request.known.head, request.principal.models, request.inference.served
        reader = Reader(head.read, head.read_long)
        steps = reader.steps(body, head.options, served.seen_by(only) if only else served)
        self._go_on(steps, request.principal, 0)

    def _go_on(self, steps: Steps[Exchange], principal: Principal, size: int) -> None:
        """Decode for one turn. `size` is the number of bytes decoded so far, not counting strings. These bytes are charged,
        even if the request has ended."""
        request = self._request
        entrance, connection = request.inference.entrance, request.connection
        if self._ended:
            entrance.charge_pages(principal, size)
            return
        end = monotonic() + MILLISECOND
        try:
            while monotonic() < end:
                size += next(steps)
        except StopIteration as stop:
            exchange: Exchange = stop.value
            request.give_back()
            if request.known.head.wish is not None and isinstance(exchange.input, list):
                request.charge_and_deny(several_as_task())
            else:
                exchange.options = with_time_left(exchange.options, monotonic() - request.begun)
                request.ask(b"", exchange)
        except RequestError as exc:
            request.give_back()
            request.charge_and_deny(exc)
        except Exception as exc:
            connection.fault(exc)
            return
        else:
            self._wait(partial(self._go_on, steps, principal, size))
            return
        entrance.charge_pages(principal, size)
        connection.advance()

    def _expire(self) -> None:
        request = self._request
        try:
            self.end()
            request.inference.quotas.reserve(request.connection, 0)
            request.deny(error_of(unread(request.known.head.options.timeout)))
            request.connection.advance()
        except Exception as exc:
            request.connection.fault(exc)


class LargeSending:
    """Makes a large answer, and then sends it, one piece in each of the client's turns. Stops if the request ends. The answer
    gets the header lines `marks` and `kind`. The lines `kind` describe its body, and are left out of an error."""

    __slots__ = ("_kind", "_marks", "_request", "answer")

    def __init__(self, request: RequestInHand, answer: LargeAnswer, kind: bytes, marks: bytes) -> None:
        self._request, self.answer, self._kind, self._marks = request, answer, kind, marks

    def wait(self) -> None:
        """Continue in the client's next turn. While sending, wait until the client has read the previous piece."""
        connection, sending = self._request.connection, self.answer.total > 0
        if not (sending and connection.unread.since):
            work = self._send if sending else self._make
            self._request.inference.large_bodies.wait(connection.owner or "", work)

    def _make(self) -> None:
        request, answer = self._request, self.answer
        if request.large is not self:
            return
        try:
            if not answer.make():
                self.wait()
                return
        except UnicodeEncodeError:
            request.write_error(no_text(), self._marks)
        except RequestError as exc:
            request.write_error(exc)
        except Exception as exc:
            request.connection.fault(exc)
            return
        else:
            answer.total = answer.length
            opening, lines = request.inference.opening, self._marks + self._kind
            head = HEAD % (opening, request.id.encode(), request.ending(), lines, answer.length)
            self._write(head)
            self.wait()
            return
        request.end()

    def _send(self) -> None:
        request, answer = self._request, self.answer
        connection = request.connection
        if request.large is not self or connection.unread.since:
            return
        self._write(answer.take())
        if answer.length:
            self.wait()
        else:
            request.end()

    def _write(self, piece: bytes) -> None:
        """Write a piece. For a single input, also count the bytes still to be sent, and measure a slow client's speed over the
        whole answer. With several inputs, the fan-out's room counts the bytes."""
        connection, answer = self._request.connection, self.answer
        alone = self._request.fan_out is None
        connection.unsent = answer.length if alone else 0
        connection.transport.write(piece)
        unread = connection.unread
        if unread.since and alone:
            answer.left_since = answer.left_since or unread.since
            unread.count_whole(answer.left_since, answer.total)


class AsyncHandoff:
    """Turns a request into a task once its client has waited `wait` seconds and the gateway has admitted the request. A request
    that the gateway refuses gets an ordinary error. `hand_over` is called at most once, and never after `end`."""

    __slots__ = ("_admitted", "_pending", "_timer", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop, wait: float, hand_over: Callable[[], None]) -> None:
        self._pending: Callable[[], None] | None = hand_over
        self._admitted = False
        self.due = wait <= 0.0
        self._timer = None if self.due else loop.call_later(wait, self._expire)

    def admitted(self) -> None:
        self._admitted = True
        if self.due:
            self._hand_over()

    def end(self) -> None:
        """Prevent a later handover, because the request has been answered or its client has left."""
        self._pending = None
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.due = True
        if self._admitted:
            self._hand_over()

    def _hand_over(self) -> None:
        hand_over, self._pending = self._pending, None
        if hand_over is not None:
            hand_over()


def task_answer(shown: str, wish: Wish, date: bytes, ending: bytes) -> bytes:
    """Return the 202 response to a request that has become a task. `ending` has additional header lines."""
    id, body = shown.encode(), msgspec.json.encode(Result(shown, "PENDING"))
    return (
        b"HTTP/1.1 202 Accepted\r\ndate: %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
        b"location: %b/%b\r\npreference-applied: %b\r\nretry-after: 1\r\n%bcontent-length: %d\r\n\r\n%b"
        % (date, id, PATH.encode(), id, wish.applied, ending, len(body), body)
    )
