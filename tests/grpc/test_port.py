"""The port itself: health, reflection, TLS, GOAWAYs, drains and descriptors."""

import asyncio
import socket
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format

from bench.load import http2
from headway import protos
from headway.config import Settings
from headway.errors import SettingError
from headway.grpc import writer
from headway.grpc.connection import LAST, LEAVING, SILENCE, CallConnection
from headway.runtime.certificates import Certificates
from headway.runtime.counters import TlsCounts
from tests.authority import Authority
from tests.grpc.stand import PREDICT, Client, Port, on_port, predict, predicted, served
from tests.grpc.wire import ACK, GOAWAY, PING, Wire, greeted
from tests.scenes import Played

Status = grpc.StatusCode
CHECK, WATCH, LIST = (f"/{protos.HEALTH}/{name}" for name in ("Check", "Watch", "List"))
REFLECT = "ServerReflectionInfo"
KEYS = {"secret": {}, "other": {"tenant": "other", "user": "bob"}}


def about(service: str) -> bytes:
    return bytes(protos.message("grpc.health.v1.HealthCheckRequest")(service=service).SerializeToString())


def status_in(body: bytes) -> int:
    return int(protos.message("grpc.health.v1.HealthCheckResponse").FromString(body).status)


@on_port(KEYS)
async def test_health_tells_of_the_process_and_of_each_service(port: Port) -> None:
    client = port.client()
    for name in ("", *protos.SERVICES):
        assert status_in(await client.ask(CHECK, about(name))) == 1
    assert (await client.fail(CHECK, about("nobody"))).status is Status.NOT_FOUND
    listed = protos.message("grpc.health.v1.HealthListResponse").FromString(await client.ask(LIST, b""))
    assert {name: entry.status for name, entry in listed.statuses.items()} == dict.fromkeys(("", *protos.SERVICES), 1)
    port.stand.leaving = True
    assert status_in(await client.ask(CHECK, about(""))) == 2


async def test_watchers_of_health_are_told_before_the_port_closes(port: Port) -> None:
    watch = port.client().channel.unary_stream(WATCH)
    good, unknown = watch(about("")), watch(about("nobody"))
    assert status_in(await good.read()) == 1
    assert status_in(await unknown.read()) == 3
    reading = asyncio.ensure_future(good.read())  # A read started after the call's end would only get the end.
    await asyncio.sleep(0)
    port.listener.retire()
    assert status_in(await reading) == 2
    assert await good.code() is Status.UNAVAILABLE
    assert await unknown.code() is Status.UNAVAILABLE


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@on_port(KEYS)
async def test_reflection_gives_all_services_and_their_files(port: Port, version: str) -> None:
    ask = protos.message(f"grpc.reflection.{version}.ServerReflectionRequest")
    answer = protos.message(f"grpc.reflection.{version}.ServerReflectionResponse")
    call = port.client().stream(f"/grpc.reflection.{version}.ServerReflection/{REFLECT}")

    async def learn(**question: Any) -> Any:
        await call.write(ask(**question).SerializeToString())
        return answer.FromString(await call.read())

    listed = await learn(list_services="")
    names = [service.name for service in listed.list_services_response.service]
    assert names == list(protos.SERVICES)
    pool = descriptor_pool.DescriptorPool()
    for name in names:
        (file,) = (await learn(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto
        pool.AddSerializedFile(file)
        assert pool.FindServiceByName(name).methods
    assert (await learn(file_containing_symbol="headway.v1.Inference.Predict")).HasField("file_descriptor_response")
    assert (await learn(file_containing_symbol="headway.v1.Inference.Other")).error_response.error_code == 5
    assert (await learn(file_by_filename="headway/v1/inference.proto")).HasField("file_descriptor_response")
    assert (await learn(file_by_filename="nothing.proto")).error_response.error_code == 5
    message = "headway.v1.PredictRequest"
    extensions = (await learn(all_extension_numbers_of_type=message)).all_extension_numbers_response
    assert (extensions.base_type_name, list(extensions.extension_number)) == (message, [])
    for name in ("x", "headway.v1.Inference"):
        refused = (await learn(all_extension_numbers_of_type=name)).error_response
        assert (refused.error_code, refused.error_message) == (5, f"there is no such type: {name}")
    of = {"containing_type": message, "extension_number": 7}
    refused = (await learn(file_containing_extension=of)).error_response
    assert (refused.error_code, refused.error_message) == (5, f"there is no extension number 7 of {message}")
    assert (await learn()).error_response.error_code == 12
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Status.OK


@pytest.mark.processes
def test_the_descriptors_are_those_of_the_files() -> None:
    compiler = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    folder = Path(protos.__file__).parent
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    made = subprocess.run(
        [sys.executable, "-m", compiler.__name__, "-I.", "--descriptor_set_out=/dev/stdout", *files],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    found = json_format.Parse((folder / "descriptors.json").read_text(), descriptor_pb2.FileDescriptorSet())
    assert descriptor_pb2.FileDescriptorSet.FromString(made.stdout) == found, "run make protos"


def test_other_code_may_register_the_same_names() -> None:
    """tritonclient's generated code registers them, with fields that ours lacks."""
    other = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
    other.message_type.add(name="ModelInferRequest").field.add(name="other", number=99, type=5, label=1)
    other.service.add(name="GRPCInferenceService")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(other.SerializeToString())
    assert [field.name for field in pool.FindMessageTypeByName("inference.ModelInferRequest").fields] == ["other"]
    ours = protos.message("inference.ModelInferRequest")
    assert ours(model_name="m").SerializeToString() == b"\n\x01m"


async def test_a_port_in_use_is_reported_with_its_setting(port: Port) -> None:
    second = type(port.listener)(port.listener._entrance, port.listener._readiness, port=port.listener.port)
    with pytest.raises(SettingError, match=r"grpc_port = .* is taken by another program"):
        await second.bind()
    await second.drain()
    await second.close()


async def talking(client: Client, ends: Counter[str]) -> None:
    """Repeat calls until the port is gone, and count how they end."""
    while True:
        try:
            await client.ask(PREDICT, predict("a"))
            ends["ok"] += 1
        except grpc.aio.AioRpcError as exc:
            details = exc.details() or ""
            if "failed to connect" in details:
                return
            ends[f"{exc.code().name}: {details}"] += 1


async def test_a_drain_under_load_cuts_no_call(port: Port) -> None:
    ends = Counter[str]()
    # Clients retry calls that they hadn't sent when the GOAWAY arrived.
    clients = [port.client(**{"grpc.enable_retries": 1}) for _ in range(2)]
    asking = [asyncio.ensure_future(talking(client, ends)) for client in clients for _ in range(8)]
    await port.gateway.until(lambda: len(port.gateway.asked) > 50)
    await port.listener.drain()
    assert port.gateway.waiting == []
    await asyncio.gather(*asking)
    assert ends == {"ok": len(port.gateway.asked)}


async def test_a_drain_answers_what_is_held_and_ends_streams_that_only_wait(port: Port) -> None:
    port.gateway.hold = True
    client = port.client()
    held = client.call(PREDICT, predict("a"))
    idle = client.stream(f"/{protos.REFLECTION}/{REFLECT}")
    await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
    assert status_in(await port.client().ask(CHECK, about(""))) == 1
    draining = asyncio.ensure_future(port.listener.drain())
    assert await idle.code() is Status.UNAVAILABLE
    assert not draining.done()
    port.gateway.release()
    assert predicted(await held).output == b"A"
    await draining


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def aging(now: list[float]) -> Played:
    """A port whose clock is `now[0]`."""
    return Played(partial(served, now=lambda: now[0]))


async def test_an_old_connection_is_told_to_leave_and_answers_what_it_has(aging: Port, now: list[float]) -> None:
    client, _ = await greeted(aging)
    aging.gateway.hold = True
    client.ask(1)
    await aging.gateway.until(lambda: len(aging.gateway.waiting) == 1)
    aging.listener.look_after()
    await client.settled()
    assert client.goaways == []
    now[0] += 1.2 * Settings.grpc_max_age_s
    aging.listener.look_after()
    assert await client.next(GOAWAY) == LAST.to_bytes(4, "big") + bytes(4)
    aging.gateway.release()
    assert (await client.ended(1)).status == "0"
    client.writer.close()


@on_port(max_connections=1)
async def test_connections_beyond_the_bound_are_refused_and_harm_no_other(port: Port) -> None:
    first = port.client()
    await first.ask(PREDICT, predict("a"))
    assert (await port.client().fail(PREDICT, predict("a"))).status is Status.UNAVAILABLE
    assert port.counters.gateway.refusals["connections", "none", ""] >= 1
    assert predicted(await first.ask(PREDICT, predict("b"))).output == b"B"


@on_port(KEYS, max_connections=20)
async def test_a_tenants_connections_are_bounded_for_the_tenant_alone(port: Port) -> None:
    own, other = (("authorization", "Bearer secret"),), (("authorization", "Bearer other"),)
    for _ in range(18):
        await port.client().ask(PREDICT, predict("a"), own)
    refused = await port.client().fail(PREDICT, predict("a"), own)
    assert (refused.status, refused.trailers["x-headway-dropped-reason"]) == (Status.RESOURCE_EXHAUSTED, "connections")
    assert predicted(await port.client().ask(PREDICT, predict("b"), other)).output == b"B"


async def test_bytes_that_are_no_http2_end_the_connection_and_nothing_else(port: Port) -> None:
    with structlog.testing.capture_logs() as lines:
        for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\0" * 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.listener.port)
            writer.write(raw)
            assert (b"this port speaks gRPC" in await reader.read()) == raw.startswith(b"GET")
            writer.close()
    assert predicted(await port.client().ask(PREDICT, predict("a"))).output == b"A"
    told = {line["event"]: line["port"] for line in lines if "a client speaks" in line["event"]}
    events = "a client speaks HTTP/1.1 to the gRPC port", "a client speaks TLS to a plain port"
    assert told == dict.fromkeys(events, "grpc")


async def test_a_client_that_takes_no_answer_is_cut_off(aging: Port, now: list[float]) -> None:
    connections = aging.listener._connections
    assert connections is not None
    sock = socket.create_connection(("127.0.0.1", aging.listener.port))
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    while not connections.open:  # noqa: ASYNC110 - the port runs in this loop and has no event to await
        await asyncio.sleep(0)
    (connection,) = connections.open
    connection.pause_writing()
    now[0] += 11.0
    aging.listener.look_after()
    await connections.emptied()
    sock.close()


@pytest.mark.processes
def test_nothing_of_grpc_is_imported_where_the_port_is_off() -> None:
    code = (
        "import sys, headway, headway.app.wiring, headway.app.runner, headway.backends.process.child, headway.cli;"
        "print([name for name in sys.modules if name.split('.')[0] == 'grpc' or name.startswith('google.protobuf')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def credentials(authority: Authority, *shown: Path) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(*(path.read_bytes() for path in (authority.file, *reversed(shown))))


def test_calls_are_answered_over_tls_where_a_certificate_is_shown_and_those_of_the_port_change(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    certificate, key = authority.issue()
    certificates = Certificates(str(certificate), str(key), str(clients.file), TlsCounts())
    shown = clients.issue("client")

    async def main(port: Port) -> None:
        client = port.client(credentials(authority, *shown))
        assert predicted(await client.ask(PREDICT, predict("abc"))).output == b"ABC"
        authority.issue()
        await certificates.reread()
        for asking in (client, port.client(credentials(authority, *shown))):
            assert predicted(await asking.ask(PREDICT, predict("x" * 300_000))).output == b"X" * 300_000
        for shows in (credentials(authority), None):
            assert (await port.client(shows).fail(PREDICT, predict("abc"))).status is Status.UNAVAILABLE
        assert len(port.gateway.asked) == 3
        reader, writer = await asyncio.open_connection("127.0.0.1", port.listener.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"this port speaks TLS" in await reader.read()
        writer.close()
        for why in ("no_certificate", "plain"):
            assert certificates.counts.failures["grpc", why] >= 1

    served(main, certificates=certificates)


async def test_a_connection_stays_until_its_client_has_read_that_it_is_to_leave(aging: Port, now: list[float]) -> None:
    client, connections = await greeted(aging)
    draining = asyncio.ensure_future(aging.listener.drain())
    assert await client.next(GOAWAY) == LAST.to_bytes(4, "big") + bytes(4)
    assert await client.next(PING) == LEAVING
    for number in (1, 2, 3):
        now[0] += 0.4 * SILENCE
        connections.sweep(now[0], True)
        client.ask(number)
        await client.ended(number)
    client.send(http2.frame(http2.PING, ACK, 0, LEAVING))
    assert await client.next(GOAWAY) == http2.stream_of(3).to_bytes(4, "big") + bytes(4)
    assert len(await client.left()) == 2, "nothing follows its last word"
    await draining
    client.writer.close()


async def test_a_client_that_does_not_say_that_it_leaves_is_let_go_after_a_while(aging: Port, now: list[float]) -> None:
    client, connections = await greeted(aging)
    aging.listener.retire()
    await client.next(PING)
    for _ in range(2):
        connections.sweep(now[0], False)
        now[0] += SILENCE - 1.0
    client.ask(1)
    await client.ended(1)
    connections.sweep(now[0], False)
    connections.sweep(now[0] + SILENCE + 1.0, False)
    assert await client.next(GOAWAY) == http2.stream_of(1).to_bytes(4, "big") + bytes(4)
    assert len(await client.left()) == 2, "nothing follows its last word"
    client.writer.close()


def test_a_closed_connection_whose_client_takes_nothing_is_cut() -> None:
    class Stuck(asyncio.Transport):
        """Never sends what was written."""

        aborted = False

        def close(self) -> None: ...

        def is_closing(self) -> bool:
            return True

        def abort(self) -> None:
            self.aborted = True

    now, transport = [1000.0], Stuck()
    port: Any = SimpleNamespace(clock=lambda: now[0], turns=None, unread_timeout=10.0, grace=20.0)
    connection = CallConnection(port)
    connection._transport = transport
    connection.greeted = connection.answered = True
    connection.leaving = now[0]
    for _ in range(30):
        now[0] += 0.5
        connection.inspect(now[0], False)
    assert transport.aborted


async def pinged(client: Wire, times: int) -> bytes:
    """Ping `times` times, waiting for each answer. Return the reason in the server's GOAWAY, or empty bytes without one."""
    for number in range(times):
        client.send(http2.frame(http2.PING, 0, 0, number.to_bytes(8, "big")))
        kind = flags = -1
        while (kind, flags) != (PING, ACK):
            kind, flags, payload = await client.frame()
            if kind == GOAWAY:
                return payload[8:]
    return b""


async def test_a_client_may_ping_with_and_without_calls_in_bounds(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = await greeted(port)
    assert await pinged(client, 20) == b"too_many_pings"
    client.writer.close()
    assert writer.LEAST_PING < 10.0
    monkeypatch.setattr(writer, "LEAST_PING", 0.0)
    client, _ = await greeted(port)
    assert await pinged(client, 20) == b""
    port.gateway.hold = True
    client.ask(1)
    await port.gateway.until(lambda: bool(port.gateway.waiting))
    assert await pinged(client, 20) == b""
    port.gateway.release()
    await client.ended(1)
    client.writer.close()


async def test_a_call_held_back_by_its_client_goes_elsewhere(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.grpc.connection.STREAMS", 1)
    client = port.client(**{"grpc.enable_retries": 1})
    await client.ask(PREDICT, predict("first"))
    port.gateway.hold = True
    calls = [client.call(PREDICT, predict("held"))]
    await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
    calls.append(client.call(PREDICT, predict("kept")))
    port.listener.retire()
    await port.gateway.until(lambda: len(port.gateway.waiting) == 2)
    port.gateway.release()
    assert [predicted(await call).output for call in calls] == [b"HELD", b"KEPT"]
