"""Workers die, leak, print and change; whoever waits does not notice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.app.devices import find_gpus
from tests.e2e.client import Gate, request, wait_until
from tests.e2e.server import serving

UNHAPPY = {"batch failed", "worker process ended"}


def test_a_batch_whose_worker_is_killed_runs_again_elsewhere(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as server:
        server.expected = UNHAPPY
        gate = Gate(tmp_path)
        with server.held_back(workers=2):
            asked = [server.ask(gate.text()), server.ask("mate"), server.ask("another")]
        gate.reached()
        [victim] = wait_until(lambda: [worker for worker in server.workers() if gate.holds(worker["pid"])])
        os.kill(victim["pid"], signal.SIGKILL)
        server.logged("worker process ended", pid=victim["pid"])
        gate.reached()
        gate.open()
        for one in asked:
            one.output()
        server.all_healthy()
        metrics = server.metrics()
        assert metrics.value("retries_total", cause="crashed") == 3
        assert metrics.value("wasted_gpu_seconds_total", cause="crashed") > 0
        assert metrics.by("worker_restarts_total", "worker") == {victim["worker_id"]: 1}
        assert server.letters() == []


def test_every_way_to_die_ends_with_the_last_words_in_the_dead_letter_queue(tmp_path: Path) -> None:
    deaths = {
        "exit": ("crashed", "exit code 3"),
        "last-words": ("crashed", r"out of\x1b[31m luck"),
        "segfault": ("crashed", "SIGSEGV"),
        "close": ("crashed", "pipe"),
        "memory": ("raised", "MemoryError"),
        "system-exit": ("raised", "SystemExit"),
        "interrupt": ("raised", "KeyboardInterrupt"),
        "unprintable": ("raised", "Unprintable"),
    }
    with serving(tmp_path) as server:
        server.expected = UNHAPPY
        for word, (cause, words) in deaths.items():
            with server.held_back():
                bad, good = server.ask(word), server.ask(f"beside {word}")
            assert bad.refusal() == "REJECTED_BY_MODEL"
            good.output()
            letter = server.letters()[0]
            assert (letter["id"], letter["cause"]) == (f"req_{bad.id}", cause)
            assert letter["attempts"] in ((2, 3) if cause == "raised" else (3, 4))
            assert words in letter["error"], word
        wait_until(lambda: "Fatal Python error: Segmentation fault" in server.log_text())


def test_requests_are_held_while_all_workers_are_gone_and_served_when_they_are_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--queue-timeout-ms", "4000") as server:
        server.expected = UNHAPPY
        with server.without_workers():
            assert server.get("/readyz").status == 503
            assert server.get("/livez").status == 200
            assert server.health()["status"] == "unavailable"
            late = server.ask("held too long")
            assert late.refusal() == "NO_WORKERS"
            kept = [server.ask(f"held {number}") for number in range(40)]
        for one in kept:
            one.output()
        server.all_healthy()
        assert server.get("/readyz").status == 200


def test_workers_are_recycled_without_a_failed_request(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--recycle-rss-mb", "120") as server:
        lines = [server.connect() for _ in range(8)]
        round_number = 0

        def replaced() -> bool:
            """Ask on, and leak 60 MiB now and then, until each worker was replaced."""
            nonlocal round_number
            round_number += 1
            texts = [f"round {round_number}, {place}" for place in range(8)]
            if round_number % 5 == 0:
                texts[3] = "grow 60"
            for asked in [server.ask(text, on=line) for text, line in zip(texts, lines, strict=True)]:
                asked.output()
            return all(worker["restarts"] for worker in server.workers())

        wait_until(replaced)
        first = server.logged("worker wants to be replaced")["pid"]
        wait_until(lambda: first not in {worker["pid"] for worker in server.workers()})
        server.all_healthy()


def test_reload_loads_what_is_on_disk_however_soon_it_changed_again(tmp_path: Path) -> None:
    """Python's cached bytecode knows a source by its size and its modification time in whole seconds."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "model.py").write_text("from parts.words import answer_to\n\n"
                                       "def answer(inputs):\n    return [answer_to(text) for text in inputs]\n")  # fmt: skip
    part = tmp_path / "parts" / "words.py"

    def write(word: str) -> None:
        part.write_text(f"def answer_to(text):\n    return text + {word!r}\n")
        os.utime(part, ns=(0, when.pop(0)))

    when = [1_700_000_000_000_000_000 + number for number in range(3)]
    write("1")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tmp_path)], check=True, timeout=60)
    write("2")
    with serving(tmp_path, "--reload", target="model.py:answer", lawful=False) as server:
        for number, word in enumerate("23"):
            connection = server.connect()
            connection.send(request(b'{"input": "a"}'))
            assert connection.answer().json["output"] == f"a{word}"
            if number == 0:
                stale = part.stat().st_mtime_ns
                part.write_text("def answer_to(text):\n    return text + '3'\n")
                os.utime(part, ns=(0, stale + 5))
                server.logged("target reloaded")


def test_reload_swaps_the_code_and_keeps_the_last_good_version(tmp_path: Path) -> None:
    target = tmp_path / "model.py"

    def write(body: str) -> None:
        new = tmp_path / "model.new"
        new.write_text(f"def answer(inputs):\n    {body}\n")
        new.replace(target)

    write("return [text.upper() for text in inputs]")
    with serving(tmp_path, "--reload", "--workers", "2", target="model.py:answer") as server:
        server.expected = {
            "the changed target does not load; the last good one serves on",
            "the target raised while it started",
            "worker process ended",
        }
        line = server.ask("one").connection
        assert server.asked[-1].output() == "ONE"
        server.answer_to = str.title
        write("return [text.title() for text in inputs]")
        server.logged("target reloaded")
        assert server.ask("two", on=line).output() == "Two"
        write("return no such thing")
        assert "SyntaxError" in server.logged("the changed target does not load; the last good one serves on")["error"]
        assert server.ask("three", on=line).output() == "Three"
        raised = server.logged("the target raised while it started")
        assert "return no such thing" in raised["exception"], "the traceback is in the log"
        write("return [None for text in inputs]")
        server.logged("the changed target does not load; the last good one serves on", 2)
        assert server.ask("four", on=line).output() == "Four"
        server.answer_to = str.swapcase
        write("return [text.swapcase() for text in inputs]")
        server.logged("target reloaded", 2)
        assert server.ask("Five", on=line).output() == "fIVE"
        server.all_healthy()


def test_an_input_that_failed_in_the_old_code_runs_once_the_code_is_mended(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    target.write_text("def answer(inputs):\n    return [text + str(len(text) / (len(text) - 3)) for text in inputs]\n")
    with serving(tmp_path, "--reload", target="model.py:answer", lawful=False) as server:
        server.expected = {"batch failed"}
        first, again = (server.ask("abc").answer() for _ in range(2))
        assert (first.status, again.status) == (422, 422)
        assert "ZeroDivisionError" in again.json["detail"], "the repeated answer carries the first error"
        target.write_text("def answer(inputs):\n    return [text.upper() for text in inputs]\n")
        server.logged("target reloaded")
        wait_until(lambda: server.ask("abc").answer().status == 200)


def test_what_a_worker_prints_is_in_the_log_under_its_name_and_cannot_forge_a_line(tmp_path: Path) -> None:
    forged = "2026-01-01T00:00:00.000+00:00 [error    ] all is lost [headway.app.lifecycle]"
    with serving(tmp_path, logs_json=False) as server:
        server.ask(f"print one\n{forged}\x1b[2J\u2028{forged}\r{forged}").output()
        server.ask("noise").output()
        wait_until(lambda: "half a line" in server.log_text() or "ok" in server.log_text())
        bad = server.ask("raise")
        assert bad.refusal() == "REJECTED_BY_MODEL"
        wait_until(lambda: "Traceback" in server.log_text())
        server.admin(f"/internal/dlq/req_{bad.id}", "DELETE")
    lines = server.log_text().splitlines()
    start = r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00 \[(info|warning) +\] "
    assert all(re.match(f"{start}|    \\| ", line) for line in lines), lines
    said = [line for line in lines if re.match(f"{start}cpu-0 \\| ", line)]
    assert sum(line.endswith("cpu-0 | one") for line in said) == 2, "on both streams, as it is"
    assert {line for line in lines if forged in line} <= set(said)
    assert "\x1b" not in server.log_text()


def test_one_bad_request_is_one_story_in_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, "--access-log", "1") as server:
        server.expected = {"batch failed"}
        with server.held_back():
            bad, mates = server.ask("raise"), [server.ask(f"mate {number}") for number in range(9)]
        assert bad.refusal() == "REJECTED_BY_MODEL"
        for mate in mates:
            mate.output()
        server.logged("batch failed", 2)
        whole, found = [line for line in server.log() if line["level"] == "warning"]
        assert (whole["event"], found["event"]) == ("batch failed", "batch failed")
        assert (whole["size"], found["size"], found["request_id"]) == (10, 1, f"req_{bad.id}")
        assert whole["exception"].startswith("Traceback") and "faults.py" in whole["exception"]
        assert "exception" not in found, "the traceback is told once"
        assert server.logged("request", request_id=f"req_{bad.id}")["status"] == 422
        server.logged("request", 11)  # The access log has a line for each.
        assert not [line for line in server.log("worker output") if "Traceback" in line["line"]]


@pytest.mark.parametrize(
    ("visible", "seen", "banner"),
    [("3,4", {"cuda:0 3", "cuda:0 4"}, "gpu-0: GPU 3, gpu-1: GPU 4"), ("", {"cpu "}, "CPU")],
)
def test_workers_see_the_gpus_of_the_environment_and_no_others(
    tmp_path: Path, visible: str, seen: set[str], banner: str
) -> None:
    absent = visible != "" and find_gpus({}).ids == ()
    if absent:  # What the machine lacks nobody can have.
        seen, banner = {"cpu "}, "CPU"
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    how: dict[str, Any] = {"target": "tests.targets.kinds:Model", "environ": environ, "lawful": False}
    with serving(tmp_path, "--workers", "2", **how) as server:
        server.expected = {find_gpus(environ).warning} if absent else set()
        assert f"  devices  {banner}\n" in server.banner()
        found: set[str] = set()

        def all_seen() -> bool:
            """Ask on until both workers have answered."""
            connection = server.connect()
            connection.send(request(b'{"input": "a"}'))
            found.add(connection.answer().json["output"].removeprefix("a 1 "))
            return found == seen

        wait_until(all_seen)
        assert (visible != "" and not absent) is any("gpu" in worker["worker_id"] for worker in server.workers())
