"""The port itself: health, reflection, connections that are told to leave, the drain, and descriptors beside others'."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format

from headway import protos
from headway.config import Settings
from headway.errors import SettingError
from headway.grpc import messages
from tests.grpc.stand import PREDICT, Client, Port, on_port, predict, predicted, served

Status = grpc.StatusCode
CHECK, WATCH, LIST = (f"/{messages.HEALTH}/{name}" for name in ("Check", "Watch", "List"))
REFLECT = "ServerReflectionInfo"
KEYS = {"secret": {}, "other": {"tenant": "other", "user": "bob"}}


def about(service: str) -> bytes:
    """Message of a request for the status of a service."""
    return bytes(messages.message("grpc.health.v1.HealthCheckRequest")(service=service).SerializeToString())


def status_in(body: bytes) -> int:
    """Status in the answer to such a request."""
    return int(messages.message("grpc.health.v1.HealthCheckResponse").FromString(body).status)


@on_port(KEYS)
async def test_health_tells_of_the_process_and_of_each_service(port: Port) -> None:
    client = port.client()
    for name in ("", *messages.SERVICES):
        assert status_in(await client.ask(CHECK, about(name))) == 1
    assert (await client.fail(CHECK, about("nobody"))).status is Status.NOT_FOUND
    listed = messages.message("grpc.health.v1.HealthListResponse").FromString(await client.ask(LIST, b""))
    assert {name: entry.status for name, entry in listed.statuses.items()} == dict.fromkeys(("", *messages.SERVICES), 1)


@on_port()
async def test_a_process_that_is_not_ready_does_not_serve(port: Port) -> None:
    port.stand.leaving = True
    assert status_in(await port.client().ask(CHECK, about(""))) == 2


@on_port()
async def test_who_watches_is_told_of_the_end_first(port: Port) -> None:
    watch = port.client().channel.unary_stream(WATCH)
    good, unknown = watch(about("")), watch(about("nobody"))
    assert status_in(await good.read()) == 1
    assert status_in(await unknown.read()) == 3
    reading = asyncio.ensure_future(good.read())  # A read that begins after the end of the call gets only the end.
    await asyncio.sleep(0)
    port.listener.retire()
    assert status_in(await reading) == 2
    assert await good.code() is Status.UNAVAILABLE
    assert await unknown.code() is Status.UNAVAILABLE


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@on_port(KEYS)
async def test_reflection_gives_all_services_and_their_files(port: Port, version: str) -> None:
    ask = messages.message(f"grpc.reflection.{version}.ServerReflectionRequest")
    answer = messages.message(f"grpc.reflection.{version}.ServerReflectionResponse")
    call = port.client().stream(f"/grpc.reflection.{version}.ServerReflection/{REFLECT}")

    async def learn(**question: Any) -> Any:
        await call.write(ask(**question).SerializeToString())
        return answer.FromString(await call.read())

    listed = await learn(list_services="")
    names = [service.name for service in listed.list_services_response.service]
    assert names == list(messages.SERVICES)
    pool = descriptor_pool.DescriptorPool()
    for name in names:
        (file,) = (await learn(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto
        pool.AddSerializedFile(file)
        assert pool.FindServiceByName(name).methods
    for name in ("headway.v1.Inference.Predict", f"{messages.OPEN_INFERENCE}.ModelInfer"):
        assert (await learn(file_containing_symbol=name)).HasField("file_descriptor_response")
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
    assert (refused.error_code, refused.error_message) == (5, f"there is no extension 7 of {message}")
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
    """As tritonclient's generated code does, with fields that ours has not."""
    other = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
    other.message_type.add(name="ModelInferRequest").field.add(name="other", number=99, type=5, label=1)
    other.service.add(name="GRPCInferenceService")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(other.SerializeToString())
    assert [field.name for field in pool.FindMessageTypeByName("inference.ModelInferRequest").fields] == ["other"]
    ours = messages.message("inference.ModelInferRequest")
    assert ours(model_name="m").SerializeToString() == b"\n\x01m"


@on_port()
async def test_a_port_that_is_taken_is_told_by_its_setting(port: Port) -> None:
    second = type(port.listener)(port.listener._entrance, port.listener._readiness, port=port.listener.port)
    with pytest.raises(SettingError, match=r"grpc_port = .* is taken by another program"):
        await second.bind()
    await second.drain()
    await second.close()


async def talking(client: Client, counts: dict[str, int], until: asyncio.Event) -> None:
    """Ask again and again until the port is gone, and count how the calls end."""
    while not until.is_set():
        try:
            await client.ask(PREDICT, predict("a"))
        except grpc.aio.AioRpcError as exc:
            details = exc.details() or ""
            if "failed to connect" in details:
                return
            counts[f"{exc.code().name}: {details}"] = counts.get(f"{exc.code().name}: {details}", 0) + 1
        else:
            counts["ok"] = counts.get("ok", 0) + 1


@on_port()
async def test_a_drain_under_load_cuts_no_call(port: Port) -> None:
    counts: dict[str, int] = {}
    over = asyncio.Event()
    # A call that its client has not begun to send when it learns of the GOAWAY is for the client to send elsewhere.
    clients = [port.client(**{"grpc.enable_retries": 1}) for _ in range(4)]
    asking = [asyncio.ensure_future(talking(client, counts, over)) for client in clients for _ in range(8)]
    await port.gateway.until(lambda: len(port.gateway.asked) > 200)
    await port.listener.drain()
    assert port.gateway.waiting == []
    await asyncio.gather(*asking)
    assert set(counts) == {"ok"}
    assert counts["ok"] == len(port.gateway.asked)


@on_port()
async def test_a_drain_answers_what_is_held_and_ends_streams_that_only_wait(port: Port) -> None:
    port.gateway.hold = True
    client = port.client()
    held = client.call(PREDICT, predict("a"))
    idle = client.stream(f"/{messages.REFLECTION}/{REFLECT}")
    await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
    quiet = port.client()
    assert status_in(await quiet.ask(CHECK, about(""))) == 1
    draining = asyncio.ensure_future(port.listener.drain())
    assert await idle.code() is Status.UNAVAILABLE
    assert not draining.done()
    port.gateway.release()
    assert predicted(await held).output == b"A"
    await draining


def test_a_client_of_an_old_connection_opens_another_one_and_notices_nothing() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        client = port.client()
        port.gateway.hold = True
        held = client.call(PREDICT, predict("held"))
        await port.gateway.until(lambda: len(port.gateway.waiting) == 1)
        connections = port.listener._connections
        assert connections is not None
        (first,) = connections.open
        now[0] += 1.2 * Settings.grpc_max_age_s
        port.listener.look_after()
        while first.leaving is None:  # noqa: ASYNC110 - it is in this loop, and has nobody to tell
            await asyncio.sleep(0)
        later: list[Any] = []
        while len(connections.open) < 2:  # Until the client has read what it was told, it uses the old one.
            call, wanted = client.call(PREDICT, predict("later")), 2 + len(later)
            arrived = asyncio.ensure_future(port.gateway.until(lambda: len(port.gateway.waiting) == wanted))  # noqa: B023
            given_up = asyncio.ensure_future(call.details())
            await asyncio.wait({arrived, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if arrived.done():
                later.append(call)
            else:  # The library gives up a call that it has not sent yet as it reads that it is to leave.
                assert "GOAWAY received" in given_up.result()
                assert len(port.gateway.waiting) == wanted - 1
            arrived.cancel()
            given_up.cancel()
        assert first in connections.open, "the old one is kept for what it still has to answer"
        port.gateway.release()
        assert [predicted(one).output for one in await asyncio.gather(held, *later)] == [
            b"HELD",
            *[b"LATER"] * len(later),
        ]

    served(main, now=lambda: now[0])


@on_port(max_connections=1)
async def test_connections_beyond_the_bound_are_refused_and_harm_no_other(port: Port) -> None:
    first = port.client()
    await first.ask(PREDICT, predict("a"))
    found = await port.client().fail(PREDICT, predict("a"))
    assert found.status is Status.UNAVAILABLE
    assert port.counters.gateway.refusals["connections", "none", ""] >= 1
    assert predicted(await first.ask(PREDICT, predict("b"))).output == b"B"


@on_port(KEYS, max_connections=20)
async def test_a_tenants_connections_are_bounded_for_the_tenant_alone(port: Port) -> None:
    own, other = (("authorization", "Bearer secret"),), (("authorization", "Bearer other"),)
    for _ in range(18):
        await port.client().ask(PREDICT, predict("a"), own)
    found = await port.client().fail(PREDICT, predict("a"), own)
    assert (found.status, found.trailers["x-headway-dropped-reason"]) == (Status.RESOURCE_EXHAUSTED, "connections")
    assert predicted(await port.client().ask(PREDICT, predict("b"), other)).output == b"B"


def test_bytes_that_are_no_http2_end_the_connection_and_nothing_else() -> None:
    async def main(port: Port) -> None:
        for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\0" * 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.listener.port)
            writer.write(raw)
            assert (b"this port speaks gRPC" in await reader.read()) == raw.startswith(b"GET")
            writer.close()
        assert predicted(await port.client().ask(PREDICT, predict("a"))).output == b"A"

    with structlog.testing.capture_logs() as lines:
        served(main)
    told = [(line["event"], line["port"]) for line in lines if "a client speaks" in line["event"]]
    assert told == [
        ("a client speaks HTTP/1.1 to the gRPC port", "grpc"),
        ("a client speaks TLS to a plain port", "grpc"),
    ]


def test_a_client_that_takes_no_answer_is_cut_off() -> None:
    now = [1000.0]

    async def main(port: Port) -> None:
        connections = port.listener._connections
        assert connections is not None
        sock = socket.create_connection(("127.0.0.1", port.listener.port))
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while not connections.open:  # noqa: ASYNC110 - the port is in this loop, and has nobody to tell
            await asyncio.sleep(0)
        (connection,) = connections.open
        connection.pause_writing()
        now[0] += 11.0
        port.listener.look_after()
        await connections.emptied()
        sock.close()

    served(main, now=lambda: now[0])


@pytest.mark.processes
def test_nothing_of_grpc_is_imported_where_the_port_is_off() -> None:
    code = (
        "import sys, headway, headway.app.wiring, headway.app.runner, headway.backends.process.child, headway.cli;"
        "print([name for name in sys.modules if name.split('.')[0] == 'grpc' or name.startswith('google.protobuf')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
