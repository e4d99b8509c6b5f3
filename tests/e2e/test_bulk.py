"""Bulk jobs over a fleet whose processes are killed: each line is answered once, and what clients ask meanwhile, too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import Server
from tests.servers.postgres import SharedPostgres
from tests.servers.redis import RedisServer

LINES = 600
TARGET = "tests.targets.journal:Slow"
BRIEF = {
    "headway.bulk.feeder.LEASE": 5.0,
    "headway.bulk.job_run.LEASE": 5.0,
    "headway.bulk.job_run.RENEW": 1.5,
    "headway.bulk.job_run.PAUSE": 1.0,
    "headway.bulk.job_run.TICK": 0.25,
}
"""Times of gateways that hold jobs, a third of those in the source or less: a job is taken over, pauses and is told of as much sooner."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer("valkey", tmp_path / "redis") as server:
        yield server


def submit(server: Server, texts: list[str], to: Server | None = None, model: str = "default", **members: Any) -> str:
    """Upload lines, and begin a job of them, there or at another gateway. Returns its id."""
    lines = [
        {
            "custom_id": str(at),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": text, **members},
        }
        for at, text in enumerate(texts)
    ]
    content = "\n".join(map(json.dumps, lines))
    head = "Content-Disposition: form-data; name="
    form = f'--b\r\n{head}"purpose"\r\n\r\nbatch\r\n--b\r\n{head}"file"; filename="l"\r\n\r\n{content}\r\n--b--\r\n'
    file = json.loads(call(server, "/v1/files", form, "multipart/form-data; boundary=b"))["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(json.loads(call(to or server, "/v1/batches", json.dumps(asked)))["id"])


def call(server: Server, path: str, body: str | None = None, kind: str = "application/json") -> str:
    data = None if body is None else body.encode()
    sent = Request(f"http://127.0.0.1:{server.port}{path}", data, {"Content-Type": kind})
    with urlopen(sent, timeout=30.0) as answer:
        return str(answer.read().decode())


def job(server: Server, id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(server, f"/v1/batches/{id}"))
    return found


def feeder(gateways: list[Server]) -> Server:
    """The gateway that feeds the jobs."""
    return next(one for one in gateways if one.metrics().by("bulk_jobs", "status"))


def done(server: Server, id: str) -> int:
    """Lines that have an answer."""
    return int(job(server, id)["request_counts"]["completed"])


def answers(server: Server, id: str) -> Counter[str]:
    """How often each line is in the output."""
    content = call(server, f"/v1/files/{job(server, id)['output_file_id']}/content")
    return Counter(json.loads(line)["custom_id"] for line in content.splitlines())


def meanwhile(server: Server, condition: Callable[[], object]) -> None:
    """Ask, and be answered, until a condition holds. Lines ride with what is asked."""
    wait_until(lambda: server.ask("beside").output() and condition())


def test_each_line_is_answered_once_whoever_is_killed(
    tmp_path: Path, redis: RedisServer, postgres: SharedPostgres
) -> None:
    flags = (*PATIENT, "--bulk-dir", str(tmp_path / "jobs"), "--ledger", postgres.server().fresh())
    with fleet(
        tmp_path, redis, gateways=2, workers=2, gateway_flags=flags, worker_flags=(*FORGETFUL, "--max-batch-size", "10"),
        target=TARGET, lawful=False, constants=BRIEF,
    ) as it:  # fmt: skip
        first, second = it.gateways
        id = submit(first, [f"line {number}" for number in range(LINES)], to=second)
        wait_until(lambda: done(first, id) > LINES / 10)
        it.kill(it.workers[0])
        wait_until(lambda: done(first, id) > LINES / 5)
        it.kill(feeder(it.gateways))
        [other] = it.gateways
        before = done(other, id)
        it.start("worker")  # Only now: on a busy machine the other one ends the job before a new one is up.
        meanwhile(other, lambda: job(other, id)["status"] == "completed")
        assert before < LINES
        it.start("gateway")
        for gateway in it.gateways:
            assert answers(gateway, id) == Counter(map(str, range(LINES)))
