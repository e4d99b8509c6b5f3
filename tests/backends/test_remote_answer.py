"""Answers from remote APIs: their forms, their cost, and the trace sent with each try."""

import asyncio
import json
import re
import signal
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.grpc import GrpcBackend
from headway.backends.http import HttpBackend
from headway.backends.remote import reader
from headway.backends.remote.backend import shares
from headway.config.target import RemoteTarget
from headway.core.trace_context import read_trace_context
from headway.dialects.dialect import NoOutputs
from headway.dialects.table import MEMBERS, TextList, read
from headway.model import ItemResult, TraceContext
from headway.runtime.spans import RUN, RunTrace
from tests.backends.entries import batch
from tests.backends.grpc_remote import answer, served_grpc, texts_of
from tests.backends.remote import served
from tests.backends.speakers import SPEAKERS
from tests.servers.collector import CLIENT
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


def test_the_first_member_by_name_counts() -> None:
    assert read(b'{"predictions":["p"],"outputs":["o"],"results":["r"]}', 1) == [ItemResult("o")]


BOMB = b",".join([b"{}"] * 1_000_000)


@pytest.mark.parametrize(
    "body", [b"[" + BOMB + b"]", b'{"outputs":[' + BOMB + b"]}", b'{"outputs":["a"],"more":[' + BOMB + b"]}"]
)
def test_what_nobody_asked_for_is_not_built(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NoOutputs, match=r"a number of outputs other than 8|1 outputs for 8 inputs"):
            read(body, 8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "APART_FROM", 0)


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
async def test_a_process_of_its_own_reads_the_same() -> None:
    for body in (json.dumps(["é" * 1_000_000]).encode(), b'{"outputs":[null]}'):
        assert await reader.read(TextList(), body, 1) == read(body, 1)
    oip = SPEAKERS["oip"]
    body, fields = oip.write(oip.answer(["A", "BB"]))
    length = int(fields["Inference-Header-Content-Length"])
    assert await reader.read(oip.remote("http://h/oip").dialect, body, 2, length) == [ItemResult("A"), ItemResult("BB")]
    body = b"[" + BOMB + b"]"
    with pytest.raises(NoOutputs) as here:
        read(body, 1)
    with pytest.raises(NoOutputs, match=re.escape(str(here.value))):
        await reader.read(TextList(), body, 1)


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


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_each_try_is_a_span_that_the_api_is_told(way: str) -> None:
    told: list[tuple[str | None, str | None]] = []

    def is_turned_down(given: Mapping[str, str], texts: list[str]) -> bool:
        told.append((given.get("traceparent"), given.get("tracestate")))
        return "a" in texts and len(told) == 3

    async def over_http(request: web.Request) -> web.StreamResponse:
        texts = await request.json()
        if is_turned_down(request.headers, texts):
            return web.Response(status=503)
        return web.json_response([text.upper() for text in texts])

    async def over_grpc(asked: Any, context: Any) -> bytes:
        texts = texts_of(asked)
        if is_turned_down(dict(context.invocation_metadata()), texts):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return answer([text.upper() for text in texts])

    recorded, kind = Recorded(time.monotonic), HttpBackend if way == "http" else GrpcBackend
    async with served(over_http) if way == "http" else served_grpc(over_grpc) as url:
        backend = kind(RemoteTarget(url), start_timeout=30.0, rng=lambda: 0.0)
        await backend.start()
        await backend.run(batch("plain"), 30.0)
        token = RUN.set(RunTrace(recorded.recorder, PROCESS, "m", time.monotonic()))
        await backend.run(batch("a", "b"), 30.0)
        RUN.reset(token)
        await backend.stop()
    spans = recorded.spans()
    assert told[:-2] == [(None, None)] * (len(told) - 2), "before, no span"
    for (parent, state), span in zip(told[-2:], spans, strict=True):
        assert parent is not None
        found = read_trace_context(parent.encode())
        assert found is not None and found.sampled
        assert (found.trace_id.hex(), found.span_id.hex(), state) == (span.trace, span.span, "vendor=1")
        assert (span.name, span.kind, span.parent) == ("call m", CLIENT, PROCESS.span_id.hex())
        assert span.attributes["server.address"] == "127.0.0.1"
    assert [span.attributes.get("http.request.resend_count") for span in spans] == [None, 1]
    assert [span.error is None for span in spans] == [False, True]
