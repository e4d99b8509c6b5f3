"""Bulk jobs whose processes are killed or whose disk is full: each line is answered once, and so are clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.fleet import FORGETFUL, PATIENT, fleet
from tests.e2e.server import Server, launched, serving
from tests.servers.postgres import SharedPostgres
from tests.servers.redis import RedisServer, lacking
from tests.servers.s3 import S3Server

LINES = 450
TARGET = "tests.targets.journal:Slow"
BRIEF = {
    "headway.bulk.feeder.LEASE": 5.0,
    "headway.bulk.job_run.LEASE": 5.0,
    "headway.bulk.job_run.RENEW": 1.5,
    "headway.bulk.job_run.PAUSE": 1.0,
    "headway.bulk.job_run.TICK": 0.25,
}
"""Times for gateways that hold jobs, at most a third of the real ones, to make takeovers and pauses happen sooner."""


def submit(server: Server, texts: list[str], to: Server | None = None, model: str = "default", **members: Any) -> str:
    """Upload lines and start a job with them, there or on another gateway. Returns its id."""
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
    file = server.post("/v1/files", form.encode(), "Content-Type: multipart/form-data; boundary=b").json["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((to or server).post("/v1/batches", asked).json["id"])


def job(server: Server, id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/v1/batches/{id}").json
    return found


def feeder(gateways: list[Server]) -> Server:
    return next(one for one in gateways if one.metrics().by("bulk_jobs", "status"))


def done(server: Server, id: str) -> int:
    """Return the number of answered lines."""
    return int(job(server, id)["request_counts"]["completed"])


def answers(server: Server, id: str) -> Counter[str]:
    """Count how often each line is in the output."""
    content = server.get(f"/v1/files/{job(server, id)['output_file_id']}/content").body
    return Counter(json.loads(line)["custom_id"] for line in content.splitlines())


def meanwhile(server: Server, condition: Callable[[], object]) -> None:
    """Send requests until a condition holds. Bulk lines ride in their batches."""
    wait_until(lambda: server.ask("beside").output() and condition())


def test_each_line_is_answered_once_whoever_is_killed(tmp_path: Path, postgres: SharedPostgres) -> None:
    flags = (*PATIENT, "--bulk-dir", str(tmp_path / "jobs"), "--ledger", postgres.server().fresh())
    with (
        RedisServer("valkey", tmp_path / "redis") as redis,
        fleet(
            tmp_path, redis, gateways=2, workers=2, gateway_flags=flags, worker_flags=(*FORGETFUL, "--max-batch-size", "10"),
            target=TARGET, lawful=False, constants=BRIEF,
        ) as it,
    ):  # fmt: skip
        first, second = it.gateways
        id = submit(first, [f"line {number}" for number in range(LINES)], to=second)
        wait_until(lambda: done(first, id) > LINES / 10)
        it.kill(it.workers[0])
        wait_until(lambda: done(first, id) > LINES / 5)
        it.kill(feeder(it.gateways))
        [other] = it.gateways
        before = done(other, id)
        it.start("worker")  # Only now: on a busy machine, the other worker would finish the job before a new one is up.
        meanwhile(other, lambda: job(other, id)["status"] == "completed")
        assert before < LINES
        it.start("gateway")
        for gateway in it.gateways:
            assert answers(gateway, id) == Counter(map(str, range(LINES)))


def test_a_job_with_its_files_in_a_bucket_goes_on_when_its_feeder_was_killed_and_leaves_nothing_else_there(
    tmp_path: Path,
) -> None:
    with S3Server(tmp_path) as bucket:
        flags = "--bulk-dir", "s3://jobs/headway", "--ledger", "sqlite:///ledger.db", "--max-batch-size", "20"
        with launched(tmp_path, *flags, target=TARGET, environ=bucket.environ) as first:
            first.ready()
            id = submit(first, [f"line {number}" for number in range(LINES)])
            wait_until(lambda: done(first, id) > LINES / 10)
            first.kill()
        with serving(tmp_path, *flags, target=TARGET, environ=bucket.environ, lawful=False) as second:
            before = done(second, id)
            assert f"headway/jobs/{id}/out.1.0.part" in bucket.names()
            wait_until(lambda: job(second, id)["status"] == "completed")
            assert 0 < before < LINES
            assert answers(second, id) == Counter(map(str, range(LINES)))
            wait_until(lambda: len(re.findall("<Key>", bucket.names())) == 3)


PAUSES = {"a bulk job pauses", "the ledger is out of reach", "bulk jobs is out of reach", "bulk files is out of reach"}
"""Log events of a process that feeds a paused job."""


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        lacking(f"no disk may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """Fill up a disk. Returns the file to remove."""
    path = disk / "others"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.statvfs(disk).f_bsize))
    return path


def paused(server: Server, id: str) -> str:
    """Return why a job is paused, or an empty string."""
    faults = (job(server, id)["errors"] or {"data": []})["data"]
    return "".join(one["message"] for one in faults if one["code"] == "paused")


def test_a_job_waits_for_room_on_a_full_disk_and_requests_notice_nothing(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        serving(tmp_path, "--bulk-dir", str(disk), "--max-batch-size", "20", target=TARGET, constants=BRIEF) as server,
    ):
        server.expected |= PAUSES
        id = submit(server, [f"line {number}" for number in range(LINES)])
        wait_until(lambda: done(server, id) > LINES / 10)
        others = fill(disk)
        meanwhile(server, lambda: paused(server, id))
        assert paused(server, id) == "the disk of the bulk folder is full"
        assert server.metrics().value("bulk_paused") == 1
        assert done(server, id) < LINES
        others.unlink()
        meanwhile(server, lambda: job(server, id)["status"] == "completed")
        assert answers(server, id) == Counter(map(str, range(LINES)))
        assert not paused(server, id)
