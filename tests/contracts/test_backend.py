"""Promises of every backend, tested with a black box that fails on demand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import structlog

from headway.backends.grpc import GrpcBackend
from headway.backends.http import HttpBackend
from headway.backends.process.backend import ProcessBackend
from headway.config.target import ModuleTarget, RemoteTarget
from headway.errors import BackendError, BadOutput, BatchTimeout
from headway.model import Cause, ItemResult
from headway.ports import Backend
from tests.backends import grpc_remote
from tests.backends.entries import batch
from tests.backends.remote import faulty, served
from tests.backends.speakers import SPEAKERS
from tests.scenes import Played

pytestmark = pytest.mark.processes

LONG = 60.0
SHORT = 0.15

Build = Callable[[], AbstractAsyncContextManager[Backend]]


@asynccontextmanager
async def stopped(backend: Backend) -> AsyncIterator[Backend]:
    try:
        yield backend
    finally:
        await backend.stop()


def process() -> AbstractAsyncContextManager[Backend]:
    target, log = ModuleTarget("tests.targets.faults", "answer"), structlog.get_logger()
    return stopped(
        ProcessBackend(target, worker="gpu-0", device="0", start_timeout=LONG, log=log, arena_bytes=16 << 20)
    )


def remote(dialect: str) -> Build:
    """Return a builder for the backend of an API with this dialect. `tests.backends` has the other builders."""
    speaker = SPEAKERS[dialect]

    @asynccontextmanager
    async def build() -> AsyncIterator[Backend]:
        handle = faulty(
            lambda body: speaker.inputs(speaker.read(body)), lambda outputs: speaker.response(speaker.answer(outputs))
        )
        async with served(handle, speaker.path) as url:
            api = HttpBackend(RemoteTarget(url), remote=speaker.remote(url), start_timeout=LONG, rng=lambda: 0.0)
            async with stopped(api) as backend:
                yield backend

    return build


@asynccontextmanager
async def remote_grpc() -> AsyncIterator[Backend]:
    async with (
        grpc_remote.served_grpc(grpc_remote.faulty) as url,
        stopped(GrpcBackend(RemoteTarget(url), start_timeout=LONG, rng=lambda: 0.0)) as backend,
    ):
        yield backend


BUILDS = {"process": process, "oip-grpc": remote_grpc, "http": remote("list")}


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> Build:
    return BUILDS[request.param]


def started(build: Build, act: Callable[[Backend], Awaitable[None]]) -> None:
    async def main() -> None:
        async with build() as backend:
            await backend.start()
            await act(backend)

    asyncio.run(main())


@pytest.fixture
def backend(build: Build) -> Played:
    return Played(partial(started, build))


def outputs(items: object) -> list[str | None]:
    assert isinstance(items, list)
    return [item.output for item in items]


async def test_a_backend_starts_and_runs_batches_and_stops_as_often_as_asked(build: Build) -> None:
    async with build() as backend:
        assert backend.pid == 0
        await backend.stop()  # It was never started.
        assert 0.0 < await backend.start() < LONG
        gone = asyncio.ensure_future(backend.gone())
        assert await backend.run(batch("alone"), LONG) == [ItemResult("ALONE")]
        many = [f"text {number}" for number in range(100)]
        assert outputs(await backend.run(batch(*many), LONG)) == [text.upper() for text in many]
        texts = ["", "\0\x1b\x7f\n", "ÀÉ 漢字 😀\u2028", '"\\', "X" * 3_000_000, "É" * 1_000_000]
        assert outputs(await backend.run(batch(*texts), LONG)) == texts
        assert not gone.done(), "it is well"
        gone.cancel()
        await backend.stop()
        await backend.stop()
        with pytest.raises(BackendError):
            await backend.run(batch("a"), LONG)
        await backend.start()
        assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_what_is_no_text_fails_that_input_only(backend: Backend) -> None:
    for word in ("none", "number", "huge"):
        before, wrong, after = await backend.run(batch("a", word, "b"), LONG)
        assert (before, after) == (ItemResult("A"), ItemResult("B")), word
        assert wrong.output is None, word
        assert wrong.fault and wrong.error, word


async def test_a_batch_that_is_refused_or_has_a_wrong_number_of_outputs_fails_and_the_next_one_runs(
    backend: Backend,
) -> None:
    for word in ("short", "long", "dict", "text"):
        with pytest.raises(BadOutput) as caught:
            await backend.run(batch("a", word, "b"), LONG)
        assert caught.value.cause is Cause.BAD_OUTPUT, word
        if word in ("short", "long"):
            assert f"{2 if word == 'short' else 4} outputs for 3 inputs" in str(caught.value)
    with pytest.raises(BackendError, match=r"ValueError: what is\nthis|HTTP 400$|INVALID_ARGUMENT$") as refused:
        await backend.run(batch("a", "raise"), LONG)
    assert refused.value.cause in (Cause.RAISED, Cause.REFUSED)
    with pytest.raises(BackendError, match="not valid Unicode text"):
        await backend.run(batch("a", "\ud800"), LONG)
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_a_batch_that_dies_hangs_or_is_cancelled_leaves_no_answer_to_the_next_one(backend: Backend) -> None:
    with pytest.raises(BackendError) as died:
        await backend.run(batch("a", "exit"), LONG)
    assert died.value.cause in (Cause.CRASHED, Cause.REMOTE)
    await backend.start()
    assert outputs(await backend.run(batch("b"), LONG)) == ["B"]
    with pytest.raises(BatchTimeout, match=r"0\.15 s|150 ms"):
        await backend.run(batch("a", "hang"), SHORT)
    await backend.start()
    assert outputs(await backend.run(batch("c"), LONG)) == ["C"]
    running = asyncio.ensure_future(backend.run(batch("hang"), LONG))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await backend.start()
    assert outputs(await backend.run(batch("d"), LONG)) == ["D"]
