"""Promises of every backend, asked of each with a black box that goes wrong on demand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import structlog

from headway.backends.grpc.backend import GrpcBackend
from headway.backends.http.backend import HttpBackend
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
async def process() -> AsyncIterator[Backend]:
    backend = ProcessBackend(
        ModuleTarget("tests.targets.faults", "answer"),
        worker="gpu-0",
        device="0",
        start_timeout=LONG,
        log=structlog.get_logger(),
        arena_bytes=16 << 20,
    )
    try:
        yield backend
    finally:
        await backend.stop()


def remote(dialect: str) -> Build:
    """Way to build the backend of a remote API that speaks a dialect."""
    speaker = SPEAKERS[dialect]

    @asynccontextmanager
    async def build() -> AsyncIterator[Backend]:
        handle = faulty(
            lambda body: speaker.inputs(speaker.read(body)), lambda outputs: speaker.response(speaker.answer(outputs))
        )
        async with served(handle, speaker.path) as url:
            backend = HttpBackend(RemoteTarget(url), remote=speaker.remote(url), start_timeout=LONG, rng=lambda: 0.0)
            try:
                yield backend
            finally:
                await backend.stop()

    return build


@asynccontextmanager
async def remote_grpc() -> AsyncIterator[Backend]:
    async with grpc_remote.served_grpc(grpc_remote.faulty) as url:
        backend = GrpcBackend(RemoteTarget(url), start_timeout=LONG, rng=lambda: 0.0)
        try:
            yield backend
        finally:
            await backend.stop()


BUILDS = {
    "process": process,
    "oip-grpc": remote_grpc,
    **{name: remote(name) for name, speaker in SPEAKERS.items() if speaker.gives is str.upper},
}


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


async def test_starting_tells_how_long_the_warm_up_took(build: Build) -> None:
    async with build() as backend:
        assert 0.0 < await backend.start() < LONG


async def test_outputs_come_in_the_order_of_their_inputs(backend: Backend) -> None:
    assert await backend.run(batch("alone"), LONG) == [ItemResult("ALONE")]
    many = [f"text {number}" for number in range(100)]
    assert outputs(await backend.run(batch(*many), LONG)) == [text.upper() for text in many]


async def test_any_text_goes_and_comes_unharmed(backend: Backend) -> None:
    texts = ["", "\0\x1b\x7f\n", "ÀÉ 漢字 😀\u2028", '"\\', "X" * 3_000_000, "É" * 1_000_000]
    assert outputs(await backend.run(batch(*texts), LONG)) == texts


@pytest.mark.parametrize("word", ["none", "number", "huge"])
async def test_what_is_no_text_fails_that_input_only(backend: Backend, word: str) -> None:
    before, wrong, after = await backend.run(batch("a", word, "b"), LONG)
    assert (before, after) == (ItemResult("A"), ItemResult("B"))
    assert wrong.output is None
    assert wrong.fault
    assert wrong.error


@pytest.mark.parametrize("word", ["short", "long", "dict", "text"])
async def test_a_wrong_number_of_outputs_fails_the_batch_and_is_never_cut_to_fit(backend: Backend, word: str) -> None:
    with pytest.raises(BadOutput) as caught:
        await backend.run(batch("a", word, "b"), LONG)
    assert caught.value.cause is Cause.BAD_OUTPUT
    if word in ("short", "long"):
        assert f"{2 if word == 'short' else 4} outputs for 3 inputs" in str(caught.value)
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_a_batch_that_is_refused_fails_with_the_reason_and_the_next_one_runs(backend: Backend) -> None:
    with pytest.raises(BackendError, match=r"ValueError: what is\nthis|HTTP 400$|INVALID_ARGUMENT$") as caught:
        await backend.run(batch("a", "raise"), LONG)
    assert caught.value.cause in (Cause.RAISED, Cause.REFUSED)
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_a_batch_that_dies_with_its_black_box_fails(backend: Backend) -> None:
    with pytest.raises(BackendError) as caught:
        await backend.run(batch("a", "exit"), LONG)
    assert caught.value.cause in (Cause.CRASHED, Cause.REMOTE)
    await backend.start()
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_a_batch_that_hangs_fails_at_its_timeout(backend: Backend) -> None:
    with pytest.raises(BatchTimeout, match=r"0\.15 s|150 ms"):
        await backend.run(batch("a", "hang"), SHORT)
    await backend.start()
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_answers_are_not_mixed_up_after_a_run_was_cancelled(backend: Backend) -> None:
    running = asyncio.ensure_future(backend.run(batch("hang"), LONG))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await backend.start()
    assert outputs(await backend.run(batch("b"), LONG)) == ["B"]


async def test_a_well_backend_does_not_want_to_go(backend: Backend) -> None:
    gone = asyncio.ensure_future(backend.gone())
    await backend.run(batch("a"), LONG)
    assert not gone.done()
    gone.cancel()


async def test_stopping_twice_is_safe_and_a_stopped_backend_starts_again(backend: Backend) -> None:
    await backend.stop()
    await backend.stop()
    with pytest.raises(BackendError):
        await backend.run(batch("a"), LONG)
    await backend.start()
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]


async def test_stopping_what_was_never_started_is_safe(build: Build) -> None:
    async with build() as backend:
        assert backend.pid == 0
        await backend.stop()


async def test_an_input_that_cannot_be_sent_fails_its_batch(backend: Backend) -> None:
    with pytest.raises(BackendError, match="not valid Unicode text"):
        await backend.run(batch("a", "\ud800"), LONG)
    assert outputs(await backend.run(batch("a"), LONG)) == ["A"]
