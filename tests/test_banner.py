"""The start-up banner, which must match the settings, and the progress line while workers load."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from headway.app.banner import READY, banner
from headway.app.devices import NO_DEVICES, Devices
from headway.app.runner import Progress
from headway.config import Settings
from headway.config.target import Target, parse_target
from headway.core.tensors import Tensor, TensorHead, pack
from headway.model import Role, Signature, TensorSpec, Value, ValueKind
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import run

REMOTE = parse_target("http://127.0.0.1:9100/batch")
LOCAL = parse_target("somewhere:function")
URL = "redis://user:canary@broker:6379/0"


def shown(role: Role = Role.SERVE, target: Target | None = LOCAL, **settings: Any) -> str:
    return banner(Settings(**settings), role, target, 8000, 9000)


def test_it_says_what_was_asked_for_and_nothing_of_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual, worker = shown(), shown(Role.WORKER, broker="redis://127.0.0.1")
    for word in ("grpc", "at first", "ledger", "bulk", "capacity", "rates", "broker"):
        assert word not in usual
    assert "http://127.0.0.1:8000/v2: Open Inference Protocol" in usual and "/v2" not in worker
    assert "grpc     127.0.0.1:8081 " in shown(grpc_port=8081)
    keyless = shown(default_tier="free")
    assert "no keys: everybody is free" in keyless and "YOUR_KEY" not in keyless
    scaled = shown(autoscale="local", max_workers=4, scale_policy="plan")
    assert "1 worker process at first, 1 to 4 by policy plan (--autoscale local)" in scaled
    followed = shown(Role.WORKER, autoscale="local", broker="redis://127.0.0.1")
    assert "the controller's policy (--autoscale local)" in followed
    for url, place in (
        ("sqlite:///tmp/a.db", f"{tmp_path}/tmp/a.db"),
        ("sqlite:////tmp/a.db", "/tmp/a.db"),
        ("postgresql://u:canary@db/headway", "postgresql://…@db/headway"),
    ):
        assert f"  ledger   {place}\n" in shown(ledger=url)
    for role in (Role.SERVE, Role.GATEWAY):
        assert "bulk     jobs and their files in /var/bulk\n" in shown(role, None, bulk_dir="/var/bulk")


@pytest.mark.parametrize(
    ("given", "curl"),
    [
        ({}, "curl http://127.0.0.1:8000/v1/inference"),
        ({"host": "0.0.0.0"}, "curl http://127.0.0.1:8000/v1/inference"),
        ({"host": "::"}, "curl http://[::1]:8000/v1/inference"),
        ({"host": "10.0.0.7"}, "curl http://10.0.0.7:8000/v1/inference"),
        ({"tls_cert": "a.pem"}, "curl --cacert AUTHORITY https://127.0.0.1:8000/v1/inference"),
        ({"tls_cert": "a.pem", "host": "0.0.0.0"}, "curl --cacert AUTHORITY https://localhost:8000/v1/inference"),
        (
            {"tls_cert": "a.pem", "tls_client_ca": "b.pem"},
            "curl --cacert AUTHORITY --cert YOUR_CERT --key YOUR_KEY_FILE https://127.0.0.1:8000/v1/inference",
        ),
    ],
)
def test_the_line_to_try_reaches_the_port_from_here(given: dict[str, Any], curl: str) -> None:
    assert f"  {curl}" in shown(**given)


def test_with_keys_it_says_where_they_are_and_how_much_a_user_may_send(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("keys = []")
    keyed = shown(keys=str(file))
    assert f"keys from {file}" in keyed
    assert "everybody" not in keyed
    assert "-H 'Authorization: Bearer YOUR_KEY'" in keyed
    assert "  rates    1000 requests/min for each user whose key has no rate of its own (--user-rate)\n" in keyed
    assert "no limit for users" in shown(keys=str(file), user_rate=0)


@pytest.mark.parametrize("beside", ["", "keys.toml", "ledger"])
def test_tokens_are_credentials_too(beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("issuers.toml", "keys.toml"):
        (tmp_path / name).touch()
    text = shown(keys=beside, jwt="issuers.toml", ledger="sqlite:///headway.db" if beside == "ledger" else "")
    whose = f"keys from {beside} and tokens of issuers.toml" if beside else "tokens of issuers.toml"
    assert f"free; {whose}\n" in text
    assert "everybody" not in text
    assert f"-H 'Authorization: Bearer {'YOUR_KEY' if beside else 'YOUR_TOKEN'}'" in text


def test_it_says_how_long_requests_wait_how_much_is_carried_and_by_how_many() -> None:
    mates, aim = "at most 40 ms for batch-mates", "aiming at 40 ms of waiting"
    for policy, words in (("paced", mates), ("window", mates), ("pid", aim)):
        assert words in shown(policy=policy, max_wait_ms=40.0)
        assert "40 ms" not in shown(policy=policy)
    for pace, told in ((1938.4, "1,900"), (19.4, "19"), (0.3, "1")):
        measured = banner(Settings(), Role.SERVE, LOCAL, 8000, 9000, items_per_second=pace)
        assert f"  capacity about {told} inputs/s, estimated" in measured
    assert "; 1 worker process\n" in shown() and "; 2 worker processes\n" in shown(workers=2)
    assert "; 1 call in flight\n" in shown(target=REMOTE) and "; 2 calls in flight\n" in shown(target=REMOTE, workers=2)


def test_the_banner_says_which_gpu_each_worker_has() -> None:
    def devices(*ids: str, **settings: Any) -> str:
        text = banner(Settings(workers=len(ids), **settings), Role.SERVE, LOCAL, 8000, 9000, Devices(ids, len(ids)))
        return next(line.removeprefix("  devices  ") for line in text.splitlines() if line.startswith("  devices"))

    assert devices("3", "MIG-4a5b", "cpu") == "gpu-0: GPU 3, gpu-1: MIG-4a5b, cpu-2: CPU"
    assert devices("3", broker=URL, name="host") == "gpu-0: GPU 3"
    assert devices(*map(str, range(20))).endswith("gpu-15: GPU 15 and 4 more")
    assert "devices" not in banner(Settings(), Role.SERVE, REMOTE, 8000, 9000, NO_DEVICES)

    for role in (Role.SERVE, Role.WORKER):
        text = banner(Settings(broker=URL, workers=2), role, LOCAL, 8000, 9000, Devices(("cpu",) * 2, 2))
        assert "  devices  CPU\n" in text and "gpu" not in text.lower(), "nothing on the CPU is called a GPU"


def test_over_a_broker_it_says_where_that_is_and_what_happens_without() -> None:
    text = shown(broker=URL, shards=16)
    assert "  broker   redis://…@broker:6379/0   keys headway:… in 16 shards\n" in text
    assert "  fallback none: while the broker is unavailable, requests get 503\n" in text


def test_a_gateway_says_where_it_is_asked() -> None:
    text = shown(Role.GATEWAY, None, broker=URL, name="edge", fallback="http://spare/batch")
    assert text.startswith("Headway gateway edge takes requests for model 'default'\n")
    assert "  public   http://127.0.0.1:8000   docs http://127.0.0.1:8000/docs\n" in text
    assert "  admin    http://127.0.0.1:9000/dashboard   health /internal/health" in text
    assert "  fallback http://spare/batch, 4 batches at a time, while the broker is unavailable\n" in text
    assert "GPU" not in text
    assert text.splitlines()[-2] == "Try it:"


def test_who_takes_no_requests_has_no_public_port() -> None:
    worker = ("Headway worker host runs somewhere:function as model", "policy paced", "a lease lasts 3 s")
    controller = ("Headway controller host looks after", "the others leave of 100% of the capacity")
    for role, words in ((Role.WORKER, worker), (Role.CONTROLLER, controller)):
        text = banner(Settings(broker=URL, name="host"), role, LOCAL if role is Role.WORKER else None, 0, 9000)
        assert "public" not in text
        for part in (*words, "  admin    http://127.0.0.1:9000/dashboard   health /internal/health"):
            assert part in text
        assert text.splitlines()[-1] == READY


@pytest.mark.parametrize("role", Role)
def test_no_banner_shows_the_brokers_password(role: Role) -> None:
    assert "canary" not in shown(role, LOCAL if role in (Role.SERVE, Role.WORKER) else None, broker=URL)


def test_the_line_to_try_sends_what_the_target_takes() -> None:
    def line(signature: Signature) -> str:
        return banner(Settings(), Role.SERVE, LOCAL, 8000, 9000, signature=signature).splitlines()[-1]

    kind = ValueKind
    assert line(Signature()).endswith("""-d '{"input": "hello"}'""")
    assert line(Signature(kind.JSON, kind.JSON, b'{"a":1}')).endswith("""-d '{"input": {"a":1}}'""")
    assert line(Signature(kind.TEXT, kind.TEXT, "it's")).endswith("""-d '{"input": "it'"'"'s"}'""")
    assert line(Signature(kind.BYTES, kind.JSON)).endswith("""-d '{"input": "aGVsbG8="}'""")
    assert line(Signature(kind.JSON, kind.JSON, b"[" + b"1," * 200 + b"1]")).endswith("""-d '{"input": "hello"}'""")


def test_the_line_to_try_sends_arrays_to_a_target_that_takes_them() -> None:
    def line(*inputs: TensorSpec, example: Value | None = None) -> str:
        signature = Signature(ValueKind.TENSORS, ValueKind.TENSORS, example, inputs=inputs)
        text = banner(Settings(), Role.SERVE, LOCAL, 8000, 9000, signature=signature).splitlines()[-1]
        return text.replace("http://127.0.0.1:8000", "")

    four = TensorSpec("x", "FP32", (4,))
    example = pack([Tensor(TensorHead("x", "FP32", (1, 4)), bytes(16))])
    assert line(four, example=example) == """  curl /v1/inference -d '{"input": [[0.0,0.0,0.0,0.0]]}'"""
    image = TensorSpec("x", "UINT8", (64, -1, 3))
    long = pack([Tensor(TensorHead("x", "UINT8", (1, 64, 1, 3)), bytes(192))])
    made = """import json; print(json.dumps({"input": [[[0] * 3]] * 64}))"""
    assert line(image, example=long) == f"  python3 -c '{made}' | curl /v1/inference -d @-"
    made = made.replace("[[[0] * 3]] * 64", """{"x": [[[0] * 3]] * 64, "t": "hello", "b": False}""")
    others = TensorSpec("t", "BYTES"), TensorSpec("b", "BOOL")
    assert line(image, *others) == f"  python3 -c '{made}' | curl /v1/inference -d @-"
    assert line() == "  curl /v2/models/default"


Clock = Callable[[], float]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, workers: int = 2, seconds: float = 2.2) -> str:
    """Return everything printed while workers load, and during 2 s of serving."""

    async def main(clock: Clock) -> None:
        backends = [FakeBackend(0.1) for _ in range(workers)]
        for backend in backends:
            backend.start_seconds = seconds
        stand = Stand(clock, *backends)
        progress = Progress(stand.pool, stream, clock)
        progress.begin()
        async with stand:
            await asyncio.sleep(seconds - 0.2)
            progress.end()
            progress.end()
            await asyncio.sleep(2.0)

    run(main)
    return stream.getvalue()


def test_a_terminal_shows_who_is_loading_and_for_how_long_and_of_many_some() -> None:
    lines = written(Terminal()).split("\r")
    assert lines[0] == "\x1b[2Kloading gpu-0, gpu-1 … 0 s"
    assert lines[3] == "\x1b[2Kloading gpu-0, gpu-1 … 2 s"
    assert lines[4:] == ["\x1b[2K"], "it is taken away at the end"
    assert "loading gpu-0, gpu-1, gpu-2, gpu-3 and 6 more … " in written(Terminal(), workers=10)


def test_where_no_terminal_is_the_log_tells_it_at_growing_intervals() -> None:
    with capture_logs() as logs:
        assert written(io.StringIO(), workers=2, seconds=31.0) == ""
    told = [(line["workers"], line["seconds"]) for line in logs if line["event"] == "still loading"]
    assert told == [(2, 2.0), (2, 6.0), (2, 14.0), (2, 30.0)]
