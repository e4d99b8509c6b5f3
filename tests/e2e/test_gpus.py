"""GPUs that a service watches through NVML, with a stand-in of its library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import Server, run_cli, serving
from tests.nvml import Gpus

GIB = 1 << 30
XIDS = [31, 94, 94]


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


def one(server: Server, worker: str) -> dict[str, Any]:
    return next(found for found in server.workers() if str(found["worker_id"]).endswith(worker))


def test_gpus_are_seen_everywhere_and_a_worker_whose_gpu_is_lost_is_taken_out_and_loses_nothing(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, gpu(0), gpu(1))
    with serving(tmp_path, "--workers", "2", "--max-batch-size", "1", environ=gpus.environ("0,1")) as server:
        server.expected = {
            "GPU memory is scarce",
            "the GPU reports errors",
            "worker is taken out of service",
            "batch failed",
        }
        wait_until(lambda: all(worker["gpu_figures"] for worker in server.workers()))
        scarce_memory_slows_the_intake(server, gpus)
        figures_are_told(server, gpus)
        gate = Gate(tmp_path)
        held = server.ask(gate.text())
        gate.reached()
        runs = wait_until(lambda: [worker for worker in server.workers() if worker["in_flight"]])
        number = int(runs[0]["worker_id"][-1])
        gpus.write(*(gpu(each, xids=[*seen, 79] if each == number else seen) for each, seen in enumerate((XIDS, []))))
        line = server.logged("worker is taken out of service")
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


def scarce_memory_slows_the_intake(server: Server, gpus: Gpus) -> None:
    server.ask("while there is room").output()
    gpus.write(gpu(0, 41), gpu(1, 41))  # What is read next is what the model needs.
    wait_until(lambda: all(one["gpu_figures"]["memory_used_bytes"] == 41 * GIB for one in server.workers()))
    gpus.write(gpu(0, 91), gpu(1, 91))
    reason = "91% of the GPU's memory is in use"
    wait_until(lambda: {(one["status"], one["reason"]) for one in server.workers()} == {("degraded", reason)})
    throttle = "headway_throttle_per_second"
    wait_until(lambda: [one.value for one in server.metrics().samples if one.name == throttle] == [0.0])
    refused = server.ask("of the lowest tier", "X-Request-Tier: free").answer()
    assert (refused.error, refused.header["x-headway-dropped-reason"]) == ("SHED", "capacity")
    server.ask("of a higher tier").output()
    assert (server.get("/readyz").status, server.health()["status"]) == (200, "degraded")
    gpus.write(gpu(0), gpu(1))
    server.all_healthy()


def figures_are_told(server: Server, gpus: Gpus) -> None:
    """What the driver tells of one GPU is in its worker's figures, in the metrics and in `headway status`."""
    gpus.write(gpu(0, 45, xids=XIDS), gpu(1))
    assert server.logged("the GPU reports errors")["xids"] == "31, 94"
    wait_until(lambda: one(server, "gpu-0")["gpu_figures"]["xids"])  # It goes with the worker's next heartbeat.
    told = one(server, "gpu-0")["gpu_figures"]
    assert (told["uuid"], told["memory_used_bytes"], told["xids"]) == ("GPU-0", 45 * GIB, {"31": 1, "94": 2})
    metrics = server.metrics()
    for name, value in (
        ("memory_used_bytes", 45 * GIB), ("memory_total_bytes", 100 * GIB), ("device_utilization", 0.73), ("power_watts", 310.5),
        ("temperature_celsius", 61), ("lost", 0), ("ecc_errors_total", 0),
    ):  # fmt: skip
        samples = [sample.value for sample in metrics.samples if sample.name == f"headway_gpu_{name}"]
        assert value in samples and len(samples) == 2, name
    assert metrics.by("gpu_xid_errors_total", "cause") == {"model": 1, "gpu": 2}
    shown = run_cli(server, server.folder, "status").stdout
    assert "Stand-in 100  45% of 100 GiB  73%       310 W  61 °C        0           31 (1), 94 (2)\n" in shown, shown
