"""A gRPC port on loopback with real gRPC clients. Behind it is an echo or the whole service.

    served(main)  runs the coroutine function `main(port)` on an open port. Fails on leaks and unnoticed errors.
    @on_port()    turns such a function into a test.

The event loop is uvloop, as in production. Nothing here waits for real time.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

import grpc
import pytest
import uvloop

from headway import protos
from headway.app.input_policy import PolicyResource
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core.queue_limits import QueueLimits
from headway.doors.entrance import Entrance
from headway.doors.readiness import Readiness
from headway.gateway.gateway import Gateway
from headway.gateway.request_traces import RefusalTraces
from headway.grpc.listener import GrpcListener
from headway.identity.principals import AnonymousIdentity
from headway.model import WorkerInfo
from headway.runtime.certificates import Certificates
from headway.runtime.counters import Counters
from headway.runtime.supervisor import Supervisor
from tests.http.stand import KEPT_LIMITS, PATIENCE, Bearers, EchoGateway, Keys, Stand, _work, recording, worker
from tests.scenes import Scene, scene

PREDICT = "/headway.v1.Inference/Predict"
INFER = f"/{protos.OPEN_INFERENCE}/ModelInfer"
ID = "00000000-0000-7000-8000-{:012x}"

Metadata = Sequence[tuple[str, str]]


@dataclass
class Failed:
    status: grpc.StatusCode
    details: str
    trailers: dict[str, str]


class Client:
    def __init__(self, port: int, credentials: grpc.ChannelCredentials | None = None, **options: int) -> None:
        own = tuple({"grpc.use_local_subchannel_pool": 1, "grpc.enable_retries": 0, **options}.items())
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=own)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=own)

    def call(self, method: str, body: bytes, metadata: Metadata = (), timeout: float | None = PATIENCE) -> Any:
        return self.channel.unary_unary(method)(body, metadata=tuple(metadata), timeout=timeout)

    def stream(self, method: str, metadata: Metadata = ()) -> Any:
        """Start a bidirectional call. Its messages are bytes."""
        return self.channel.stream_stream(method)(metadata=tuple(metadata), timeout=PATIENCE)

    async def ask(self, method: str, body: bytes, metadata: Metadata = ()) -> bytes:
        return bytes(await self.call(method, body, metadata))

    async def fail(self, method: str, body: bytes, metadata: Metadata = (), timeout: float | None = PATIENCE) -> Failed:
        return await failed(self.call(method, body, metadata, timeout))


async def failed(call: Any) -> Failed:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call
    error = found.value
    return Failed(
        error.code(), error.details() or "", {key: str(value) for key, value in error.trailing_metadata() or ()}
    )


def predict(text: str | bytes, model: str = "") -> bytes:
    data = text.encode() if isinstance(text, str) else text
    kind = protos.message("headway.v1.PredictRequest")
    return bytes(kind(model_id=model, input_data=data).SerializeToString())


def predicted(body: bytes) -> Any:
    return protos.message("headway.v1.PredictResponse").FromString(body)


@dataclass
class Port:
    """What a test works with. `stand` belongs to the whole service behind the port."""

    listener: GrpcListener
    gateway: EchoGateway
    counters: Counters
    settings: Settings
    stand: Any
    clients: list[Client] = field(default_factory=list)

    def client(self, credentials: grpc.ChannelCredentials | None = None, **options: int) -> Client:
        """Return a client with its own connection, using TLS if it has credentials. It is closed after the test."""
        client = Client(self.listener.port, credentials, **options)
        self.clients.append(client)
        return client


@dataclass
class Attended:
    """A registry whose worker always has a fresh heartbeat, even after a busy machine has stalled."""

    broker: MemoryBroker
    worker: WorkerInfo

    async def workers(self) -> Sequence[WorkerInfo]:
        await self.broker.heartbeat(self.worker)
        return await self.broker.workers()


def served(
    main: Callable[[Port], Coroutine[Any, Any, None]],
    keys: Keys | None = None,
    whole: bool = False,
    now: Callable[[], float] = monotonic,
    certificates: Certificates | None = None,
    **settings: Any,
) -> None:
    """Run `main` against an open port. `whole` puts the real gateway and a worker behind it. `now` is the clock."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        patch.setattr("headway.grpc.listener.monotonic", now)
        runner.run(_serve(main, keys, whole, now, certificates, settings))


def on_port(*given: Any, **settings: Any) -> Callable[[Scene], Callable[..., None]]:
    """Turn a coroutine function into a test. Takes the arguments of `served`."""
    return scene(lambda main: served(main, *given, **settings))


def _of_a_former_loop(context: Mapping[str, Any]) -> bool:
    """Whether an error is from a call that outlived an earlier test's loop. All loops share grpc.aio's completion queue."""
    return (
        "PollerCompletionQueue._handle_events" in context["message"]
        and str(context.get("exception")) == "Event loop is closed"
    )


async def _serve(
    main: Callable[[Port], Coroutine[Any, Any, None]],
    keys: Keys | None,
    whole: bool,
    now: Callable[[], float],
    certificates: Certificates | None,
    changes: Mapping[str, Any],
) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: None if _of_a_former_loop(context) else unseen.append(context)
    )
    longest = changes.get("request_timeout_ms", PATIENCE * 1000)
    patient = {"request_timeout_ms": longest, "queue_timeout_ms": longest / 2}  # Queue timeouts are normally shorter.
    settings = Settings(**{"keys": "keys.toml" if keys else "", **patient, **changes})
    counters = Counters()
    limits = QueueLimits(tiers=3, max_batch=32, reserved_share=0.1, max_queue=100)
    broker = MemoryBroker({settings.model: limits}, DeadLetterBox(), counters.broker, now, lambda: 0.5, KEPT_LIMITS)
    gate = None
    if settings.input_policy:
        policy = PolicyResource(settings, [settings.model], counters.input_policy, counters.worker.restarts)
        gate = policy.gate
    recorded, traces = recording(settings, counters)
    real = Gateway(settings, [settings.model], broker, counters.gateway, now, gate=gate, traces=traces)
    attended = Attended(broker, worker("", model=settings.model))
    await broker.heartbeat(attended.worker)
    gateway = EchoGateway(broker, settings, counters.gateway)
    identity = Bearers(keys, settings) if keys else AnonymousIdentity(settings.default_tier_index)
    numbers = itertools.count()
    begun = now()
    real.limiter._clock = lambda: begun  # The limits must not refill while a busy machine stalls.
    stand = Stand(None, gateway, counters, settings, real, broker, [], asyncio.Event(), recorded)  # type: ignore[arg-type]
    refused = RefusalTraces(recorded.recorder, counters.spans_dropped) if traces else None
    entrance = Entrance(real if whole else cast(Any, gateway), identity, lambda: ID.format(next(numbers)), refused)
    ready = Readiness(cast(Any, attended), lambda: stand.leaving, slots={"gpu-0"})
    listener = GrpcListener(entrance, ready, certificates, port=0)
    port = Port(listener, gateway, counters, settings, stand)
    stand.go.set()
    supervisor = Supervisor()
    if whole:
        real.start(supervisor)
        supervisor.start("worker", lambda: _work(stand))
    await listener.open()
    try:
        async with asyncio.timeout(PATIENCE):
            await main(port)
    finally:
        for client in port.clients:
            await client.channel.close()
        await listener.close()
        await supervisor.stop()
    assert unseen == [], unseen
