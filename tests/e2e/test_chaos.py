"""All faults at once, in an order that a seed decides; `tests.promises` has more of them: every request still comes to its own right end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

from tests.e2e.client import Asked, wait_until
from tests.e2e.server import Server, serving

SEED = 1
UNHAPPY = {"batch failed", "worker process ended", "worker output dropped"}
POISON = {"raise": "REJECTED_BY_MODEL", "segfault": "REJECTED_BY_MODEL", "short": "BACKEND_ERROR"}


def at_rest(server: Server) -> bool:
    """Whether nothing runs or waits, so that nobody is suspected of anything."""
    return server.health()["pending"] == 0 and not any(worker["in_flight"] for worker in server.workers())


def test_whatever_happens_no_innocent_is_failed_and_no_culprit_goes_free(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    happenings = ["ask"] * 400 + ["answer"] * 150 + ["leave"] * 30 + ["kill"] * 3
    rng.shuffle(happenings)
    for word in rng.sample(sorted(POISON), 2):
        happenings.insert(rng.randrange(len(happenings)), word)
    with serving(tmp_path, "--workers", "3") as server:
        # A worker that is killed may be killed again before it has run a batch.
        server.expected = UNHAPPY | {"worker dies again and again without a batch"}
        waiting: list[Asked] = []
        for number, happening in enumerate(happenings):
            match happening:
                case "ask":
                    waiting.append(server.ask(f"innocent {number}"))
                case "answer" if waiting:
                    waiting.pop(rng.randrange(len(waiting))).answer()
                case "leave" if waiting:
                    waiting.pop(rng.randrange(len(waiting))).leave(reset=rng.random() < 0.5)
                case "kill":
                    # Whoever is alone with a worker that is killed, once too often, passes for a culprit.
                    wait_until(lambda: at_rest(server))
                    waiting += [server.ask(f"innocent {number} {mate}") for mate in range(8)]
                    pid = rng.choice(server.workers())["pid"]
                    if pid in server.processes():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                case word if word in POISON:
                    waiting.append(server.ask(word))
        for asked in waiting:
            asked.answer()
        ends = Counter((asked.text.partition(" ")[0], asked.outcome) for asked in server.asked)
        allowed = {("innocent", "ok"), ("innocent", "cancelled"), *((word, "cancelled") for word in POISON)}
        assert set(ends) <= allowed | set(POISON.items()), f"seed {SEED}: {ends}"
        server.all_healthy()
