"""Answers of remote APIs: their forms and cost, and the trace that each try is told of."""

import asyncio
import json
import signal
import time
import tracemalloc
from typing import Any

import grpc
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.grpc import GrpcBackend
from headway.backends.http import HttpBackend
from headway.backends.remote import reader
from headway.backends.remote.backend import RemoteBackend, shares
from headway.config.target import RemoteTarget
from headway.core.trace_context import read_trace_context
from headway.dialects.dialect import NoOutputs
from headway.dialects.table import MEMBERS, TextList, read
from headway.model import ItemResult, TraceContext
from headway.runtime.spans import RUN, RunTrace
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, texts_of
from tests.backends.remote import served
from tests.servers.collector import CLIENT, Received
from tests.services.tracing import Recorded

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=6), st.sampled_from(["", *MEMBERS]), st.integers(0, 6))
def test_each_text_is_an_output_and_all_else_a_fault_of_its_own(values: list[Any], member: str, expected: int) -> None:
    body = json.dumps({"took": [3], member: values} if member else values).encode()
    if len(values) != expected:
        with pytest.raises(NoOutputs, match=f"{len(values)} outputs for {expected} inputs"):
            read(body, expected)
        return
    for item, value in zip(read(body, expected), values, strict=True):
        assert item == ItemResult(value) if isinstance(value, str) else (item.output is None and item.fault)


@pytest.mark.parametrize(
    ("element", "kind"),
    [("null", "null"), ("true", "bool"), (" false", "bool"), ("-1.5", "number"), ("[1]", "list"), ('{"a":1}', "dict")],
)
def test_the_kind_of_what_is_no_text_is_told(element: str, kind: str) -> None:
    [item, good] = read(f'[{element}, "a"]'.encode(), 2)
    assert item.error == f"the remote API answered {kind} for this input, expected a string"
    assert good == ItemResult("a")


def test_the_first_member_by_name_counts() -> None:
    assert read(b'{"predictions":["p"],"outputs":["o"],"results":["r"]}', 1) == [ItemResult("o")]


@pytest.mark.parametrize("body", [b"", b"[", b'["a"', b'["a"]]', b'{"outputs":["a"}', b'["\xff"]', b"[" * 100_000])
def test_what_is_no_json_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(NoOutputs, match="something that is not JSON"):
        read(body, 1)


BOMB = b",".join([b"{}"] * 1_000_000)


@pytest.mark.parametrize(
    "body", [b"[" + BOMB + b"]", b'{"outputs":[' + BOMB + b"]}", b'{"outputs":["a"],"more":[' + BOMB + b"]}"]
)
def test_what_nobody_asked_for_is_not_built(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NoOutputs, match=r"another number of outputs than 8|1 outputs for 8 inputs"):
            read(body, 8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "APART_FROM", 0)


BODIES = [json.dumps(["é" * 1_000_000]).encode(), b'{"outputs":[null]}', b"[" + BOMB + b"]"]


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_a_process_of_its_own_reads_the_same() -> None:
    def here(body: bytes) -> object:
        try:
            return read(body, 1)
        except NoOutputs as exc:
            return str(exc)

    async def apart(body: bytes) -> object:
        try:
            return await reader.read(TextList(), body, 1)
        except NoOutputs as exc:
            return str(exc)

    async def main() -> list[object]:
        return [await apart(body) for body in BODIES]

    assert asyncio.run(main()) == [here(body) for body in BODIES]


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
async def test_a_reader_that_nobody_waits_for_any_more_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    start = asyncio.create_subprocess_exec

    async def starting(*_: str, **how: Any) -> asyncio.subprocess.Process:
        started.set_result(await start("sleep", "60", **how))
        return started.result()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    reading = asyncio.ensure_future(reader.read(TextList(), b'["a"]', 1))
    process = await started
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert process.returncode == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_a_reader_that_ends_before_it_has_said_all_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "true")
    with pytest.raises(NoOutputs, match="could not be read"):
        asyncio.run(reader.read(TextList(), b'["a"]', 1))


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_where_no_reader_can_be_started_the_answer_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert asyncio.run(reader.read(TextList(), b'["a"]', 1)) == [ItemResult("a")]


def test_tokens_are_shared_by_weight_and_evenly_without_any() -> None:
    assert shares(10, [1, 3, 1]) == [2, 6, 2]
    assert shares(10, [0, 0, 0]) == [3, 3, 4]
    assert shares(0, [1, 2]) == [0, 0]
    assert shares(5, []) == []


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_no_token_is_lost_and_no_share_is_off_by_more_than_one(total: int, weights: list[int]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    assert not whole or all(
        abs(part - total * weight / whole) <= 1 for part, weight in zip(parts, weights, strict=True)
    )


PROCESS = TraceContext(bytes(range(16)), bytes(range(8)), 1, "vendor=1")


async def run_sampled(backend: RemoteBackend) -> list[Received]:
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
