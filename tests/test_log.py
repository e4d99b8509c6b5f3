import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime import log
from headway.runtime.logger import get_logger

LONG = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "FLUSH_WITHIN", LONG)


def logged(write: Callable[[], object], level: str = "debug", json: bool = False) -> str:
    stream = io.StringIO()
    with log.running(level, json=json, stream=stream):
        write()
    return stream.getvalue()


def everything() -> None:
    get_logger("ours").info("started", worker="gpu-0", batch=32)
    logging.getLogger("library.part").warning("closing %s", "down")
    logging.getLogger("asyncio").debug("selector")


def test_log_lines_for_people_have_level_event_logger_and_fields() -> None:
    lines = logged(everything).splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "[info     ] started [ours] worker='gpu-0' batch=32",
        "[warning  ] closing down [library.part]",
        "[debug    ] selector [asyncio]",
    ]
    assert all(line.startswith("20") for line in lines)


def test_log_lines_for_machines_are_json_objects() -> None:
    lines = [json.loads(line) for line in logged(everything, json=True).splitlines()]
    assert all(line.pop("timestamp") for line in lines)
    assert lines == [
        {"event": "started", "level": "info", "logger": "ours", "worker": "gpu-0", "batch": 32},
        {"event": "closing down", "level": "warning", "logger": "library.part"},
        {"event": "selector", "level": "debug", "logger": "asyncio"},
    ]


def test_lines_of_a_task_with_a_trace_name_it_unless_they_name_another() -> None:
    def write() -> None:
        named = log.TRACE_ID.set("a" * 32)
        get_logger("ours").info("within")
        get_logger("ours").info("of another", trace_id="b")
        log.TRACE_ID.reset(named)
        get_logger("ours").info("after")

    lines = [json.loads(line) for line in logged(write, json=True).splitlines()]
    assert [line.get("trace_id") for line in lines] == ["a" * 32, "b", None]


def test_the_level_holds_for_both_ways_in() -> None:
    def write() -> None:
        for logger in (structlog.get_logger("a"), logging.getLogger("b")):
            logger.info("too small")
            logger.error("large enough")

    lines = logged(write, "warning").splitlines()
    assert [line.split("] ")[1].split(" [")[0] for line in lines] == ["large enough"] * 2


def test_warnings_of_python_are_logged() -> None:
    def write() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this will go away", DeprecationWarning, stacklevel=1)

    assert "this will go away" in logged(write)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_stays_with_its_line(as_json: bool) -> None:
    def write() -> None:
        for logger in (structlog.get_logger("a"), logging.getLogger("b")):
            try:
                raise ValueError("first\n2026-01-01T00:00:00 [info     ] forged")
            except ValueError:
                logger.exception("it broke")

    lines = logged(write, json=as_json).splitlines()
    if as_json:
        assert len(lines) == 2
        assert all("ValueError: first" in json.loads(line)["exception"] for line in lines)
    else:
        own = [line for line in lines if not line.startswith("    | ")]
        assert [line.split("] ")[1].split(" [")[0] for line in own] == ["it broke"] * 2
        assert "    | 2026-01-01T00:00:00 [info     ] forged" in lines


@given(st.text(), st.booleans(), st.booleans())
def test_no_text_makes_a_second_line_or_steers_the_terminal(text: str, as_json: bool, standard: bool) -> None:
    key = f"a_{text}"  # Some words are reserved.

    def write() -> None:
        if standard:
            logging.getLogger("b").info("%s", text)
        else:
            structlog.get_logger("a").info("said", text=text, **{key: 1} if key.isidentifier() else {})
            structlog.get_logger("a").info(text.replace("%", ""))

    written = logged(write, json=as_json)
    assert len(written.splitlines()) == written.count("\n") == (1 if standard else 2)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in written.replace("\n", ""))


def test_values_are_fixed_when_they_are_logged() -> None:
    stream, values = Stuck(), [1]
    with log.running("info", stream=stream):
        get_logger("a").info("ours", values=values)
        logging.getLogger("b").info("theirs %s", values)
        values.append(2)
        stream.gate.set()
    assert "[1, 2]" not in stream.getvalue()
    assert stream.getvalue().count("[1]") == 2


class Stuck(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        self.gate.wait(LONG)
        return super().write(text)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CAPACITY", 10)


@pytest.mark.usefixtures("small")
def test_a_stuck_stream_holds_nobody_up_and_the_loss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "FLUSH_WITHIN", 0.01)
    stream = Stuck()
    with log.running("info", stream=stream):
        for number in range(1000):
            get_logger("a").info("line", number=number)
        handler = logging.getLogger().handlers[0]
    thread = next(thread for thread in threading.enumerate() if thread.daemon and "_monitor" in thread.name)
    stream.gate.set()
    thread.join(LONG)
    assert isinstance(handler, logging.handlers.QueueHandler)
    assert 10 <= stream.getvalue().count("\n") <= 12
    assert "number=0" in stream.getvalue()


@pytest.mark.usefixtures("small")
def test_dropped_lines_are_counted_when_there_is_room_again() -> None:
    caught_up = threading.Event()

    class Telling(Stuck):
        def write(self, text: str) -> int:
            if "line 9 " in text:
                caught_up.set()
            return super().write(text)

    stream = Telling()
    with log.running("info", stream=stream):
        for number in range(100):
            logging.getLogger("a").info("line %d", number)
        stream.gate.set()
        assert caught_up.wait(LONG)
        logging.getLogger("a").info("after")
    lines = stream.getvalue().splitlines()
    assert "log lines were dropped" in lines[-2]
    assert "after" in lines[-1]


def test_a_full_disk_is_survived() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with log.running("info", stream=Full()):
        get_logger("a").info("lost")
        get_logger("a").info("lost too")


def test_everything_is_as_before_afterwards() -> None:
    root = logging.getLogger()
    before, threads = (root.level, root.handlers[:]), set(threading.enumerate())
    logged(everything)
    assert (root.level, root.handlers) == before
    for late in set(threading.enumerate()) - threads:
        late.join(60.0)
    assert set(threading.enumerate()) <= threads
    assert not structlog.is_configured()


@contextmanager
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """A program that hasn't configured logging. Yields its standard error."""
    root, errors = logging.getLogger(), io.StringIO()
    handlers, root.handlers[:] = root.handlers[:], []
    monkeypatch.setattr("sys.stderr", errors)
    try:
        yield errors
    finally:
        root.handlers[:] = handlers


def test_a_program_without_a_log_gets_the_lines_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_log_of_a_service_leaves_the_programs_structlog_as_it_was() -> None:
    with structlog.testing.capture_logs():  # Capturing lines doesn't count as configuration.
        pass
    with log.running(stream=io.StringIO()):
        pass
    assert not structlog.is_configured()
    mine = [structlog.processors.JSONRenderer()]
    structlog.configure(processors=mine)
    try:
        with log.running(stream=io.StringIO()):
            assert structlog.get_config()["processors"] != mine
        assert structlog.get_config()["processors"] == mine
    finally:
        structlog.reset_defaults()
