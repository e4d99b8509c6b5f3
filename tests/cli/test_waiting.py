"""Line on standard error while a command is silent."""

from __future__ import annotations

import io
import threading

import pytest

from headway.cli import terminal as module
from headway.cli.terminal import waiting


class Stream(io.StringIO):
    """Standard error that tells of each line."""

    def __init__(self, *, live: bool) -> None:
        super().__init__()
        self.live, self.lines = live, threading.Semaphore(0)

    def isatty(self) -> bool:
        return self.live

    def flush(self) -> None:
        self.lines.release()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT", 0.0)
    monkeypatch.setattr(module, "EVERY", 0.0)


def shown(monkeypatch: pytest.MonkeyPatch, *, live: bool) -> str:
    stream = Stream(live=live)
    monkeypatch.setattr("sys.stderr", stream)
    with waiting("simulating") as doing:
        stream.lines.acquire()
        doing.tell("simulating 9 GPUs")
        while "9 GPUs" not in stream.getvalue():
            stream.lines.acquire()
    return stream.getvalue()


@pytest.mark.usefixtures("soon")
def test_a_terminal_has_one_line_which_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, live=True)
    assert text.startswith("\r\x1b[Ksimulating … 0 s\r\x1b[K")
    assert "simulating 9 GPUs … 0 s" in text
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


@pytest.mark.usefixtures("soon")
def test_a_file_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, live=False).splitlines()
    assert lines[0] == "simulating … 0 s"
    assert "simulating 9 GPUs … 0 s" in lines


def test_what_is_quickly_done_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(live=True)
    monkeypatch.setattr("sys.stderr", stream)
    with waiting("simulating"):
        pass
    assert stream.getvalue() == ""
