"""Banner of start-up, true of the settings it was started with, and the line while workers load."""

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


def test_without_keys_it_says_which_tier_everybody_has() -> None:
    shown = banner(Settings(default_tier="free"), Role.SERVE, LOCAL, 8000, 9000)
    assert "no keys: everybody is free" in shown
    assert "YOUR_KEY" not in shown


def test_it_says_where_grpc_and_the_open_inference_protocol_are() -> None:
    assert "http://127.0.0.1:8000/v2: Open Inference Protocol" in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)
    assert "/v2" not in banner(Settings(broker="redis://127.0.0.1"), Role.WORKER, LOCAL, 0, 9000)
    assert "grpc     127.0.0.1:8081 " in banner(Settings(grpc_port=8081), Role.SERVE, LOCAL, 8000, 9000)
    assert "grpc" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


def test_it_says_between_how_many_workers_the_autoscaler_chooses_and_by_what() -> None:
    given = Settings(autoscale="local", max_workers=4, scale_policy="plan")
    shown = banner(given, Role.SERVE, LOCAL, 8000, 9000)
    assert "1 worker process at first, 1 to 4 by policy plan (--autoscale local)" in shown
    followed = banner(Settings(autoscale="local", broker="redis://127.0.0.1"), Role.WORKER, LOCAL, 0, 9000)
    assert "the controller's policy (--autoscale local)" in followed
    assert "at first" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


def test_it_says_where_the_ledger_is_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledgers = {
        "sqlite:///tmp/a.db": f"{tmp_path}/tmp/a.db",
        "sqlite:////tmp/a.db": "/tmp/a.db",
        "postgresql://u:canary@db/headway": "postgresql://…@db/headway",
    }
    for url, shown in ledgers.items():
        assert f"  ledger   {shown}\n" in banner(Settings(ledger=url), Role.SERVE, LOCAL, 8000, 9000)
    assert "ledger" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


def test_it_says_where_bulk_jobs_are() -> None:
    given = Settings(bulk_dir="/var/bulk")
    for role in (Role.SERVE, Role.GATEWAY):
        assert "bulk     jobs and their files in /var/bulk\n" in banner(given, role, None, 8000, 9000)
    assert "bulk" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


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
    assert f"  {curl}" in banner(Settings(**given), Role.SERVE, LOCAL, 8000, 9000)


def test_with_keys_it_says_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("keys = []")
    shown = banner(Settings(keys=str(file)), Role.SERVE, LOCAL, 8000, 9000)
    assert f"keys from {file}" in shown
    assert "everybody" not in shown
    assert "-H 'Authorization: Bearer YOUR_KEY'" in shown


@pytest.mark.parametrize("beside", ["", "keys.toml", "ledger"])
def test_tokens_are_credentials_too(beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("issuers.toml", "keys.toml"):
        (tmp_path / name).touch()
    settings = Settings(keys=beside, jwt="issuers.toml", ledger="sqlite:///headway.db" if beside == "ledger" else "")
    shown = banner(settings, Role.SERVE, LOCAL, 8000, 9000)
    whose = f"keys from {beside} and tokens of issuers.toml" if beside else "tokens of issuers.toml"
    assert f"free; {whose}\n" in shown
    assert "everybody" not in shown
    assert f"-H 'Authorization: Bearer {'YOUR_KEY' if beside else 'YOUR_TOKEN'}'" in shown


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("paced", "at most 40 ms for batch-mates"),
        ("window", "at most 40 ms for batch-mates"),
        ("pid", "aiming at 40 ms of waiting"),
    ],
)
def test_the_wait_is_told_as_the_policy_takes_it(policy: str, words: str) -> None:
    assert words in banner(Settings(policy=policy, max_wait_ms=40.0), Role.SERVE, LOCAL, 8000, 9000)
    assert "40 ms" not in banner(Settings(policy=policy), Role.SERVE, LOCAL, 8000, 9000)


def test_the_banner_says_one_process_and_several_processes() -> None:
    assert "capacity" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)
    for pace, told in ((1938.4, "1,900"), (19.4, "19"), (0.3, "1")):
        shown = banner(Settings(), Role.SERVE, LOCAL, 8000, 9000, items_per_second=pace)
        assert f"  capacity about {told} inputs/s, estimated" in shown
    assert "; 1 worker process\n" in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)
    assert "; 2 worker processes\n" in banner(Settings(workers=2), Role.SERVE, LOCAL, 8000, 9000)
    assert "; 1 call in flight\n" in banner(Settings(), Role.SERVE, REMOTE, 8000, 9000)
    assert "; 2 calls in flight\n" in banner(Settings(workers=2), Role.SERVE, REMOTE, 8000, 9000)


def test_the_banner_says_which_gpu_each_worker_has() -> None:
    def devices(*ids: str, **settings: Any) -> str:
        shown = banner(Settings(workers=len(ids), **settings), Role.SERVE, LOCAL, 8000, 9000, Devices(ids, len(ids)))
        return next(line.removeprefix("  devices  ") for line in shown.splitlines() if line.startswith("  devices"))

    assert devices("3", "MIG-4a5b", "cpu") == "gpu-0: GPU 3, gpu-1: MIG-4a5b, cpu-2: CPU"
    assert devices("3", broker=URL, name="host") == "gpu-0: GPU 3"
    assert devices(*map(str, range(20))).endswith("gpu-15: GPU 15 and 4 more")
    assert "devices" not in banner(Settings(), Role.SERVE, REMOTE, 8000, 9000, NO_DEVICES)


@pytest.mark.parametrize("role", [Role.SERVE, Role.WORKER])
def test_nothing_on_the_cpu_is_called_a_gpu(role: Role) -> None:
    shown = banner(Settings(broker=URL, workers=2), role, LOCAL, 8000, 9000, Devices(("cpu",) * 2, 2))
    assert "  devices  CPU\n" in shown
    assert "gpu" not in shown.lower()


def test_with_keys_the_banner_says_how_much_a_user_may_send(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("keys = []")
    shown = banner(Settings(keys=str(file)), Role.SERVE, LOCAL, 8000, 9000)
    assert "  rates    1000 requests/min for each user whose key has no rate of its own (--user-rate)\n" in shown
    assert "no limit for a user" in banner(Settings(keys=str(file), user_rate=0), Role.SERVE, LOCAL, 8000, 9000)
    assert "rates" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


URL = "redis://user:canary@broker:6379/0"


def test_over_a_broker_it_says_where_that_is_and_what_happens_without() -> None:
    shown = banner(Settings(broker=URL, shards=16), Role.SERVE, LOCAL, 8000, 9000)
    assert "  broker   redis://…@broker:6379/0   keys headway:… in 16 shards\n" in shown
    assert "  fallback none: while the broker is away requests get 503\n" in shown
    assert "broker" not in banner(Settings(), Role.SERVE, LOCAL, 8000, 9000)


def test_a_gateway_says_where_it_is_asked() -> None:
    settings = Settings(broker=URL, name="edge", fallback="http://spare/batch")
    shown = banner(settings, Role.GATEWAY, None, 8000, 9000)
    assert shown.startswith("Headway gateway edge takes requests for model 'default'\n")
    assert "  public   http://127.0.0.1:8000   docs http://127.0.0.1:8000/docs\n" in shown
    assert "  admin    http://127.0.0.1:9000/dashboard   health /internal/health" in shown
    assert "  fallback http://spare/batch, 4 batches at once, while the broker is away\n" in shown
    assert "GPU" not in shown
    assert shown.splitlines()[-2] == "Try it:"


@pytest.mark.parametrize(
    ("role", "target", "words"),
    [
        (
            Role.WORKER,
            LOCAL,
            ("Headway worker host runs somewhere:function as model", "policy paced", "a lease lasts 3 s"),
        ),
        (Role.CONTROLLER, None, ("Headway controller host looks after", "the others leave of 100% of the capacity")),
    ],
)
def test_who_takes_no_requests_has_no_public_port(role: Role, target: Target | None, words: tuple[str, ...]) -> None:
    shown = banner(Settings(broker=URL, name="host"), role, target, 0, 9000)
    assert "public" not in shown
    assert "  admin    http://127.0.0.1:9000/dashboard   health /internal/health" in shown
    for part in words:
        assert part in shown
    assert shown.splitlines()[-1] == READY


@pytest.mark.parametrize("role", Role)
def test_no_banner_shows_the_brokers_password(role: Role) -> None:
    target = LOCAL if role in (Role.SERVE, Role.WORKER) else None
    assert "canary" not in banner(Settings(broker=URL), role, target, 8000, 9000)


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
        shown = banner(Settings(), Role.SERVE, LOCAL, 8000, 9000, signature=signature).splitlines()[-1]
        return shown.replace("http://127.0.0.1:8000", "")

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


def shown(stream: io.StringIO, workers: int = 2, seconds: float = 2.2) -> str:
    """Everything written while workers load, and then serve for 2 s."""

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
    lines = shown(Terminal()).split("\r")
    assert lines[0] == "\x1b[2Kloading gpu-0, gpu-1 … 0 s"
    assert lines[3] == "\x1b[2Kloading gpu-0, gpu-1 … 2 s"
    assert lines[4:] == ["\x1b[2K"], "it is taken away at the end"
    assert "loading gpu-0, gpu-1, gpu-2, gpu-3 and 6 more … " in shown(Terminal(), workers=10)


def test_where_no_terminal_is_the_log_tells_it_at_growing_intervals() -> None:
    with capture_logs() as logs:
        assert shown(io.StringIO(), workers=2, seconds=31.0) == ""
    told = [(line["workers"], line["seconds"]) for line in logs if line["event"] == "still loading"]
    assert told == [(2, 2.0), (2, 6.0), (2, 14.0), (2, 30.0)]
