"""The dialect `oip-grpc` with servers that fail in every way, and what it sends and logs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from headway.backends.grpc import GrpcBackend, pushback
from headway.backends.remote.backend import Generations
from headway.backends.remote.credentials import Credentials
from headway.config.target import RemoteTarget
from headway.dialects.table import reach
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteAbsent, RemoteError, RemoteRefused, TargetError
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.grpc_remote import ASKED, GOAWAY, RST_STREAM, answer, metadata, served_frames, served_grpc, texts_of
from tests.fuzz.frames import frame

LONG = 30.0
SHORT = 0.2
Status = grpc.StatusCode


class Api:
    """A remote API that answers the warm-up correctly, then each request with `say`, or correctly if that returns None."""

    def __init__(self, say: Callable[[list[str], Any], Awaitable[bytes | None]] | None = None) -> None:
        self.say = say
        self.contexts: list[tuple[dict[str, Any], float]] = []

    async def handle(self, asked: Any, context: Any) -> bytes:
        texts = texts_of(asked)
        self.contexts.append((dict(context.invocation_metadata()), context.time_remaining()))
        said = None if self.say is None or texts == ["warm-up"] else await self.say(texts, context)
        return answer([text.upper() for text in texts]) if said is None else said

    @contextlib.asynccontextmanager
    async def against(self, **settings: Any) -> AsyncIterator[GrpcBackend]:
        async with served_grpc(self.handle) as url:
            backend = GrpcBackend(RemoteTarget(url), **{"start_timeout": LONG, "rng": lambda: 0.0, **settings})
            try:
                await backend.start()
                yield backend
            finally:
                await backend.stop()


def aborts(status: grpc.StatusCode, details: str = "no", *trailers: tuple[str, str]) -> Any:
    async def say(texts: list[str], context: Any) -> bytes | None:
        if "wrong" in texts:
            await context.abort(status, details, trailers)
        return None

    return say


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, bytes([0, 0, 0, 2]))


WRONG = [
    (answer(["a"]), "1 outputs for 2 inputs"),
    (answer(["a", "b", "c"], shape=[2]), "5 bytes of binary data more than 2 outputs"),
    (answer(["a", "b"], shape=[2] * 1000), "an impossible shape"),
    (answer(["a", "b"], raw=[b"\xff" * 10]), "binary data that ends in the middle of an output"),
    (answer(["a", "b"], raw=[b"", b""]), "2 raw contents for one tensor"),
    (answer(["a", "b"], raw=[]), "0 outputs for 2 inputs"),
    (answer([], contents={"bytes_contents": [b"a"] * 3}, shape=[2]), "3 outputs for 2 inputs"),
    (answer(["a", "b"]) * 2, "2 tensors, expected one"),
    (b"", "0 tensors, expected one"),
    (answer(["a", "b"])[:-1], "not a ModelInfer message"),
]


@pytest.mark.parametrize(("said", "what"), WRONG)
def test_an_answer_of_another_shape_fails_the_batch(said: bytes, what: str) -> None:
    dialect = reach("grpc://h:1/m").dialect.learn(metadata([("text", "BYTES", (-1,))], [("OUTPUT", "BYTES", (-1,))]))
    with pytest.raises(Exception, match=what):
        dialect.decode(said, 2)


STATUSES = [
    (Status.INVALID_ARGUMENT, "", RemoteRefused, "failed at try 1: gRPC INVALID_ARGUMENT$"),
    (Status.OUT_OF_RANGE, "", RemoteRefused, "failed at try 1"),
    *(
        (status, "", RemoteError, f"failed at try 1: gRPC {status.name}$")
        for status in (Status.UNAUTHENTICATED, Status.PERMISSION_DENIED, Status.NOT_FOUND, Status.UNIMPLEMENTED)
    ),
    (Status.FAILED_PRECONDITION, "", RemoteError, "failed at try 1"),
    *(
        (status, "", RemoteError, f"failed at try 3: gRPC {status.name}$")
        for status in (Status.UNAVAILABLE, Status.INTERNAL, Status.UNKNOWN, Status.ABORTED, Status.DEADLINE_EXCEEDED)
    ),
    (Status.RESOURCE_EXHAUSTED, "", RemoteRefused, "failed at try 3: gRPC RESOURCE_EXHAUSTED$"),
    (Status.RESOURCE_EXHAUSTED, "-1", RemoteRefused, "failed at try 1"),
    (Status.RESOURCE_EXHAUSTED, "5", RemoteError, "failed at try 3"),
    (Status.INTERNAL, "-1", RemoteError, "failed at try 1: gRPC INTERNAL$"),
    (Status.UNAVAILABLE, "soon", RemoteError, "failed at try 1"),
    (Status.UNAVAILABLE, "90500", RemoteError, "try 1: .*it asks for 90.5 s of rest"),
    (Status.UNAVAILABLE, "5", RemoteError, "failed at try 3"),
]


@pytest.mark.parametrize(("status", "pushback", "kind", "what"), STATUSES)
async def test_every_status_has_its_meaning(status: Any, pushback: str, kind: type[BackendError], what: str) -> None:
    trailers = [("grpc-retry-pushback-ms", pushback)] if pushback else []
    with capture_logs() as logged:
        async with Api(aborts(status, "canary " * 100, *trailers)).against() as backend:
            with pytest.raises(kind, match=what):
                await backend.run(batch("a", "wrong"), LONG)
            if status is Status.RESOURCE_EXHAUSTED:
                with pytest.raises(RemoteError):  # A lone input isn't blamed if the API has no room.
                    await backend.run(batch("wrong"), LONG)
    note = [line for line in logged if line["event"] == "the remote API returned no outputs"][-1]
    assert note["body"].startswith("canary") and len(note["body"]) <= 210, "its words are in the log alone, and bounded"


async def test_an_answer_that_is_too_large_fails_its_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def say(texts: list[str], context: Any) -> bytes | None:
        return answer(["x" * 20_000] * 2) if "wrong" in texts else None

    monkeypatch.setattr("headway.backends.remote.backend.MAX_ANSWER", 10_000)
    async with Api(say).against() as backend:
        with pytest.raises(BadOutput, match="answered more than 10000 bytes"):
            await backend.run(batch("a", "wrong"), LONG)
        assert await backend.run(batch("b"), LONG) == [ItemResult("B")]


@pytest.mark.parametrize("ends", ["timeout", "cancelled", "stopped"])
async def test_a_call_under_way_is_cancelled_when_its_run_ends(ends: str) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def say(texts: list[str], context: Any) -> bytes | None:
        if "wrong" in texts:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return None

    async with Api(say).against() as backend:
        running = asyncio.ensure_future(backend.run(batch("wrong"), SHORT if ends == "timeout" else LONG))
        await begun.wait()
        if ends == "timeout":
            with pytest.raises(BatchTimeout, match=r"within 0\.2 s"):
                await running
        elif ends == "cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            await backend.stop()
            with pytest.raises(RemoteError, match="the channel was closed"):
                await running
        await asyncio.wait_for(cancelled.wait(), LONG)
        if ends != "stopped":
            assert await backend.run(batch("b"), LONG) == [ItemResult("B")]


async def test_a_server_that_comes_back_is_used_again() -> None:
    async with served_grpc(Api().handle) as url:
        backend = GrpcBackend(RemoteTarget(url), start_timeout=LONG, rng=lambda: 0.0)
        await backend.start()
        used = backend._channels.current
    try:
        assert used is not None
        # Until the client notices that the connection closed, it can't tell whether a call ran.
        while (state := used.content.get_state()) is grpc.ChannelConnectivity.READY:
            await used.content.wait_for_state_change(state)
        with pytest.raises(RemoteAbsent, match=r"failed at try 3: no connection: .*Connection refused") as found:
            await backend.run(batch("a"), LONG)
        assert found.value.shown == "the remote API failed at try 3: no connection"
        async with served_grpc(Api().handle, port=int(url.split(":")[2].split("/")[0])):
            assert await backend.run(batch("b"), LONG) == [ItemResult("B")]
    finally:
        await backend.stop()


@pytest.mark.parametrize(
    ("say", "what"),
    [
        (lambda stream: None, "gRPC UNAVAILABLE"),
        (
            lambda stream: frame(GOAWAY, 0, 0, bytes([0, 0, 0, stream, 0, 0, 0, 2])) + reset(stream),
            "gRPC (INTERNAL|UNKNOWN)",
        ),
        (lambda stream: b"\xff" * 100, "failed at try"),
    ],
    ids=["reset", "GOAWAY", "garbage"],
)
async def test_what_breaks_off_on_the_way_is_a_run_that_failed(say: Callable[[int], bytes | None], what: str) -> None:
    """Some bytes were sent, so the batch may have run."""
    async with served_frames(say) as url:
        backend = GrpcBackend(RemoteTarget(url), start_timeout=LONG, rng=lambda: 0.0)
        backend._channels.open()
        try:
            with pytest.raises((RemoteError, BatchTimeout), match=f"{what}|no complete answer") as found:
                await backend.run(batch("a"), 5.0)
            assert not isinstance(found.value, RemoteAbsent)
        finally:
            await backend.stop()


async def test_the_deadline_and_header_fields_go_with_every_call(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("X-Team: blue\n")

    api = Api()
    async with api.against(credentials=Credentials("secret", str(file))) as backend:
        await backend.run(batch("a"), 2.5)
    fields, left = api.contexts[-1]
    assert (fields["authorization"], fields["x-team"]) == ("Bearer secret", "blue")
    assert fields["user-agent"].startswith("headway/")
    assert 0 < left <= 2.5 * 1.01  # grpc-timeout has few digits and is rounded up.


@pytest.mark.parametrize("field", ["X!A: canary", "grpc-timeout: canary", "x-bin: canary", "X-A: can\u00e4ry"])
async def test_a_header_field_that_grpc_does_not_have_is_told_without_its_value(tmp_path: Path, field: str) -> None:
    file = tmp_path / "headers"
    file.write_text(field)
    backend = GrpcBackend(RemoteTarget("grpc://h:1/m"), credentials=Credentials(file=str(file)), start_timeout=LONG)
    with pytest.raises(TargetError, match="cannot be sent the header field") as found:
        await backend.start()
    assert "canary" not in str(found.value)


def test_every_kind_of_parameter_has_its_member() -> None:
    dialect = reach("grpc://h:1/m").dialect
    kinds = b'{"b":true,"i":-5,"u":18446744073709551615,"d":0.5,"s":"x","priority":1,"timeout":5,"sequence_id":3}'
    asked = ASKED.FromString(dialect.encode(["a"], [kinds]).body)
    found = {
        name: (one.WhichOneof("parameter_choice"), getattr(one, one.WhichOneof("parameter_choice")))
        for name, one in asked.parameters.items()
    }
    assert found == {
        "b": ("bool_param", True),
        "i": ("int64_param", -5),
        "u": ("uint64_param", 2**64 - 1),
        "d": ("double_param", 0.5),
        "s": ("string_param", "x"),
    }


class FakeChannel:
    closed = False

    async def close(self) -> None:
        self.closed = True


async def test_a_channel_whose_stamp_has_changed_is_closed_once_its_calls_have_ended() -> None:
    made: list[FakeChannel] = []
    stamp = object()

    def make() -> FakeChannel:
        made.append(FakeChannel())
        return made[-1]

    channels = Generations(make, FakeChannel.close, lambda: stamp, lambda: 0.0, 30.0)
    channels.open()
    async with channels.use() as old:
        stamp = object()
        async with channels.use() as new:
            assert new.content is not old.content
            assert not made[0].closed
    assert [one.closed for one in made] == [True, False]
    await channels.close()
    assert made[1].closed


@pytest.mark.parametrize(
    ("value", "seconds"), [("0", 0.0), ("1500", 1.5), (b"20", 0.02), ("-1", None), ("x", None), ("9" * 5000, None)]
)
def test_what_a_pushback_asks_for(value: str | bytes, seconds: float | None) -> None:
    assert pushback(value) == seconds


@pytest.mark.parametrize(
    ("details", "trailers"),
    [
        ("SERVER: Received message larger than max (9 vs. 5)", []),
        ("gRPC message exceeds maximum size 5: 9", []),
        ("Received message exceeds the maximum configured message size.", []),
        ("Error decompressing: size limit, of 5 bytes, exceeded while decompressing message", []),
        ("the input is long", [("x-headway-error", "PAYLOAD_TOO_LARGE"), ("grpc-retry-pushback-ms", "-1")]),
    ],
)
async def test_an_oversized_message_blames_an_input(details: str, trailers: list[tuple[str, str]]) -> None:
    async with Api(aborts(Status.RESOURCE_EXHAUSTED, details, *trailers)).against() as backend:
        for texts in (("a", "wrong"), ("wrong",)):
            with pytest.raises(RemoteRefused, match="failed at try 1"):
                await backend.run(batch(*texts), LONG)


async def test_the_log_says_once_that_the_api_is_back() -> None:
    now = 100.0
    with capture_logs() as logged:
        async with Api(aborts(Status.UNAVAILABLE)).against(clock=lambda: now) as backend:
            for text in ("wrong", "wrong", "b", "b"):
                with contextlib.suppress(RemoteError):
                    await backend.run(batch(text), LONG)
                now += 2.0
    again = [line for line in logged if line["event"] == "the remote API answers again"]
    assert [line["away_s"] for line in again] == [4.0]
