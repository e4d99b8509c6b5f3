"""A remote API over gRPC: one call per batch.

| the API says | meaning | reaction |
|---|---|---|
| nothing, UNAVAILABLE, RESOURCE_EXHAUSTED, INTERNAL and the like | it is in trouble | up to `max_tries` attempts, after an exponential pause or the requested rest |
| RESOURCE_EXHAUSTED at the last attempt, without a requested rest | it may take fewer inputs at a time | halve a batch of several; a single input is not to blame |
| INVALID_ARGUMENT, OUT_OF_RANGE, a message too large for it | it rejects an input or the batch | final; search for the bad input |
| any other status | wrong API or credential | final; no input is to blame |

An API requests a rest with grpc-retry-pushback-ms; a negative value forbids another attempt. A call only starts on a connected
channel, so a call without a connection certainly didn't run. A channel is replaced if its connection failed or its call never
ended, because late messages for that call could reach the next call. A server announces that it closes an idle connection (GOAWAY),
and gRPC itself resends a call that the server can't have seen.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from headway.backends.remote import backend, tls_failures
from headway.backends.remote.backend import (
    Answered,
    Generation,
    Generations,
    NotStarted,
    RemoteBackend,
    Tried,
    TryVerdict,
)
from headway.config.target import RemoteTarget
from headway.core.trace_context import trace_fields
from headway.dialects.dialect import Remote, RemoteCall
from headway.dialects.table import reach
from headway.errors import PAYLOAD_TOO_LARGE, BadOutput, RemoteAbsent, RemoteError, RemoteExhausted, RemoteRefused
from headway.runtime.certificates import ClientTls
from headway.runtime.spans import OUTGOING
from headway.version import __version__

IDLE = 30.0  # How many seconds an idle channel is kept.
_LIVE = "/inference.GRPCInferenceService/ServerLive"  # Runs no model. Its error says why there is no connection.
_WHY_WITHIN = 0.5
_NEARLY = 0.05  # DEADLINE_EXCEEDED counts as our own timeout if at most this many seconds early.
_KEY = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_VALUE = re.compile("[ -~]*")

Code = grpc.StatusCode

_REFUSALS = frozenset((Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE))
_PASSING = frozenset((
    Code.ABORTED, Code.CANCELLED, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE, Code.UNKNOWN,
))  # fmt: skip

TOO_LARGE = "larger than max"  # Words of gRPC for C, Go and Node. This failure has no status of its own.
_OTHER_WORDS = re.compile(r"message exceeds (the )?maximum|exceeded while decompressing")  # Words in Java, .NET, Rust.
_TOLD_TOO_LARGE = ("x-headway-error", PAYLOAD_TOO_LARGE)  # Trailer of another Headway: an input is too large.

PUSHBACK = "grpc-retry-pushback-ms"


class GrpcBackend(RemoteBackend):
    """Backend for a slot of a remote API over gRPC. The default `remote` is derived from the URL."""

    def __init__(
        self,
        spec: RemoteTarget,
        *,
        remote: Remote | None = None,
        now: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        super().__init__(spec, remote or reach(spec.url), **settings)
        self._generations = self._channels = Generations[Any](self._channel, _close, self._tls, now, IDLE)

    async def _try(self, call: RemoteCall, left: float) -> Answered | Tried:
        loop = asyncio.get_running_loop()
        until = loop.time() + left
        metadata = self._metadata()
        try:
            async with self._channels.use() as used:
                channel = used.content
                try:
                    if not await _connected(channel, max((until - loop.time()) / 2, 0.001)):
                        why = await _why(channel, min(_WHY_WITHIN, until - loop.time()))
                        self._channels.give_up(used)
                        if self._spec.secure and (failed := tls_failures.explain_words(why)):
                            return Tried(failed, tls_failures.SHOWN, RemoteAbsent, False)
                        shown = "no connection"
                        return Tried(shown if self._is_secret(why) else f"{shown}: {why}", shown, RemoteAbsent, False)
                    return await self._call(used, call, metadata, until)
                except asyncio.CancelledError:
                    self._channels.give_up(used)  # Its connection may be dead, so the next call uses another.
                    current = asyncio.current_task()
                    if current is not None and current.cancelling():
                        raise
                    return Tried("the channel was closed", "the channel was closed", RemoteError, True)
        except NotStarted:
            raise self._error(RemoteError, "was not started") from None

    async def _call(
        self, used: Generation[Any], call: RemoteCall, metadata: tuple[tuple[str, str], ...], until: float
    ) -> Answered | Tried:
        loop = asyncio.get_running_loop()
        try:
            sent = used.content.unary_unary(call.place)
            return Answered(await sent(call.body, timeout=max(until - loop.time(), 0.001), metadata=metadata))
        except grpc.aio.AioRpcError as exc:
            code, details = exc.code(), exc.details() or ""
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and loop.time() >= until - _NEARLY:
                self._channels.give_up(used)
                raise TimeoutError from None
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: " in details and TOO_LARGE in details:
                raise self._error(BadOutput, f"answered more than {backend.MAX_ANSWER} bytes") from None
            if code is grpc.StatusCode.UNAVAILABLE:
                self._channels.give_up(used)
            verdict = judge(code, details, exc.trailing_metadata() or ())
            return Tried.judged(verdict, f"gRPC {code.name}", details.encode("utf-8", "replace"))
        except (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError, ValueError, TypeError) as exc:
            return Tried(type(exc).__name__, type(exc).__name__, RemoteError, True)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the credentials as gRPC metadata. Raises RemoteError if gRPC can't send a field."""
        fields = tuple((name.lower(), value) for name, value in self._credentials.current().items())
        for name, value in fields:
            if not _KEY.fullmatch(name) or not _VALUE.fullmatch(value):
                reason = f"cannot be sent the header field {name}: over gRPC, names consist of letters, digits, _ . and -, are not "
                raise self._error(RemoteError, f"{reason}grpc-… or …-bin, and values are printable ASCII")
        return fields + tuple(trace_fields(OUTGOING.get()).items())

    def _channel(self) -> Any:
        parts = urlsplit(self._remote.url)
        options = (
            ("grpc.max_receive_message_length", backend.MAX_ANSWER),
            ("grpc.max_send_message_length", -1),
            ("grpc.primary_user_agent", f"headway/{__version__}"),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.enable_http_proxy", 0),
        )
        if parts.scheme == "grpc":
            return grpc.aio.insecure_channel(parts.netloc, options=options)
        tls = self._tls()
        trusted = grpc.ssl_channel_credentials(
            root_certificates=_system_authorities() if tls is None or tls.authorities is None else tls.authorities,
            private_key=None if tls is None else tls.key,
            certificate_chain=None if tls is None else tls.certificate,
        )
        return grpc.aio.secure_channel(parts.netloc, trusted, options=options)

    def _tls(self) -> ClientTls | None:
        return None if self._certificates is None else self._certificates.current


async def _connected(channel: Any, within: float) -> bool:
    try:
        async with asyncio.timeout(within):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return True


async def _close(channel: Any) -> None:
    await channel.close(None)


async def _why(channel: Any, within: float) -> str:
    try:
        await channel.unary_unary(_LIVE)(b"", timeout=max(within, 0.001))
    except grpc.aio.AioRpcError as exc:
        if exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return str(exc.details() or exc.code().name)
    return "not in time"


def _system_authorities() -> bytes | None:
    """Return the system's trusted authorities in PEM, or None to use the authorities that gRPC ships."""
    try:
        return Path(ssl.get_default_verify_paths().cafile or "").read_bytes()
    except OSError:
        return None


def judge(code: grpc.StatusCode, details: str, trailers: Iterable[tuple[str, str | bytes]]) -> TryVerdict:
    """Judge a failure status."""
    trailers = list(trailers)
    too_large = TOO_LARGE in details or _OTHER_WORDS.search(details) is not None or _TOLD_TOO_LARGE in trailers
    if code in _REFUSALS or (code is Code.RESOURCE_EXHAUSTED and too_large):
        return TryVerdict(True, RemoteRefused)
    if code not in _PASSING:
        return TryVerdict(True, RemoteError)
    wishes = [value for name, value in trailers if name == PUSHBACK]
    rest = pushback(wishes[-1]) if wishes else None
    # The status means a rate limit or too many elements. Only a requested rest distinguishes them.
    kind = RemoteExhausted if code is Code.RESOURCE_EXHAUSTED and rest is None else RemoteError
    return TryVerdict(bool(wishes) and rest is None, kind, rest)


def pushback(value: str | bytes) -> float | None:
    """Return how many seconds to wait before a retry (gRFC A6), or None if the API forbids a retry or the value is invalid."""
    try:
        seconds = int(value) / 1000
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 and math.isfinite(seconds) else None
