"""The log of a service that is a guest in a program: the program's own log decides."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog

from headway.runtime import log
from headway.runtime.logger import get_logger


@contextmanager
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """A program without a log of its own; what it writes to standard error."""
    root, errors = logging.getLogger(), io.StringIO()
    handlers, root.handlers[:] = root.handlers[:], []
    monkeypatch.setattr("sys.stderr", errors)
    try:
        yield errors
    finally:
        root.handlers[:] = handlers


def test_a_program_without_a_log_gets_the_lines_on_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bare(monkeypatch) as errors, log.beside("info"):
        get_logger("headway.a").info("first", worker="gpu-0")
        with log.beside("debug"):
            get_logger("headway.a").debug("too low for whoever came first")
        get_logger("headway.a").info("second")
        logging.getLogger("other").info("not ours")
    lines = errors.getvalue().splitlines()
    assert [line.partition("]")[2].split()[0] for line in lines] == ["first", "second"]
    assert "worker='gpu-0'" in lines[0]
    assert not structlog.is_configured() and not logging.getLogger("headway").handlers


def test_a_program_with_a_log_gets_the_lines_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with log.beside("info"):
        try:
            raise ValueError("why")
        except ValueError:
            get_logger("headway.a").exception("failed", worker="gpu\n0")
        get_logger("headway.a").debug("too low")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("headway.a", logging.ERROR)
    assert "failed" in record.message and r"gpu\n0" in record.message and "ValueError: why" in record.message


def test_a_program_that_uses_structlog_gets_the_lines_its_way() -> None:
    seen: list[Any] = []

    def keep(logger: object, name: str, event: Any) -> Any:
        seen.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    try:
        with log.beside("warning"):
            get_logger("headway.a").info("event", worker="gpu-0")
        assert seen == [{"event": "event", "worker": "gpu-0"}]
        assert structlog.get_config()["processors"] == [keep]
    finally:
        structlog.reset_defaults()


def test_lines_that_were_captured_before_are_no_set_up() -> None:
    with structlog.testing.capture_logs():
        pass
    with log.running(stream=io.StringIO()):
        pass
    assert not structlog.is_configured()


def test_the_log_of_a_service_leaves_the_programs_structlog_as_it_was() -> None:
    mine = [structlog.processors.JSONRenderer()]
    structlog.configure(processors=mine)
    try:
        with log.running(stream=io.StringIO()):
            assert structlog.get_config()["processors"] != mine
        assert structlog.get_config()["processors"] == mine
    finally:
        structlog.reset_defaults()
