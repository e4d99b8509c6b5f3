"""Every metric moves when that happens which it counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import TIERS, Metrics, Server, serving
from tests.targets.gates import BROKEN

PROMISED = {
    *("requests_total", "request_seconds_count", "queue_seconds_count", "queue_depth", "queue_oldest_seconds"),
    *("batch_size_count", "batches_total", "batch_fill_ratio_count", "gpu_batch_seconds_count", "gpu_utilization"),
    *("workers", "worker_restarts_total", "refusals_total", "retries_total", "dlq_depth", "wasted_gpu_seconds_total"),
    *("batching_overhead_seconds_count", "breaker_state"),
}


class Movement:
    """Two scrapes, and what lies between them."""

    def __init__(self, before: Metrics) -> None:
        self.before = before
        self.after = before

    def of(self, name: str, **labels: str) -> float:
        """Growth of the samples."""
        return self.after.value(name, **labels) - self.before.value(name, **labels)


@contextmanager
def watched(server: Server) -> Iterator[Movement]:
    movement = Movement(server.metrics())
    yield movement
    movement.after = server.metrics()


def test_every_metric_moves(tmp_path: Path) -> None:
    with serving(tmp_path, *TIERS, "--model", "m") as server:
        server.expected = {"batch failed", "worker process ended", "probe failed", "worker does not start",
                           "the target raised while it started"}  # fmt: skip
        with watched(server) as moved:
            server.ask("one", on=server.connect()).output()
        for name in ("request_seconds_count", "queue_seconds_count"):
            assert moved.of(name, model="m", tier="paid") == 1
        for name in ("batch_size_count", "batch_fill_ratio_count", "batches_total"):
            assert moved.of(name, model="m") == 1
        assert moved.of("requests_total", model="m", tier="paid", outcome="ok") == 1
        assert moved.of("gpu_batch_seconds_count", model="m", worker="cpu-0") == 1
        assert moved.of("batching_overhead_seconds_count") == 1
        assert moved.of("batching_overhead_seconds_sum") < moved.of("request_seconds_sum")
        wait_until(lambda: server.metrics().by("workers", "status") == {"healthy": 1})

        with watched(server) as moved:
            with server.held_back():
                asked = [server.ask(f"queued {number}", "X-Request-Tier: free") for number in range(32)]
                server.queued(32)
                waiting = server.metrics()
                assert waiting.by("queue_depth", "tier") == {"free": 32}
                wait_until(lambda: server.metrics().value("queue_oldest_seconds", tier="free") > 0.05)
                wait_until(lambda: server.metrics().value("gpu_utilization", worker="cpu-0") > 0)
            for one in asked:
                one.output()
        assert moved.of("batches_total", reason="full") == 1
        assert moved.of("batch_fill_ratio_sum") == 1 + 1 / 32
        assert moved.of("batch_size_sum") == 33
        assert moved.of("queue_seconds_sum", tier="free") > 0.05 * 32
        assert server.metrics().value("queue_depth") == server.metrics().value("queue_oldest_seconds") == 0

        refusals_move(server)
        departures_move(server, tmp_path)
        failures_move(server)
        names = {sample.name.removeprefix("headway_") for sample in server.metrics().samples}
        assert names >= PROMISED


def refusals_move(server: Server) -> None:
    """At the door, and beyond it."""
    with watched(server) as moved:
        line = server.connect()
        line.send(b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\nContent-Length: 2\r\n\r\n[]")
        assert line.answer().error == "BAD_REQUEST"
        line.send(b"POST /v1/inference HTTP/1.1\r\nHost: e2e\r\nContent-Length: 99999999\r\n\r\n")
        assert line.answer().error == "PAYLOAD_TOO_LARGE"
        unknown = server.ask("x", model="unknown")
        assert unknown.refusal() == "NOT_FOUND"
    assert moved.of("refusals_total", reason="bad_request") == 1
    assert moved.of("refusals_total", reason="payload_too_large") == 1
    assert moved.of("requests_total", outcome="not_found") == 1
    assert moved.of("batches_total") == 0


def departures_move(server: Server, folder: Path) -> None:
    """Requests whose clients leave, and requests that may not wait so long as the queue is."""
    with watched(server) as moved:
        gate = Gate(folder)
        leaving = server.ask(gate.text())
        gate.reached()
        queued = [server.ask(f"queued {number}") for number in range(4)]
        server.queued(4)
        hurried = server.ask("hurried", "X-Request-Timeout-Ms: 1")
        assert hurried.answer().status in (429, 503, 504)
        leaving.leave()
        queued.pop().leave()
        wait_until(lambda: server.metrics().value("requests_total", outcome="cancelled") == 2)
        gate.open()
        for one in queued:
            one.output()
    assert moved.of("requests_total", outcome="cancelled") == 2
    assert moved.of("wasted_gpu_seconds_total", cause="departed") > 0


def failures_move(server: Server) -> None:
    """Retries, dead letters, a replaced worker, and at last the breaker."""
    with watched(server) as moved:
        assert server.ask("raise").refusal() == "REJECTED_BY_MODEL"
        assert server.ask("exit").refusal() == "REJECTED_BY_MODEL"
        server.all_healthy()
    assert moved.of("retries_total", cause="raised") == 1
    assert moved.of("retries_total", cause="crashed") == 2
    assert moved.of("batches_total", reason="retry") == 3
    assert moved.of("dlq_depth") == 2
    assert moved.of("worker_restarts_total", worker="cpu-0") == 3
    assert moved.of("wasted_gpu_seconds_total", cause="raised") > 0
    assert moved.of("wasted_gpu_seconds_total", cause="crashed") > 0
    assert moved.after.value("breaker_state") == 0

    broken = server.folder / BROKEN
    broken.touch()

    numbers = itertools.count()

    def opened() -> bool:  # By other inputs each time: one that has failed for good is known, and not run again.
        server.ask(f"in vain {next(numbers)}", "X-Request-Timeout-Ms: 300").answer()
        return server.metrics().value("breaker_state", backend="cpu-0") > 0

    wait_until(opened)
    broken.unlink()
    wait_until(lambda: server.get("/readyz").status == 200)
    server.ask("well").output()
    wait_until(lambda: server.metrics().value("breaker_state") == 0)
