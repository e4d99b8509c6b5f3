"""Workers die, hang, leak memory, take large values and reload changed code without clients noticing."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import request, wait_until
from tests.e2e.server import serving

UNHAPPY = {"batch failed", "worker process ended"}
DEATHS = {
    "exit": ("crashed", "exit code 3"),
    "last-words": ("crashed", r"out of\x1b[31m luck"),
    "segfault": ("crashed", "SIGSEGV"),
    "system-exit": ("raised", "SystemExit"),
}


def test_a_death_ends_with_its_last_words_in_the_dead_letter_queue_and_batch_mates_are_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.expected = UNHAPPY
        for word, (cause, words) in DEATHS.items():
            with server.held_back():
                bad, good = server.ask(word), server.ask(f"beside {word}")
            assert bad.refusal() == "REJECTED_BY_MODEL"
            good.output()
            letter = server.letters()[0]
            assert (letter["id"], letter["cause"]) == (f"req_{bad.id}", cause)
            assert letter["attempts"] in ((2, 3) if cause == "raised" else (3, 4))
            assert words in letter["error"], word
        wait_until(lambda: "Fatal Python error: Segmentation fault" in server.log_text())
        metrics = server.metrics()
        assert metrics.value("dlq_depth") == len(DEATHS)
        assert min(metrics.value("retries_total", cause=cause) for cause in ("crashed", "raised")) > 0
        assert min(metrics.value("wasted_gpu_seconds_total", cause=cause) for cause in ("crashed", "raised")) > 0
        assert metrics.value("worker_restarts_total", worker="cpu-0") >= len(DEATHS) - 1
        assert metrics.value("batches_total", reason="retry") > 0


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


def test_large_values_come_back_whole_and_workers_that_leak_are_replaced_without_a_failed_request(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "--workers", "2", "--recycle-rss-mb", "120") as server:
        with server.held_back(workers=2):
            asked = [server.ask(f"{number} {chr(97 + number) * 1_000_000}") for number in range(8)]
        for large in asked:
            large.output()
        lines = [server.connect() for _ in range(8)]
        round_number = 0

        def replaced() -> bool:
            """Keep sending requests, some of which leak 60 MiB, until each worker has been replaced."""
            nonlocal round_number
            round_number += 1
            texts = [f"round {round_number}, {place}" for place in range(8)]
            if round_number % 5 == 0:
                texts[3] = "grow 60"
            for asked in [server.ask(text, on=line) for text, line in zip(texts, lines, strict=True)]:
                asked.output()
            return all(worker["restarts"] for worker in server.workers())

        wait_until(replaced)
        server.logged("worker uses too much memory, replacing it")
        server.answer_to = lambda text: "x" * 8_000_000
        server.ask("big 8000000").output()


def test_reload_swaps_the_code_and_keeps_the_last_good_version(tmp_path: Path) -> None:
    target = tmp_path / "model.py"

    def write(body: str, kind: str = "str", end: str = "") -> None:
        new = tmp_path / "model.new"
        new.write_text(f"def answer(inputs: list[{kind}]) -> list[{kind}]:\n    {body}\n{end}")
        new.replace(target)

    write("return [text.upper() for text in inputs]")
    flags = "--reload", "--workers", "2", "--cache", "--collapse"
    with serving(tmp_path, *flags, target="model.py:answer", lawful=False) as server:
        server.expected = {
            "the changed target does not load; the previous workers keep serving",
            "the target raised while it started",
            "worker process ended",
        }
        line = server.ask("one").connection
        assert server.asked[-1].output() == "ONE"
        server.answer_to = str.title
        write("return [text.title() for text in inputs]")
        server.logged("target reloaded")
        assert server.ask("one", on=line).output() == "One", "what the old code said is not kept"
        assert server.ask("two", on=line).output() == "Two"
        write("return no such thing")
        assert (
            "SyntaxError"
            in server.logged("the changed target does not load; the previous workers keep serving")["error"]
        )
        assert server.ask("three", on=line).output() == "Three"
        raised = server.logged("the target raised while it started")
        assert "return no such thing" in raised["exception"], "the traceback is in the log"
        write("return [None for text in inputs]")
        server.logged("the changed target does not load; the previous workers keep serving", 2)
        assert server.ask("four", on=line).output() == "Four"
        write("return [number + 1.0 for number in inputs]", "float", "answer.example = 1.0\n")
        server.logged("target reloaded", 2)
        line.send(request(b'{"input": 2.5}'))
        assert line.answer().json["output"] == 3.5, "requests are judged by what the new code takes"
        server.all_healthy()
