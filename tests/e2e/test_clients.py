"""Clients leave, and deadlines pass: nobody's GPU time is spent on them unless it was too late, and that is counted."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.client import Asked, Gate, wait_until
from tests.e2e.fleet import pause, resume
from tests.e2e.server import Server, serving

UNHAPPY = {"batch failed", "worker process ended"}


def test_a_client_that_leaves_the_queue_never_reaches_a_gpu(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with server.held_back():
            leaving = [server.ask(f"print unwanted {number}") for number in range(4)]
            staying = [server.ask(f"print wanted {number}") for number in range(4)]
            server.queued(8)
            for number, one in enumerate(leaving):
                one.leave(reset=number % 2 == 0)
        for one in staying:
            one.output()
        server.logged("worker output", line="wanted 3", stream="stderr")
        assert "unwanted" not in server.log_text()
        metrics = server.metrics()
        assert metrics.value("batch_size_sum") == 5
        assert metrics.value("requests_total", outcome="cancelled") == 4
        assert metrics.value("wasted_gpu_seconds_total", cause="departed") == 0


def test_a_client_that_leaves_in_flight_frees_the_slot_and_is_counted_as_waste(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        gate = Gate(tmp_path)
        leaving = server.ask(gate.text())
        gate.reached()
        leaving.leave(reset=True)
        wait_until(lambda: server.health()["pending"] == 0)
        gate.open()
        server.ask("next").output()
        metrics = server.metrics()
        assert metrics.value("wasted_gpu_seconds_total", cause="departed") > 0
        assert metrics.value("batches_total") == 2


def test_an_answer_after_the_total_deadline_is_dropped_and_recorded(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        gate = Gate(tmp_path)
        late = server.ask(gate.text(), "X-Request-Timeout-Ms: 2000")
        gate.reached()
        assert late.refusal() == "DEADLINE_EXCEEDED"
        gate.open()
        again = server.ask("on the same connection", on=late.connection)
        assert again.output() == "ON THE SAME CONNECTION"
        assert server.admin(f"/internal/requests/req_{late.id}").json["status"] == "failed"
        assert server.admin(f"/internal/requests/req_{late.id}").json["error"]["error"] == "DEADLINE_EXCEEDED"
        assert server.admin(f"/internal/requests/{again.id}").json["status"] == "completed"
        assert server.metrics().value("wasted_gpu_seconds_total", cause="departed") > 0


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


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(["plain", "exception", "none", "raise"])),
        st.tuples(st.sampled_from(["leave", "reset"]), st.integers(0, 20)),
        st.tuples(st.just("answer"), st.integers(0, 20)),
        st.tuples(st.just("hold"), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


def test_a_storm_of_departures_never_wedges_the_batcher(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--max-batch-size", "8") as server:
        server.expected = UNHAPPY | {"worker output dropped"}

        @settings(max_examples=60)
        @given(STEPS)
        def storm(steps: list[tuple[str, object]]) -> None:
            Storm(server, tmp_path).run(steps)

        storm()
        assert server.metrics().value("wasted_gpu_seconds_total", cause="departed") > 0


class Storm:
    """Requests that come, leave and are answered in an order that hypothesis chooses."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._open: list[Asked] = []

    def run(self, steps: list[tuple[str, object]]) -> None:
        gates: list[Gate] = []
        for step, detail in steps:
            match step, detail:
                case "ask", "plain":
                    self._open.append(self._server.ask(f"plain {len(self._server.asked)}"))
                case "ask", str(text):
                    self._open.append(self._server.ask(text))
                case "hold", _ if not gates:
                    gates.append(Gate(self._folder))
                    self._open.append(self._server.ask(gates[-1].text()))
                    gates[-1].reached()
                case _, int(place) if self._open and not (gates and step == "answer"):
                    one = self._open.pop(place % len(self._open))
                    if step == "answer":
                        one.answer()
                    else:
                        one.leave(reset=step == "reset")
        for gate in gates:
            gate.dissolve()
        for one in self._open:
            one.answer()
        self._server.ask("still alive").output()
