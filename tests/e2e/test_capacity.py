"""Limits that follow what is there: the lowest tier floods, and is held to what the workers carry."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import Answer, wait_until
from tests.e2e.fleet import PATIENT
from tests.e2e.server import ROOT, serving

GPU = f"{ROOT / 'examples' / 'emulated_gpu.py'}:EmulatedGPU"


def test_a_flood_of_the_lowest_tier_is_held_and_the_others_pass(tmp_path: Path) -> None:
    flags = ("--max-batch-size", "1", "--target-utilisation", "0.1", *PATIENT)
    with serving(tmp_path, *flags, target=GPU, environ={"EMULATED_MS": "50"}) as server:
        server.ask("measured").output()
        wait_until(lambda: server.metrics().value("throttle_per_second"))
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
