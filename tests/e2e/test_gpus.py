"""A service that watches GPUs with a fake NVML library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import Server, run_cli, serving
from tests.nvml import Gpus

GIB = 1 << 30


def gpu(number: int, **more: Any) -> dict[str, Any]:
    told = {"uuid": f"GPU-{number}", "name": "Stand-in 100", "memory": (40 * GIB, 100 * GIB), "gpu": 73}
    return {**told, "power": 310_500, "temperature": 61, "ecc": 0, **more}


def one(server: Server, worker: str) -> dict[str, Any]:
    return next(found for found in server.workers() if str(found["worker_id"]).endswith(worker))


def test_gpus_are_seen_everywhere_and_a_worker_whose_gpu_is_lost_is_taken_out_and_loses_nothing(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, gpu(0), gpu(1))
    with serving(tmp_path, "--workers", "2", "--max-batch-size", "1", environ=gpus.environ("0,1")) as server:
        server.expected = {"the GPU reports errors", "worker is taken out of service", "batch failed"}
        wait_until(lambda: all(worker["gpu_figures"] for worker in server.workers()))
        gate = Gate(tmp_path)
        held = server.ask(gate.text())
        gate.reached()
        runs = wait_until(lambda: [worker for worker in server.workers() if worker["in_flight"]])
        number = int(runs[0]["worker_id"][-1])
        gpus.write(*(gpu(each, xids=[31, 79] if each == number else []) for each in range(2)))
        line = server.logged("worker is taken out of service")
        reason = "its GPU is lost: Xid 79, it has fallen off the bus"
        assert (line["reason"], line["gpu"]) == (reason, f"GPU-{number}")
        worker = wait_until(lambda: found if not (found := one(server, f"gpu-{number}"))["pid"] else None)
        assert (worker["status"], worker["reason"]) == ("degraded", reason)
        gate.reached()  # From the other worker.
        gate.open()
        held.output()
        for asked in [server.ask(f"{each}") for each in range(10)]:
            asked.output()
        assert server.letters() == []
        metrics = server.metrics()
        assert metrics.value("gpu_lost") == metrics.value("workers", status="degraded") == 1
        assert metrics.value("workers", status="healthy") == 1
        assert f"gpu-{number} is degraded: {reason}" in run_cli(server, tmp_path, "status").stdout
