"""GPUs that a service watches through NVML: a stand-in of its library in real processes, in one process and over Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import Server, launched, run_cli, serving
from tests.nvml import Gpus
from tests.servers.redis import RedisServer

GIB = 1 << 30


def gpu(number: int, used: int = 40, **more: Any) -> dict[str, Any]:
    """One GPU, with so many of its 100 GiB in use."""
    told = {
        "uuid": f"GPU-{number}",
        "name": "Stand-in 100",
        "memory": (used * GIB, 100 * GIB),
        "gpu": 73,
        "power": 310_500,
    }
    return {**told, "temperature": 61, "ecc": 0, **more}


@contextmanager
def over_redis(folder: Path, gpus: Gpus) -> Iterator[Server]:
    """A service with one worker."""
    with (
        RedisServer("valkey", folder / "redis") as redis,
        launched(
            folder, "--broker", redis.url, "--name", "here", "--broker-timeout-ms", "20000", environ=gpus.environ("0")
        ) as server,  # Its connections to the broker come and go.
    ):
        server.ready()
        yield server
        server.check_rest()
        server.signal()
        server.check_end()


def one(server: Server, worker: str) -> dict[str, Any]:
    return next(found for found in server.workers() if str(found["worker_id"]).endswith(worker))


def test_a_gpu_is_seen_in_metrics_status_and_snapshot(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, gpu(0))
    with over_redis(tmp_path, gpus) as server:
        wait_until(lambda: one(server, "gpu-0")["gpu_figures"])
        gpus.write(gpu(0, 45, xids=[31, 94, 94]))
        server.expected = {"the GPU reports errors"}
        assert server.logged("the GPU reports errors")["xids"] == "31, 94"
        wait_until(lambda: one(server, "gpu-0")["gpu_figures"]["xids"])  # It goes with the worker's next heartbeat.
        told = one(server, "gpu-0")["gpu_figures"]
        assert told == {
            "uuid": "GPU-0",
            "name": "Stand-in 100",
            "memory_used_bytes": 45 * GIB,
            "memory_total_bytes": 100 * GIB,
            "utilisation": 0.73,
            "power_watts": 310.5,
            "temperature_celsius": 61,
            "ecc_errors": 0,
            "xids": {"31": 1, "94": 2},
            "lost": "",
        }
        metrics = server.metrics()
        for name, value in (
            ("memory_used_bytes", 45 * GIB), ("memory_total_bytes", 100 * GIB), ("device_utilization", 0.73), ("power_watts", 310.5),
            ("temperature_celsius", 61), ("lost", 0), ("ecc_errors_total", 0),
        ):  # fmt: skip
            samples = [sample for sample in metrics.samples if sample.name == f"headway_gpu_{name}"]
            assert [sample.value for sample in samples] == [value], name
        assert metrics.by("gpu_xid_errors_total", "cause") == {"model": 1, "gpu": 2}
        shown = run_cli(server, tmp_path, "status").stdout
        assert "Stand-in 100  45% of 100 GiB  73%       310 W  61 °C        0           31 (1), 94 (2)\n" in shown, (
            shown
        )
        server.ask("served").output()


def test_a_gpu_without_memory_left_slows_the_intake(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, gpu(0))
    with serving(tmp_path, environ=gpus.environ("0")) as server:
        server.ask("while there is room").output()
        gpus.write(gpu(0, 41))  # What is read next is what the model needs.
        wait_until(lambda: (found := one(server, "gpu-0")["gpu_figures"]) and found["memory_used_bytes"] == 41 * GIB)
        gpus.write(gpu(0, 91))
        server.expected = {"GPU memory is scarce"}
        reason = "91% of the GPU's memory is in use"
        wait_until(lambda: one(server, "gpu-0")["reason"] == reason)
        assert one(server, "gpu-0")["status"] == "degraded"
        assert f"gpu-0 is degraded: {reason}" in run_cli(server, tmp_path, "status").stdout
        wait_until(lambda: throttle(server) == [0.0])
        refused = server.ask("of the lowest tier", "X-Request-Tier: free").answer()
        assert (refused.error, refused.header["x-headway-dropped-reason"]) == ("SHED", "capacity")
        server.ask("of a higher tier").output()
        assert (server.get("/readyz").status, server.health()["status"]) == (200, "degraded")
        gpus.write(gpu(0, 60))
        server.all_healthy()
        wait_until(lambda: throttle(server) != [0.0])
        server.ask("of the lowest tier again", "X-Request-Tier: free").output()


def throttle(server: Server) -> list[float]:
    """Requests of the lowest tier that the gateway lets in a second, if it holds any back."""
    return [one.value for one in server.metrics().samples if one.name == "headway_throttle_per_second"]


def test_a_worker_whose_gpu_falls_off_the_bus_is_taken_out_and_loses_nothing(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, gpu(0), gpu(1))
    with serving(tmp_path, "--workers", "2", "--max-batch-size", "1", environ=gpus.environ("0,1")) as server:
        wait_until(lambda: all(worker["gpu_figures"] for worker in server.workers()))
        gate = Gate(tmp_path)
        held = server.ask(gate.text())
        gate.reached()
        runs = wait_until(lambda: [worker for worker in server.workers() if worker["in_flight"]])
        number = int(runs[0]["worker_id"][-1])
        server.expected = {"the GPU reports errors", "worker is taken out", "batch failed"}
        gpus.write(*(gpu(each, xids=[79] if each == number else []) for each in (0, 1)))
        line = server.logged("worker is taken out")
        reason = "its GPU is lost: Xid 79, it has fallen off the bus"
        assert (line["reason"], line["gpu"]) == (reason, f"GPU-{number}")
        worker = wait_until(lambda: found if not (found := one(server, f"gpu-{number}"))["pid"] else None)
        assert (worker["status"], worker["reason"]) == ("degraded", reason)
        gate.reached()  # By the other worker.
        gate.open()
        held.output()
        for asked in [server.ask(f"{each}") for each in range(10)]:
            asked.output()
        assert server.letters() == []
        metrics = server.metrics()
        assert metrics.value("gpu_lost") == metrics.value("workers", status="degraded") == 1
        assert metrics.value("workers", status="healthy") == 1
        assert f"gpu-{number} is degraded: {reason}" in run_cli(server, tmp_path, "status").stdout
