"""Envoy, HAProxy and nginx with the files in deploy/, in front of two gateways: all kinds of clients work, and none
notices when a gateway restarts or an idle connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import ssl
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.promises.callers import PREDICT, Callers, GrpcCallers
from bench.stand.proxies import KINDS, Behind, Certificates
from headway import protos
from tests.clients.environments import client_command
from tests.e2e.client import PATIENCE, request, wait_until
from tests.e2e.fleet import PATIENT, Fleet, fleet, pause, resume
from tests.e2e.server import Server
from tests.servers.balancers import Balancer
from tests.servers.ports import Port
from tests.servers.redis import RedisServer

LAME_DUCK = 5.0
"""Seconds for which a gateway keeps serving, as documented. Balancers notice within 1.5 s (4.5 s on a busy machine)
that it isn't ready, and drop idle connections after 4 s."""
IDLE = 0.5
"""Seconds after which a balancer closes an idle connection, in tests that set it."""
KEEP_ALIVE = 6.0
"""Seconds after which a gateway closes one: more than the 4 s in the balancers' files, so that no request gets lost."""
LINES = 40
"""Connections used concurrently."""


class Stage:
    """Two gateways on fixed ports, and a worker."""

    def __init__(self, it: Fleet, folder: Path) -> None:
        self.fleet = it
        self.folder = folder
        self._held = [(Port(), Port()) for _ in range(2)]
        self.ports = [Behind(*(port.number for port in pair)) for pair in self._held]
        self.certificates = Certificates(folder)
        self._names = iter(range(1000))
        for port in self.ports:
            self.start(port)

    def start(self, port: Behind) -> Server:
        flags = ("--port", str(port.http), "--grpc-port", str(port.grpc))
        server = self.fleet.start("gateway", *flags)
        wait_until(lambda: server.get("/readyz").status == 200)
        return server

    def restart(self, port: Behind) -> None:
        self.fleet.end(next(one for one in self.fleet.gateways if one.port == port.http))
        self.start(port)

    def close(self) -> None:
        for pair in self._held:
            for port in pair:
                port.close()

    def balancer(self, kind: str, **how: Any) -> Balancer:
        folder = self.folder / f"{kind}-{next(self._names)}"
        return Balancer(kind, folder, self.ports, self.certificates, **how)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    tmp_path = tmp_path_factory.mktemp("stage")
    flags = (*PATIENT, "--lame-duck-ms", f"{LAME_DUCK * 1000:g}", "--keep-alive-ms", f"{KEEP_ALIVE * 1000:g}")
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(tmp_path, redis, gateways=0, workers=1, gateway_flags=flags, lawful=False) as it,
    ):
        stage = Stage(it, tmp_path)
        yield stage
        stage.close()


@contextlib.contextmanager
def connection(balancer: Balancer, *, known: bool = False) -> Iterator[http.client.HTTPSConnection]:
    trust = balancer.certificates.context("http/1.1", known=known)
    made = http.client.HTTPSConnection("127.0.0.1", balancer.port, context=trust, timeout=PATIENCE)
    try:
        yield made
    finally:
        made.close()


def post(asked: http.client.HTTPSConnection, path: str, body: Any, **fields: str) -> tuple[int, Any, bytes]:
    header = {name.replace("_", "-"): value for name, value in fields.items()}
    asked.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), header)
    answer = asked.getresponse()
    return answer.status, answer.headers, answer.read()


def check_http_1_1(balancer: Balancer) -> None:
    with connection(balancer) as asked:
        chosen = str(uuid.uuid4())
        status, header, body = post(asked, "/v1/inference", {"input": "hello"}, X_Request_Id=chosen)
        assert (status, json.loads(body)["output"]) == (200, "HELLO"), body
        assert header["x-request-id"] == f"req_{chosen}"
        line = asked.sock
        status, header, body = post(asked, "/v1/inference", {"input": "again"})
        assert (status, json.loads(body)["output"]) == (200, "AGAIN")
        assert asked.sock is line
        uuid.UUID(header["x-request-id"].removeprefix("req_"))
        # The largest body that a gateway accepts.
        most = b"x" * (1_048_576 - 60)
        status, _, body = post(asked, "/v1/predict?model_id=default", most, Content_Type="application/octet-stream")
        assert status == 200, body[:200]
        stream = {"model": "default", "prompt": "one by one", "stream": True}
        status, header, body = post(asked, "/v1/completions", stream)
        assert (status, header["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert b"ONE BY ONE" in body
        assert body.endswith(b"data: [DONE]\n\n")
        _, header, _ = post(asked, "/v1/inference", {"input": "later"}, Prefer="respond-async")
        asked.request("GET", f"{header['location']}?wait=10")
        assert json.loads(asked.getresponse().read())["output"] == "LATER"
    with connection(balancer) as asked:
        asked.putrequest("POST", "/v1/inference")
        asked.putheader("content-length", str(1_048_577))
        asked.endheaders(
            b"x" * (1_048_577 if balancer.kind == "envoy" else 1)
        )  # Envoy counts the bytes received, not the declared length.
        assert asked.getresponse().status == 413
    with connection(balancer) as asked:  # A slow client.
        body = json.dumps({"input": "slowly"}).encode()
        asked.putrequest("POST", "/v1/inference")
        asked.putheader("content-length", str(len(body)))
        asked.endheaders()
        for at in range(len(body)):
            asked.send(body[at : at + 1])
        assert json.loads(asked.getresponse().read())["output"] == "SLOWLY"


def check_http_2(balancer: Balancer) -> None:
    with Http2(balancer, 5.0) as clients:
        pass
    assert set(clients.outcomes) == {"ok"}


def check_grpc(balancer: Balancer) -> None:
    trust = grpc.ssl_channel_credentials(balancer.certificates.trusted.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{balancer.port}", trust) as channel:
        body = protos.message("headway.v1.PredictRequest")(input_data=b"over grpc").SerializeToString()
        answer = channel.unary_unary(PREDICT)(body, timeout=PATIENCE)
        assert protos.message("headway.v1.PredictResponse").FromString(answer).output == b"OVER GRPC"
        tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"tensor"]}}
        infer = protos.message("inference.ModelInferRequest")(model_name="default", id="7", inputs=[tensor])
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = list(stream(iter([infer.SerializeToString()] * 3), timeout=PATIENCE))
        kind = protos.message("inference.ModelStreamInferResponse")
        assert [kind.FromString(one).infer_response.id for one in answers] == ["7"] * 3
        health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE)
        assert protos.message("grpc.health.v1.HealthCheckResponse").FromString(health).status == 1


class Http2:
    """httpx over HTTP/2 in its own environment, while the block runs. `outcomes` counts requests by how they ended."""

    def __init__(self, balancer: Balancer, rate: float) -> None:
        arguments = (balancer.url, str(balancer.certificates.trusted), f"{rate:g}")
        self._command, self._environ = client_command("deploy", "http2_program.py", *arguments)
        self.outcomes: dict[str, int] = {}

    def __enter__(self) -> Http2:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, env=self._environ, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout
        assert self._process.stdout.readline() == "up\n"
        return self

    def __exit__(self, *_: object) -> None:
        out, _none = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0
        self.outcomes = json.loads(out)


def check_who_leaves(balancer: Balancer, it: Fleet) -> None:
    """Check that a client that leaves gives up its place."""

    def counted(name: str, **labels: str) -> float:
        return sum(gateway.metrics().value(name, **labels) for gateway in it.gateways)

    before = counted("requests_total", outcome="cancelled")
    pause(*it.workers)
    try:
        with connection(balancer) as leaving:
            leaving.request("POST", "/v1/inference", '{"input": "nobody waits"}')
            wait_until(lambda: counted("pending_requests") == 1)
        wait_until(lambda: counted("pending_requests") == 0)
    finally:
        resume(*it.workers)
    assert counted("requests_total", outcome="cancelled") == before + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_proxy_serves_http_1_1_http_2_and_grpc_and_asks_for_certificates_where_its_file_says_so(
    kind: str, stage: Stage
) -> None:
    with stage.balancer(kind) as balancer:
        check_http_1_1(balancer)
        check_http_2(balancer)
        check_grpc(balancer)
        check_who_leaves(balancer, stage.fleet)
    with stage.balancer(kind, mutual=True) as balancer, connection(balancer, known=True) as asked:
        assert post(asked, "/v1/inference", {"input": "known"})[0] == 200
        with connection(balancer) as stranger:
            try:
                status = post(stranger, "/v1/inference", {"input": "unknown"})[0]
            except (ssl.SSLError, ConnectionError):
                status = 400
            assert status == 400


def test_a_rolling_restart_of_the_gateways_fails_no_request_behind_any_proxy(stage: Stage) -> None:
    async def rolled(balancers: list[Balancer]) -> dict[str, dict[str, int]]:
        loads: dict[str, Callers | GrpcCallers] = {}
        for balancer in balancers:
            trust = balancer.certificates.context("http/1.1")
            loads[f"{balancer.kind} http/1.1"] = Callers(balancer.url, 20.0, 1, trust)
            authority = balancer.certificates.trusted.read_bytes()
            loads[f"{balancer.kind} grpc"] = GrpcCallers(f"127.0.0.1:{balancer.port}", authority, 10.0, 2)
        running = [asyncio.ensure_future(load.run()) for load in loads.values()]
        for port in stage.ports:
            await asyncio.to_thread(stage.restart, port)
        for load in loads.values():
            load.end_load()
        histories = await asyncio.gather(*running)
        return {name: dict(history.outcomes) for name, history in zip(loads, histories, strict=True)}

    with ExitStack() as stack:
        balancers = [stack.enter_context(stage.balancer(kind)) for kind in KINDS]
        with ExitStack() as clients:
            over_http_2 = {one.kind: clients.enter_context(Http2(one, 10.0)) for one in balancers}
            outcomes = asyncio.run(rolled(balancers))
    outcomes |= {f"{kind} http/2": one.outcomes for kind, one in over_http_2.items()}
    assert {way: found for way, found in outcomes.items() if found.keys() != {"ok"}} == {}


def test_no_connection_ends_under_a_request_that_uses_it_as_it_would_be_given_up(stage: Stage) -> None:
    async def asked_after(balancer: Balancer, waves: Sequence[float]) -> list[bytes]:
        """Send waves of concurrent requests on separate connections, with these pauses in seconds before each. Returns
        the beginnings of the answers."""
        trust = balancer.certificates.context("http/1.1")
        lines = [await asyncio.open_connection("127.0.0.1", balancer.port, ssl=trust) for _ in range(LINES)]
        found = []
        for wave in (0.0, *waves):
            await asyncio.sleep(wave)
            for _, writer in lines:
                writer.write(request(b'{"input": "again"}'))
            found += await asyncio.gather(*(_answer(reader) for reader, _ in lines))
        for _, writer in lines:
            writer.transport.abort()  # Closing TLS would take longer than the loop may last.
        return found

    async def raced(balancers: list[Balancer]) -> list[list[bytes]]:
        rng = random.Random(0)
        waves = [[age * rng.uniform(0.9, 1.1) for age in (IDLE, IDLE, IDLE, KEEP_ALIVE)] for _ in balancers]
        return await asyncio.gather(*map(asked_after, balancers, waves))

    with ExitStack() as stack:
        balancers = [stack.enter_context(stage.balancer(kind, idle=IDLE)) for kind in KINDS]
        for found in asyncio.run(raced(balancers)):
            assert set(found) == {b"HTTP/1.1 200 OK"}


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Read an answer to its end, and return the first line."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"}}")
    return head.partition(b"\r\n")[0]
