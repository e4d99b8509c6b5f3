"""Fast path: the inference routes answered on the connection itself, all other routes left to the app.

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
from time import monotonic
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from headway.errors import INTERNAL, RequestError
from headway.http.authentication import stranger
from headway.http.inference.async_handoff import AsyncHandoff
from headway.http.inference.codecs import Codec, no_text
from headway.http.inference.inference_head import SHOWN, InferenceHead, read_inference_head
from headway.http.server.connection import APP, ASKED, BODY, FAR, HELD, IDLE, Connection
from headway.http.server.connection_context import InferenceContext
from headway.http.server.head import Head
from headway.http.server.quotas import too_many
from headway.http.tasks import PATH, Result
from headway.model import DedupKind, Entry, Failure, Principal, Reply

_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n")
_NOBODY = Principal(user="", tenant="", tier=0)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SHARED = {
    (DedupKind.SAME, True): b"x-headway-cache: hit\r\n",
    (DedupKind.SAME, False): b"x-headway-cache: collapsed\r\n",
    (DedupKind.KEY, True): b"idempotency-replayed: true\r\n",
    (DedupKind.KEY, False): b"idempotency-replayed: true\r\n",
}


class FastPathConnection(Connection):
    """Connection of the public port.

    Arguments:
        lane: context shared with the listener's other connections.
    """

    far = FAR

    __slots__ = (
        "after", "before", "begun", "caller", "handover", "known", "lane", "memo", "order", "origin", "owner", "pieces",
        "reserved", "unfetched",
    )  # fmt: skip

    def __init__(self, lane: InferenceContext) -> None:
        super().__init__(lane)
        self.lane = lane
        self.order: InferenceHead | None = None
        self.caller = self.known = _NOBODY
        self.origin: str | None = None
        self.owner: str | None = None
        self.reserved = 0
        self.unfetched = 0
        self.handover: AsyncHandoff | None = None
        self.begun = 0.0
        self.pieces: list[bytes] = []
        self.memo: InferenceHead | None = None
        self.before = b""
        self.after = b""

    @property
    def silent(self) -> bool:
        """Whether no request of its client is under way."""
        return self.phase not in (BODY, ASKED, APP)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it when there are too many, in all or of its client."""
        super().connection_made(transport)
        if self.phase == IDLE and self in self.connections:
            address = str((transport.get_extra_info("peername") or ("",))[0])
            self.origin = address if self.lane.anonymous else None
            if not self.lane.quotas.enter(self, address):
                self.reject(too_many("too many connections of this client are"))

    def data_received(self, data: bytes) -> None:
        """Take the bytes that came. A whole request under a known head goes straight on."""
        if self.phase == IDLE and data.startswith(self.before):
            order = self.memo
            begin = len(self.before)
            end = data.find(b"\r", begin, begin + 10)
            if order is not None and data.startswith(self.after, end):
                length = data[begin:end]
                end += len(self.after)
                if length.isdigit() and int(length) == len(data) - end <= self.desk.most_body:
                    try:
                        self._repeat(order, data[end:])
                    except Exception as exc:
                        self.fault(exc)
                    return
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon the request in hand."""
        try:
            if self.phase == ASKED:
                self.lane.intake.abandon(self, self.caller.tenant, self.id)
            self._end_handover()
        finally:
            self.order = self.memo = None
            self.before = b""
            self.pieces.clear()
            self.lane.quotas.leave(self)
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client does not take its answer."""
        super().pause_writing()
        self._count_unfetched()

    def resume_writing(self) -> None:
        """Note that the client has taken all of its answer."""
        self.lane.quotas.keep(self, 0)
        super().resume_writing()

    def inspect(self, now: float) -> None:
        """End what takes too long; `now` is a monotonic instant in seconds."""
        super().inspect(now)
        if self.unread.since:
            self._count_unfetched()

    def answer(self, reply: Reply) -> None:
        """Take the reply to the request in hand; one to any other request is never written."""
        order = self.order
        if self.phase != ASKED or order is None or reply.id != self.id:
            return
        try:
            lane = self.lane
            if self.handover is not None:
                if reply.output is not None and self.handover.due:
                    self._hand_over()
                    return
                self._end_handover()
            now = monotonic()
            shared = b"" if reply.shared is None else _SHARED.get((reply.shared, reply.kept), b"")
            if reply.unkept:
                shared += b"x-headway-kept: no\r\n"
            if reply.output is None:
                self._fail(reply.failure or Failure(INTERNAL, "the reply is neither an output nor a failure"), shared)
            else:
                try:
                    milliseconds = int((now - self.begun) * 1e6) / 1000
                    shown = SHOWN + self.id
                    body = order.codec.write(shown, reply.output, milliseconds, lane.version)
                except UnicodeEncodeError:
                    self._fail(no_text(), shared)
                else:
                    ending = b"connection: close\r\n" if self.last or lane.closing else b""
                    if self.caller.limits:
                        ending += lane.allowances.lines(self.caller.limits)
                    if shared:
                        ending += shared
                    self.caller = _NOBODY
                    self.transport.write(
                        b"%b%b\r\n%bcontent-length: %d\r\n\r\n%b"
                        % (lane.opening, shown.encode(), ending, len(body), body)
                    )
            self._rest_from(now)
        except Exception as exc:
            self.fault(exc)

    def serve(self, head: Head, raw: bytes) -> None:
        """Start on a request: the inference routes here, all others in the app."""
        if head.method == b"POST":
            path, query = _split(head.target)
            codec = self.lane.codecs.get(path)
            if codec is not None:
                self.encode_error = codec.encode_error
                self._serve_hot(codec, head, query, raw)
                return
        try:
            self._tell_owner(head)
        except RequestError as exc:
            self.refuse(exc, head)
        else:
            super().serve(head, raw)

    def reserve(self, amount: int) -> bool:
        """Let the connection hold `amount` bytes of bodies, in all; False, and nothing is changed, when it may not."""
        return amount == self.reserved or self.lane.quotas.reserve(self, amount)

    def take(self, content: bytes) -> None:
        """Take a piece of the body."""
        if self.order is None:
            super().take(content)
        elif self.chunks is None or self.reserve(self.reserved + len(content)):
            self.pieces.append(content)
        else:
            self.reject(self.lane.quotas.no_room(self))

    def complete(self) -> None:
        """Note that the body is complete."""
        order = self.order
        if order is None:
            super().complete()
        else:
            body = b"".join(self.pieces)
            self.pieces.clear()
            self.reserve(0)
            if self.caller.limits:
                intake = self.lane.intake
                intake.limiter.refund(intake.counted(self.caller.limits))
            self._ask(order, body)

    def write_error(
        self, code: str, message: str, retry_after: float | None = None, reason: str = "", fields: bytes = b""
    ) -> None:
        """Write the answer of an error, with the principal's limits."""
        if self.caller.limits:
            fields += self.lane.allowances.lines(self.caller.limits)
        self.caller = _NOBODY
        super().write_error(code, message, retry_after, reason, fields)

    def reject(self, error: RequestError, tier: str | None = "none") -> None:
        """Answer an error that ends the connection."""
        if self.phase == ASKED:
            self.lane.intake.abandon(self, self.caller.tenant, self.id)
            self._end_handover()
        self.order = None
        self.pieces.clear()
        super().reject(error, tier)

    def crowd_out(self) -> None:
        """End a connection between two requests, since its owner holds too much."""
        self.encode_error = self.lane.encode_error
        self.reject(self.lane.quotas.no_room(self))

    def _count_unfetched(self) -> None:
        left = self.transport.get_write_buffer_size()
        self.lane.quotas.keep(self, left if left > HELD else 0)

    def _serve_hot(self, codec: Codec, head: Head, query: bytes, raw: bytes) -> None:
        lane = self.lane
        authorization = head.single.get(b"authorization", b"")
        try:
            caller = self.known
            if (found := lane.identify(authorization)) is not caller:
                caller = self._belong(found, authorization)
        except RequestError as exc:
            self.refuse(exc, head)
            return
        self.caller = caller
        try:
            order = read_inference_head(codec, head, query, lane.settings, self.origin)
        except RequestError as exc:
            over = self._charge()
            if over is None:
                self.refuse(exc, head)
            else:
                self.refuse(over, head, None)
            return
        length, held = head.length, self.held
        whole = 0 <= length <= len(held)
        if not whole and (over := self._excess()) is not None:
            self.refuse(over, head, None)
            return
        if length > 0 and not whole and not self.reserve(length):
            self.refuse(lane.quotas.no_room(self), head, lane.tiers[caller.tier])
            return
        if not whole and caller.limits:  # Until the body is there: else any number could be on their way.
            lane.intake.limiter.charge(lane.intake.counted(caller.limits))
        self.order = order
        if order.repeatable:
            self._remember(order, raw)
        if whole:
            self.held = held[length:]
            self._ask(order, held[:length])
            return
        self.phase = BODY
        self.expect_body(head)
        if order.expects and not held:
            self.transport.write(_CONTINUE)

    def _remember(self, order: InferenceHead, raw: bytes) -> None:
        found = _LENGTH.search(raw)
        if found is not None and len(raw) + 9 <= self.desk.most_header:
            self.memo = order
            self.before = raw[: found.start(1)]
            self.after = raw[found.end(1) :]

    def _repeat(self, order: InferenceHead, body: bytes) -> None:
        """Start on a request that came whole, under the remembered head."""
        lane = self.lane
        self.id = order.id or lane.new_id()
        self.encode_error = order.codec.encode_error
        try:
            caller = self.known
            if (found := lane.identify(order.authorization)) is not caller:
                caller = self._belong(found, order.authorization)
        except RequestError as exc:
            self._deny(exc)
        else:
            self.order = order
            self.caller = caller
            self._ask(order, body)

    def _belong(self, caller: Principal | None, authorization: bytes) -> Principal:
        """Count the connection for its principal's tenant from now on.

        Raises:
            RequestError: the principal is not known, or its tenant has too many connections: this one is not kept.
        """
        if caller is None:
            raise stranger(authorization)
        try:
            self.lane.quotas.belong(self, caller.tenant)
        except RequestError:
            self.last = True
            raise
        self.known = caller
        return caller

    def _tell_owner(self, head: Head) -> None:
        """Count the connection for the tenant that asks for an ordinary route. The route decides whether it may ask."""
        authorization = head.single.get(b"authorization", b"")
        caller = None
        if authorization:
            with contextlib.suppress(RequestError):
                caller = self.lane.identify(authorization)
        if caller is not None:
            self._belong(caller, authorization)

    def _excess(self) -> RequestError | None:
        """Refusal of the request in hand when its principal is over a limit. The gateway counts it."""
        caller, intake = self.caller, self.lane.intake
        if not caller.limits:
            return None
        failure = intake.limiter.excess(intake.counted(caller.limits), intake.broker)
        if failure is None:
            return None
        intake.note_refusal(caller, Entry(self.id, "", "", caller.tier, caller.tenant, "", 0.0, 0.0), failure)
        return RequestError(failure.message, code=failure.code, retry_after=failure.retry_after, reason=failure.reason)

    def _charge(self) -> RequestError | None:
        """Count a wrong request towards its principal's limits; the refusal when it is over one."""
        over = self._excess()
        if over is None and self.caller.limits:
            intake = self.lane.intake
            intake.limiter.charge(intake.counted(self.caller.limits))
        return over

    def _ask(self, order: InferenceHead, body: bytes) -> None:
        self.begun = monotonic()
        try:
            if order.octets:
                model, text, parameters = order.model, order.codec.text(body), b""
            else:
                model, text, parameters = order.codec.read(body)
        except RequestError as exc:
            over = self._charge()
            if over is None:
                self._deny(exc, self.lane.tiers[self.caller.tier])
            else:
                self._deny(over, None)
            return
        self.phase = ASKED
        lane, caller = self.lane, self.caller
        if order.wish is not None:
            self.handover = AsyncHandoff(lane.loop, order.wait, self._hand_over)
        lane.submit(self, caller, self.id, order.options, model or lane.model, text, parameters)

    def admitted(self) -> None:
        """Note that the request in hand will have its outcome, whoever waits for it."""
        if self.handover is not None:
            self.handover.admitted()

    def _hand_over(self) -> None:
        """Answer with the id of the task that the request in hand has become."""
        try:
            self._give_id()
        except Exception as exc:
            self.fault(exc)

    def _give_id(self) -> None:
        order, caller, lane = self.order, self.caller, self.lane
        self._end_handover()
        if order is None or order.wish is None:
            return
        lane.intake.detach(caller.tenant, self.id)
        shown = SHOWN + self.id
        body = msgspec.json.encode(Result(shown, "PENDING"))
        ending = b"connection: close\r\n" if self.last or lane.closing else b""
        if caller.limits:
            ending += lane.allowances.lines(caller.limits)
        self.caller = _NOBODY
        self.transport.write(
            b"HTTP/1.1 202 Accepted\r\ndate: %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
            b"location: %b/%b\r\npreference-applied: %b\r\nretry-after: 1\r\n%bcontent-length: %d\r\n\r\n%b"
            % (lane.date, shown.encode(), PATH.encode(), shown.encode(), order.wish.applied, ending, len(body), body)
        )
        self._rest_from(monotonic())

    def _end_handover(self) -> None:
        if self.handover is not None:
            self.handover.end()
            self.handover = None

    def _rest_from(self, now: float) -> None:
        """End the request in hand, which has been answered."""
        self.order = None
        if self.last or self.lane.closing or self.unread.since:
            self.finish()
        else:
            self.phase = IDLE
            self.since = now
        if self.held:
            self.advance()

    def _deny(self, error: RequestError, tier: str | None = "none") -> None:
        """Answer an error to a request that was read to its end; see `refuse`."""
        self.order = None
        self.write_error(error.code, error.message, error.retry_after, error.reason)
        self.desk.refused(error, tier)
        self.finish()

    def _fail(self, failure: Failure, fields: bytes) -> None:
        self.write_error(failure.code, failure.message, failure.retry_after, failure.reason, fields)


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target, the path decoded."""
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        try:
            path = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return b"", b""
    return (unquote_to_bytes(path) if b"%" in path else path), query
