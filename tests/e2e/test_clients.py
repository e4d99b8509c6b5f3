"""Deadlines pass, a service stands still, and values are large: each client has its one right answer."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from tests.e2e.client import Gate, wait_until
from tests.e2e.fleet import pause, resume
from tests.e2e.server import serving

UNHAPPY = {"batch failed", "worker process ended"}


def test_an_input_that_is_never_done_is_turned_down_at_the_gpu_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, "--gpu-timeout-ms", "1000") as server:
        server.expected = UNHAPPY
        hanging = server.ask("sleep")
        answer = hanging.answer()
        assert (answer.status, hanging.outcome) == (422, "REJECTED_BY_MODEL")
        assert answer.message == "the model took longer than the GPU deadline of 1000 ms"
        late = server.logged("batch failed", cause="timeout")
        assert "raise --gpu-timeout-ms (1000)" in late["hint"], "the log says how to mend it"
        assert server.letters()[0]["attempts"] == 3
        server.ask("after").output()


def test_a_service_that_was_stopped_throws_no_answer_away_and_gives_none_too_late(tmp_path: Path) -> None:
    with serving(tmp_path, "--gpu-timeout-ms", "5000") as server:
        gate = Gate(tmp_path)
        running = server.ask(gate.text())
        gate.reached()
        late = server.ask("print overdue", "X-Request-Timeout-Ms: 5000")
        server.queued(1)
        pause(server)
        gate.open()
        resumed = monotonic() + 5.5
        wait_until(lambda: monotonic() > resumed)
        resume(server)
        running.output()
        assert late.refusal() == "DEADLINE_EXCEEDED"
        assert server.metrics().value("retries_total") == 0
        assert "overdue" not in server.log_text()


def test_large_inputs_and_outputs_come_back_whole(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as server:
        with server.held_back(workers=2):
            asked = [server.ask(f"{number} {chr(97 + number) * 1_000_000}") for number in range(16)]
        for one in asked:
            one.output()
        server.answer_to = lambda text: "x" * 8_000_000
        for one in [server.ask("big 8000000") for _ in range(4)]:
            one.output()
