"""Remote APIs learn of the trace of a sampled batch, and each try is a span of it."""

from __future__ import annotations

import time
from typing import Any

import grpc
from aiohttp import web

from headway.backends.grpc.backend import GrpcBackend
from headway.backends.http.backend import HttpBackend
from headway.backends.remote.backend import RemoteBackend
from headway.config.target import RemoteTarget
from headway.core.trace_context import read_trace_context
from headway.model import TraceContext
from headway.runtime.spans import RUN, RunTrace
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, texts_of
from tests.backends.remote import served
from tests.servers.collector import CLIENT, Received
from tests.services.tracing import Recorded

PROCESS = TraceContext(bytes(range(16)), bytes(range(8)), 1, "vendor=1")


async def run_sampled(backend: RemoteBackend) -> list[Received]:
    """Spans of a batch that is sampled, after one that is not."""
    recorded = Recorded(time.monotonic)
    try:
        await backend.start()
        await backend.run(batch("plain"), 30.0)
        token = RUN.set(RunTrace(recorded.recorder, PROCESS, "m", time.monotonic()))
        try:
            await backend.run(batch("a", "b"), 30.0)
        finally:
            RUN.reset(token)
    finally:
        await backend.stop()
    return recorded.spans()


def check(spans: list[Received], told: list[tuple[str | None, str | None]]) -> None:
    """The API was told of the span of each try, and of none before."""
    assert told[:-2] == [(None, None)] * (len(told) - 2)
    for (parent, state), span in zip(told[-2:], spans, strict=True):
        assert parent is not None
        found = read_trace_context(parent.encode())
        assert found is not None and found.sampled
        assert (found.trace_id.hex(), found.span_id.hex(), state) == (span.trace, span.span, "vendor=1")
        assert (span.name, span.kind, span.parent) == ("call m", CLIENT, PROCESS.span_id.hex())
        assert span.attributes["server.address"] == "127.0.0.1"
    assert [span.attributes.get("http.request.resend_count") for span in spans] == [None, 1]
    assert [span.error is None for span in spans] == [False, True]


async def test_each_try_over_http_is_a_span_that_the_api_is_told() -> None:
    told: list[tuple[str | None, str | None]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        told.append((request.headers.get("traceparent"), request.headers.get("tracestate")))
        inputs = await request.json()
        if "a" in inputs and len(told) == 3:
            return web.Response(status=503)
        return web.json_response([text.upper() for text in inputs])

    async with served(handle) as url:
        backend = HttpBackend(RemoteTarget(url), start_timeout=30.0, rng=lambda: 0.0)
        check(await run_sampled(backend), told)


async def test_each_try_over_grpc_is_a_span_that_the_api_is_told() -> None:
    told: list[tuple[str | None, str | None]] = []

    async def handle(asked: Any, context: Any) -> bytes:
        metadata = dict(context.invocation_metadata())
        told.append((metadata.get("traceparent"), metadata.get("tracestate")))
        texts = texts_of(asked)
        if "a" in texts and len(told) == 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return answer([text.upper() for text in texts])

    async with served_grpc(handle) as url:
        backend = GrpcBackend(RemoteTarget(url), start_timeout=30.0, rng=lambda: 0.0)
        check(await run_sampled(backend), told)
