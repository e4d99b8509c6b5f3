"""Calls of inference: from the metadata and the message to the gateway, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from headway.errors import INTERNAL, RequestError
from headway.gateway.fan_out import FanOut
from headway.gateway.pending import FutureSink
from headway.grpc.calls import Call, PortContext, read_fields
from headway.grpc.statuses import Metadata
from headway.http.inference.codecs import no_text
from headway.http.inference.exchange import Exchange
from headway.http.inference.inference_head import SHOWN, read_id, read_options
from headway.model import DedupKind, Entry, Failure, Reply, RequestOptions, Value

ReadMessage = Callable[[bytes, RequestOptions], Exchange]
"""Message to exchange, whose `write` returns the message of the answer behind header lines that are empty.

Raises RequestError.
"""

_SHARED = {
    (DedupKind.SAME, True): ("x-headway-cache", "hit"),
    (DedupKind.SAME, False): ("x-headway-cache", "collapsed"),
    (DedupKind.KEY, True): ("idempotency-replayed", "true"),
    (DedupKind.KEY, False): ("idempotency-replayed", "true"),
}


class InferenceCall(Call):
    """One call of an inference method.

    Arguments:
        port: context of the port.
        metadata: metadata that came with it.
        read: reads its message.
        way: see RequestOptions.
    """

    __slots__ = ("_read", "_replies")

    def __init__(
        self, port: PortContext, metadata: Sequence[tuple[str, Any]], read: ReadMessage, way: str = ""
    ) -> None:
        super().__init__(port, metadata, way)
        self._read = read
        self._replies: Sequence[Reply] = ()

    async def answer(self, context: Any) -> bytes:
        """Message of the answer. Raises RequestError."""
        options, id = self.begin(context)
        body = await self.read(context)
        message, marks = await self.infer(body, options, id)
        self.keep(len(message))
        context.set_trailing_metadata((("x-request-id", self.shown), *marks, *self.limits_left()))
        return message

    def begin(self, context: Any) -> tuple[RequestOptions, str]:
        """Find out who asks, and what the metadata say: options and id of the request.

        Raises:
            RequestError: the principal is not known, is over a limit, or the metadata are wrong.
        """
        port, intake = self.port, self.port.intake
        fields = read_fields(self.metadata)
        id = read_id(fields)
        chosen = bool(id)
        id = id or port.new_id()
        self.shown = SHOWN + id
        principal = self.identify(fields.get(b"authorization", b""))
        failure = None
        if principal.limits:
            failure = intake.limiter.excess(intake.counted(principal.limits), intake.broker)
        if failure is not None:
            self.tier = None
            refused = Entry(id, "", "", principal.tier, principal.tenant, "", 0.0, 0.0)
            intake.note_refusal(principal, refused, failure)
            raise error_of(failure)
        origin = self.connection.address if port.anonymous and self.connection is not None else None
        try:
            remaining = context.time_remaining()
            longest = port.longest if remaining is None or remaining > port.longest else max(remaining, 0.001)
            return read_options(fields, port.settings, longest, chosen, origin, way=self._way), id
        except RequestError:
            self.charge()
            raise

    async def infer(self, body: bytes, options: RequestOptions, id: str) -> tuple[bytes, Metadata]:
        """Submit the request in a message, and wait for its outcome.

        Returns the message of the answer, and the metadata on how its outcome came about.

        Raises:
            RequestError: it is wrong, or has failed.
        """
        begun = monotonic()
        port = self.port
        try:
            exchange = self._read(body, options)
        except RequestError:
            self.tier = port.settings.tier_names[self.principal.tier]
            self.charge()
            raise
        input, model = exchange.input, exchange.model or port.intake.kinds.default
        self.principal = self.principal.asking(model)
        self.submitted = True
        if isinstance(input, list):
            replies = await self._outcomes(exchange, model, input, id)
        else:
            sink, options = FutureSink(), exchange.options
            port.intake.submit(sink, self.principal, id, options, model, input, exchange.parameters)
            try:
                replies = (await sink.reply,)
            except asyncio.CancelledError:
                port.intake.abandon(sink, self.principal.tenant, id)
                raise
        self._replies = replies
        first = replies[0]
        if first.output is None:
            self.tier = None
            raise error_of(first.failure or Failure(INTERNAL, "the reply is neither an output nor a failure"))
        milliseconds = int((monotonic() - begun) * 1e6) / 1000
        outputs = [one.output for one in replies if one.output is not None]
        self.tier = None
        try:
            version = (first.ran.version if first.ran is not None else "") or port.settings.model_version
            _, message = exchange.write(self.shown, outputs, milliseconds, version)
        except UnicodeEncodeError:
            raise error_of(no_text()) from None
        return message, self.marks(replies)

    async def _outcomes(self, exchange: Exchange, model: str, inputs: list[Value], id: str) -> Sequence[Reply]:
        """Replies to all inputs of a request, or the failure of one."""
        asked = self.port.intake, self.principal, id, exchange.options, model, inputs, exchange.parameters
        several: asyncio.Future[Sequence[Reply]] = asyncio.get_running_loop().create_future()

        def ended(replies: Sequence[Reply]) -> None:
            if not several.done():
                several.set_result(replies)

        fan_out = FanOut(*asked, ended)
        fan_out.start()
        try:
            return await several
        except asyncio.CancelledError:
            fan_out.abandon()
            raise

    def charge(self) -> None:
        """Count a wrong request towards its principal's limits."""
        if self.principal.limits:
            self.port.intake.limiter.charge(self.port.intake.counted(self.principal.limits))

    def marks(self, replies: Sequence[Reply]) -> Metadata:
        """Metadata on how the outcome came about, where it is another request's."""
        first = replies[0]
        if len(replies) == 1 and first.shared is None and not first.unkept:
            return ()
        found: list[tuple[str, str]] = []
        if first.shared is not None and all(one.shared is first.shared for one in replies):
            mark = _SHARED.get((first.shared, all(one.kept for one in replies)))
            if mark is not None:
                found.append(mark)
        if any(one.unkept for one in replies):
            found.append(("x-headway-kept", "no"))
        return tuple(found)

    def limits_left(self) -> Metadata:
        """Metadata by which the principal learns of its limits."""
        limits = self.principal.limits
        return tuple(self.port.rate_limits.fields(limits).items()) if limits else ()

    async def refuse(self, context: Any, error: RequestError, more: Metadata = ()) -> None:
        """End the call with an error, how its outcome came about, and the principal's limits."""
        marks = self.marks(self._replies) if self._replies else ()
        await super().refuse(context, error, more + marks + self.limits_left())


def error_of(failure: Failure) -> RequestError:
    """Error of a request that has failed."""
    return RequestError(failure.message, code=failure.code, retry_after=failure.retry_after, reason=failure.reason)
