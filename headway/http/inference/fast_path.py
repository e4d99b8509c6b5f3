"""The fast path: answers inference requests on the connection itself. All other requests are answered by handlers.

A request costs one lookup of the principal, one decode, one `enter`, one encode and one write; no task, future or timer is created.
`data_received` and `RequestInHand.answer` are long, because every additional call would slow down every request.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

from headway.core.json_pages import SHORT
from headway.doors.entrance import bad_credential
from headway.errors import RequestError
from headway.http.inference.context import InferenceContext, Origins, is_preflight, preflight_answer
from headway.http.inference.incoming_bodies import BodyPieces, BodyReceiver
from headway.http.inference.inference_head import UNKNOWN, KnownHead, read_inference_head
from headway.http.inference.request_in_hand import NOBODY, RequestInHand
from headway.http.server.connection import ASKED, BODY, FAR, IDLE, Connection, RouteInHand
from headway.http.server.connection_context import LARGE
from headway.http.server.head import Head, RequestTarget
from headway.http.server.writer import CONTINUE
from headway.model import Principal

_ZERO = ord("0")
_UNASKED = object()  # The model of a request that can't take its lane. It differs from every lane's model.


class FastPathConnection(Connection):
    """A connection of the public port. It counts towards the quotas of its last `principal`. A request that repeats
    the head `known` can take the fast path."""

    far = FAR

    __slots__ = ("inference", "known", "origin", "principal")

    def __init__(self, inference: InferenceContext) -> None:
        super().__init__(inference)
        self.inference = inference
        self.known = UNKNOWN
        self.principal = NOBODY
        self.origin: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.phase == IDLE and self in self.inference.connections:
            address = str((transport.get_extra_info("peername") or ("",))[0])
            self.origin = address if self.inference.entrance.anonymous else None
            if not self.inference.quotas.enter(self, address):
                self.brief = self.owner is None
                self.reject(self.inference.quotas.too_many())

    def data_received(self, data: bytes) -> None:
        """Process received bytes. A complete request is submitted immediately if it has the known head and its lane is open."""
        known = self.known
        if self.phase != IDLE or not data.startswith(known.before):
            super().data_received(data)
            return
        try:
            end = data.index(known.after, known.begin, known.latest)
        except ValueError:
            super().data_received(data)
            return
        inference = self.inference
        begun = end + known.skipped
        length = len(data) - begun
        if data[known.begin : end] != b"%d" % length or length > inference.max_at_once:
            if not self._repeat_large(data[known.begin : end], data, begun):
                super().data_received(data)
            return
        try:
            lane = known.lane
            model: str | object | None
            try:
                if known.open_by is not inference.gateway.facts or known.still() is not self.principal:
                    model = _UNASKED
                else:
                    request = self.in_hand = RequestInHand(
                        self, inference, inference.new_id(), known, lane.principal, monotonic(), True
                    )
                    model, text, parameters = known.usual.read(data[begun:])
            except RequestError:  # `_repeat` decodes the body again, and answers with the error.
                model = _UNASKED
            if model != lane.asked:
                self._repeat(data[begun:])
                return
            self.phase = ASKED
            inference.gateway.enter(request, lane, request.id, text, parameters)
        except Exception as exc:
            self.fault(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self.known = UNKNOWN
        super().connection_lost(exc)

    def retire(self) -> None:
        self.known.open_by = None
        if isinstance(self.in_hand, RequestInHand):
            self.in_hand.plain = False

    def serve(self, head: Head, raw: bytes, id: str) -> None:
        inference = self.inference
        marks = b""
        if inference.origins is not None:
            marks = inference.origins.marks(head)
            if is_preflight(head):
                self._answer_preflight(RouteInHand(self, id, inference.encode_error, marks), inference.origins, head)
                return
        routes = inference.routes
        if head.method == b"POST" and (route := routes.find(head.target)) is not None:
            codec, target = route
            self._serve_inference(RequestInHand(self, inference, id, KnownHead(codec, marks)), target, head, raw)
            return
        request = self.in_hand = RouteInHand(self, id, routes.error_form(head.target), marks)
        try:
            self._count_for_tenant(head)
        except RequestError as exc:
            self.refuse(exc, head)
        else:
            request.begin(head)

    def _answer_preflight(self, request: RouteInHand, origins: Origins, head: Head) -> None:
        self.in_hand = request
        if not request.marks:
            self.refuse(origins.refusal(head), head)
            return
        ending = request.marks + b"connection: close\r\n" if self.writer.ends else request.marks
        self.transport.write(preflight_answer(head, request.shown, self.context.date, ending))
        if self.reader.expect(head.length, self.context.max_body):
            self.finish_before_body()
        else:
            self.finish()

    def _serve_inference(self, request: RequestInHand, target: RequestTarget, head: Head, raw: bytes) -> None:
        self.in_hand = request
        inference = self.inference
        known = request.known
        entrance = inference.entrance
        try:
            principal = entrance.identify(head.single.get(b"authorization", b""))
            if principal is not self.principal:
                self._belong(principal)
        except RequestError as exc:
            self.refuse(exc, head)
            return
        request.principal = principal
        try:
            request_head = known.head = read_inference_head(
                known.codec, head, target, inference.codec_context, self.origin, principal.models
            )
        except RequestError as exc:
            over = entrance.charge_wrong(principal, request.id)
            self.refuse(over or exc, head, over is not None)
            return
        reader = self.reader
        length = head.length
        buffer = reader.buffer
        whole = 0 <= length <= len(buffer) and length <= SHORT and not (request_head.coding and length)
        if not whole and (over := entrance.excess(principal, request.id)) is not None:
            self.refuse(over, head, counted=True)
            return
        if length > 0 and not whole and not inference.quotas.reserve(self, length):
            self.refuse(inference.quotas.no_room(self), head)
            return
        if not whole:
            entrance.charge(principal)  # Limits the number of bodies in transit. Refunded once the body is complete.
        if request_head.repeatable:
            still = entrance.watch(request_head.authorization)
            if known.remember(raw, inference.max_header, still):
                self.known = known
        if whole:
            reader.buffer = buffer[length:]
            request.begun = monotonic()
            request.ask(buffer[:length])
            return
        self.phase = BODY
        reader.expect(length, inference.max_body)
        self._gather(request, length, len(buffer))
        if request_head.expects and not buffer:
            self.transport.write(CONTINUE)

    def _repeat(self, body: bytes) -> None:
        known, inference = self.known, self.inference
        known.open_by = None
        head = known.head
        request = self.in_hand = RequestInHand(self, inference, head.id or inference.new_id(), known)
        try:
            if (principal := known.still()) is not self.principal:
                if principal is None:
                    raise bad_credential(head.authorization)
                self._belong(principal)
        except RequestError as exc:
            request.deny(exc)
            return
        request.principal = self.principal
        request.begun = monotonic()
        request.ask(body)

    def _repeat_large(self, digits: bytes, data: bytes, begun: int) -> bool:
        """Start a request that has the known head and a large body, which starts at `begun` in the received `data`. `digits` is
        the value of Content-Length. Return False if the head must be parsed."""
        length = int(digits) if digits.isdigit() and digits[0] != _ZERO else 0
        inference, principal, received = self.inference, self.principal, len(data) - begun
        known, entrance, reader = self.known, inference.entrance, self.reader
        if not SHORT < length <= inference.max_body or received > length or known.still() is not principal:
            return False
        if (principal.limits and entrance.over(principal) is not None) or not inference.quotas.reserve(self, length):
            return False
        entrance.charge(principal)
        self.since, self.phase, known.open_by = monotonic(), BODY, None
        id = known.head.id or inference.new_id()
        request = self.in_hand = RequestInHand(self, inference, id, known, principal)
        reader.expect(length)
        reader.missing = length - received
        reader.open = received < length
        pieces = self._gather(request, length, received)
        pieces.append(memoryview(data)[begun:])
        if not reader.open:
            try:
                request.complete()
            except Exception as exc:
                self.fault(exc)
        return True

    def _gather(self, request: RequestInHand, length: int, received: int) -> BodyPieces:
        pieces = request.pieces = BodyPieces()
        if length >= LARGE:
            pieces.expect(length)
            if length - received >= LARGE and not self.reader.ahead and self.inference.scheme == "http":
                BodyReceiver(self, pieces).begin()
        return pieces

    def _belong(self, principal: Principal) -> None:
        """Count the connection towards its tenant. If the tenant has too many, raises RequestError and makes the next answer
        the last one."""
        try:
            self.inference.quotas.belong(self, principal.tenant)
        except RequestError:
            self.writer.last = True
            raise
        self.principal, self.known.open_by = principal, None

    def _count_for_tenant(self, head: Head) -> None:
        """Count the connection towards the tenant that sent an ordinary request. The credential is only looked up for this: the
        route authenticates the request itself."""
        authorization = head.single.get(b"authorization", b"")
        principal = None
        if authorization:
            with contextlib.suppress(RequestError):
                principal = self.inference.entrance.identify(authorization)
        if principal is not None:
            self._belong(principal)
