"""Limits that follow what is there: workers are killed, memory runs out, the lowest tier floods, gateways share a limit."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import Answer, wait_until
from tests.e2e.fleet import PATIENT
from tests.e2e.server import ROOT, Server, serving

GPU = f"{ROOT / 'examples' / 'emulated_gpu.py'}:EmulatedGPU"


def throttle(gateway: Server) -> float:
    return gateway.metrics().value("throttle_per_second")


def test_a_flood_of_the_lowest_tier_is_held_and_the_others_pass(tmp_path: Path) -> None:
    flags = ("--max-batch-size", "1", "--target-utilisation", "0.1", *PATIENT)
    with serving(tmp_path, *flags, target=GPU, environ={"EMULATED_MS": "50"}) as server:
        server.ask("measured").output()
        wait_until(lambda: throttle(server))
        answers: list[Answer] = []

        def flood() -> bool:
            free = [server.ask(f"free {number}", "X-Request-Tier: free") for number in range(40)]
            paid = [server.ask(f"paid {number}") for number in range(10)]
            answers.extend(asked.answer() for asked in free)
            for asked in paid:
                asked.output()
            return {200, 429} <= {answer.status for answer in answers}

        # On a machine that stands still the worker may count for nothing, or the door be open, for a moment.
        wait_until(flood)
        refused = [answer for answer in answers if answer.status != 200]
        for answer in refused:
            assert answer.error == "SHED"
            assert answer.header["x-headway-dropped-reason"] == "capacity"
            assert int(answer.header["retry-after"]) >= 1
        assert server.metrics().value("refusals_total", reason="capacity", tier="free") == len(refused)


def test_a_worker_whose_memory_runs_out_works_on_and_says_so(tmp_path: Path) -> None:
    """The worker's process reads a machine's memory that the test has made up."""
    meminfo = tmp_path / "machine" / "proc" / "meminfo"
    meminfo.parent.mkdir(parents=True)

    def available(share: int) -> None:
        fresh = meminfo.with_suffix(".new")
        fresh.write_text(f"MemTotal: 100 kB\nMemAvailable: {share} kB\n")
        fresh.replace(meminfo)

    available(50)
    (tmp_path / "sitecustomize.py").write_text(
        "from pathlib import Path\n"
        "from headway.backends.process.host_memory import HostMemory\n"
        f"HostMemory.__init__.__defaults__ = (Path({str(meminfo.parent.parent)!r}),)\n"
    )
    with serving(tmp_path, environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) as server:
        server.expected = {"memory is scarce"}
        server.ask("while there is room").output()
        available(7)
        reason = "93% of the memory is in use"
        [worker] = wait_until(lambda: [one for one in server.workers() if one["reason"] == reason])
        assert (worker["status"], worker["memory"]) == ("degraded", 0.93)
        server.ask("while there is none").output()
        wait_until(lambda: server.metrics().value("capacity_items_per_second") == 0.0)
        available(40)
        server.all_healthy()
        wait_until(lambda: server.metrics().value("capacity_items_per_second"))
