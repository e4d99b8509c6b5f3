"""`headway serve --autoscale local` with real processes: a shortage brings a worker, silence takes it away, nobody fails."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.client import Gate, wait_until
from tests.e2e.server import serving

RULES = json.dumps([
    {"queue_above": 3, "for_s": 0.5, "add": 1},
    {"utilisation_above": 5, "for_s": 3600, "add": 1},
    {"utilisation_below": 0.4, "for_s": 2, "remove": 1},
])  # fmt: skip


def test_a_worker_comes_while_others_wait_and_leaves_when_nobody_does(tmp_path: Path) -> None:
    options = "--autoscale", "local", "--workers", "1", "--max-workers", "2"
    with serving(tmp_path, *options, "--scale-rules", RULES) as server:
        gate = Gate(tmp_path)
        held = server.ask(gate.text())
        gate.reached()
        waiting = [server.ask(f"text {number}") for number in range(8)]
        for number, one in enumerate(waiting):
            assert one.output() == f"TEXT {number}"
        told = server.logged("workers are scaled", direction="up")
        assert (told["before"], told["workers"]) == (1, 2)
        assert "queue above 3 for 0.5 s" in told["reason"]
        gate.open()
        held.output()
        wait_until(lambda: server.admin("/internal/scaling").json["desired"] == 1)
        wait_until(lambda: len([one for one in server.workers() if one["status"] == "healthy"]) == 1)
        assert server.ask("after").output() == "AFTER"
        shown = server.admin("/internal/scaling").json
        assert (shown["driver"], shown["min_workers"], shown["max_workers"], shown["trouble"]) == ("local", 1, 2, "")
        metrics = server.metrics()
        assert metrics.value("desired_workers") == 1
        assert metrics.value("scaling_decisions_total", direction="up") == 1
        assert metrics.value("scaling_decisions_total", direction="down") == 1
