"""Workers die, leak, print and change; whoever waits does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.app.devices import find_gpus
from tests.e2e.client import request, wait_until
from tests.e2e.server import serving

UNHAPPY = {"batch failed", "worker process ended"}


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
    flags = "--reload", "--workers", "2", "--cache", "--collapse"
    with serving(tmp_path, *flags, target="model.py:answer") as server:
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
        assert server.ask("one", on=line).output() == "One", "what the old code said is not kept"
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


def test_from_a_reload_on_requests_are_judged_by_what_the_new_code_takes(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    target.write_text("def answer(inputs: list[str]):\n    return inputs\n")
    with serving(tmp_path, "--reload", "--workers", "2", target="model.py:answer", lawful=False) as server:
        new = "def answer(inputs: list[float]) -> list[float]:\n    return [x + 1.0 for x in inputs]\n\nanswer.example = 1.0\n"
        target.write_text(new)
        server.logged("target reloaded")
        connection = server.connect()
        connection.send(request(b'{"input": 2.5}'))
        assert connection.answer().json["output"] == 3.5


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
