"""Log lines. A thread writes them, so a full disk or a stuck pipe never holds up the event loop.

Lines from structlog and the standard library (libraries, asyncio, warnings) go into one bounded queue, which the thread empties.
While the queue is full, lines are dropped; their number is logged once there is room. Control characters and line separators in all
strings are escaped, so nobody can forge a line. Only tracebacks span several lines, which are indented.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import re
import stat
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from headway.runtime.logger import get_logger, structlog

OUTPUT = "worker output"  # Event of a worker's printed line, with the fields `worker`, `stream` and `line`.
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")  # Trace id in log lines of the current task.
CAPACITY = 10_000  # Maximum number of lines in the queue.
FLUSH_WITHIN = 2.0  # Maximum time in seconds to wait at the end for the last lines to be written.

# C0 and C1 controls, line and paragraph separators, and the marks that reorder text on a terminal.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_Event = MutableMapping[str, Any]


@contextmanager
def running(level: str = "info", json: bool = False, stream: TextIO | None = None) -> Iterator[Writer]:
    """Log to a stream, by default standard error, while the context lasts. `level` is the lowest level to log: debug, info,
    warning or error. Afterwards, write the remaining lines, and restore the previous configuration."""
    logging.captureWarnings(True)
    try:
        with _structlog(level, _wrap), _writing(logging.getLogger(), level, json, stream or sys.stderr) as writer:
            yield writer
    finally:
        logging.captureWarnings(False)


@contextmanager
def beside(level: str = "info", json: bool = False) -> Iterator[None]:
    """Log while the context lasts, as a guest in a program that may have its own logging. If the program has configured
    structlog, all lines go to it. If it has configured the standard library's logging, they go to the loggers below
    `headway`. Otherwise Headway's lines go to standard error, in JSON if `json`."""
    with _entering:
        if not _guests:
            _set_up.enter_context(_as_guest(level, json))
        _guests.append(None)
    try:
        yield
    finally:
        with _entering:
            _guests.pop()
            if not _guests:
                _set_up.close()


_entering = threading.Lock()
_guests: list[None] = []  # An item for each active `beside`. The first sets up the log, and the last restores it.
_set_up = ExitStack()


@contextmanager
def _as_guest(level: str, json: bool) -> Iterator[None]:
    if _is_set_up():
        yield
        return
    own = logging.getLogger("headway")
    if own.hasHandlers():
        with _structlog(level, _exception, _defuse, _console(False)):
            yield
        return
    own.propagate = False
    try:
        with _structlog(level, _wrap), _writing(own, level, json, sys.stderr):
            yield
    finally:
        own.propagate = True


_UNTOUCHED = None if structlog.is_configured() else tuple(structlog.get_config()["processors"])  # Structlog's defaults.


def _is_set_up() -> bool:
    """Return True if the program has configured structlog. Structlog's defaults don't count: a test may restore them."""
    return structlog.is_configured() and tuple(structlog.get_config()["processors"]) != _UNTOUCHED


@contextmanager
def _structlog(level: str, *last: structlog.typing.Processor) -> Iterator[None]:
    was = structlog.get_config() if _is_set_up() else None
    structlog.configure(
        processors=[*_ADDED, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.reset_defaults()
        if was is not None:
            structlog.configure(**was)


@contextmanager
def _writing(logger: logging.Logger, level: str, json: bool, stream: TextIO) -> Iterator[Writer]:
    before = (logger.level, logger.handlers[:])
    waiting: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(json, stream.isatty()))
    writer = Writer(waiting, handler, stream)
    logger.handlers[:] = [_Outbox(waiting)]
    logger.setLevel(level.upper())
    writer.start()
    try:
        yield writer
    finally:
        writer.stop()
        logger.setLevel(before[0])
        logger.handlers[:] = before[1]


def escape(text: str) -> str:
    """Escape everything in a string that could start a new line or control a terminal."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Outbox(logging.handlers.QueueHandler):
    def __init__(self, waiting: queue.SimpleQueue[logging.LogRecord | None]) -> None:
        super().__init__(waiting)
        self._waiting = waiting
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Format the message now, because its arguments may change before the thread renders the line."""
        if record.args:
            record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= CAPACITY:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            text = f"{lost} log lines were dropped: they came faster than they could be written"
            self._waiting.put(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
        self._waiting.put(record)


class Writer(logging.handlers.QueueListener):
    """Thread that renders and writes log lines, and can be stopped even if the stream is stuck."""

    write_blocked = False  # True if the last lines weren't written in time; the thread's locks would block an exit.

    def __init__(
        self, waiting: queue.SimpleQueue[logging.LogRecord | None], handler: logging.Handler, stream: TextIO
    ) -> None:
        super().__init__(waiting, handler)
        self._descriptor, self._path = _file_of(stream)

    def reopen(self) -> bool:
        """Reopen the log file by name after it was renamed or removed. Return False if that fails, or the log isn't a file."""
        if self._path is None:
            return False
        try:
            fresh = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            get_logger(__name__).warning("the log file can't be reopened", path=self._path, error=str(exc))
            return False
        try:
            os.dup2(fresh, self._descriptor)
        finally:
            os.close(fresh)
        return True

    def stop(self) -> None:
        """Wait up to FLUSH_WITHIN for the last lines. The thread is a daemon, so the process can end without it."""
        if self._thread is not None:
            self.enqueue_sentinel()
            self._thread.join(FLUSH_WITHIN)
            self.write_blocked = self._thread.is_alive()
            self._thread = None


def _file_of(stream: TextIO) -> tuple[int, str | None]:
    try:
        descriptor = stream.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor, None
        return descriptor, str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except (OSError, ValueError):  # A stream in memory has no descriptor, and some systems have no /proc.
        return -1, None


def _pin(logger: Any, name: str, event: _Event) -> _Event:
    """Capture the current exception and the state of mutable objects, because another thread renders them later."""
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    for key, value in event.items():
        if key not in ("exc_info", "stack_info") and not isinstance(value, str | int | float | bool | None):
            event[key] = repr(value)
    return event


def _describe_record(logger: Any, name: str, event: _Event) -> _Event:
    record = event["_record"]
    event.setdefault("level", record.levelname.lower())
    event.setdefault("logger", record.name)
    event.setdefault("timestamp", datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"))
    return event


def _defuse(logger: Any, name: str, event: _Event) -> _Event:
    """Escape the strings that the console renderer prints verbatim. Others become Python literals, which are safe."""
    safe: _Event = {escape(key): value for key, value in event.items()}
    safe["event"] = escape(str(event.get("event", "")))
    if "logger" in event:
        safe["logger"] = escape(str(event["logger"]))
    if "exception" in event:
        safe["exception"] = "\n".join("    | " + escape(line) for line in event["exception"].splitlines())
    return safe


class _Console:
    """Renderer that shows a worker's printed line after the worker's name. `console` renders all other lines."""

    def __init__(self, console: structlog.typing.Processor, colours: bool) -> None:
        self._console = console
        self._name = "\x1b[36m{} |\x1b[0m" if colours else "{} |"

    def __call__(self, logger: Any, name: str, event: _Event) -> Any:
        if event["event"] != OUTPUT or "line" not in event:
            return self._console(logger, name, event)
        who = self._name.format(escape(str(event.get("worker", ""))))
        return f"{event['timestamp']} [{event['level']:<9}] {who} {escape(str(event['line']))}"


def _name_trace(logger: Any, name: str, event: _Event) -> _Event:
    if trace_id := TRACE_ID.get():
        event.setdefault("trace_id", trace_id)
    return event


_ADDED: tuple[structlog.typing.Processor, ...] = (structlog.contextvars.merge_contextvars, _name_trace, _pin)
_wrap = structlog.stdlib.ProcessorFormatter.wrap_for_formatter
_tidy = structlog.stdlib.ProcessorFormatter.remove_processors_meta
_exception = structlog.processors.format_exc_info


def _formatter(json: bool, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    rendering: list[structlog.typing.Processor] = [_describe_record, _tidy, _exception]
    if json:
        rendering.append(structlog.processors.JSONRenderer())
    else:
        rendering += [_defuse, _Console(_console(colours), colours)]
    return structlog.stdlib.ProcessorFormatter(processors=rendering)


def _console(colours: bool) -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=colours,
        repr_native_str=True,
        sort_keys=False,
        pad_event_to=0,
        exception_formatter=structlog.dev.plain_traceback,
    )
