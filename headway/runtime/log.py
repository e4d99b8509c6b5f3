"""Log lines, written by a thread of their own, so that a full disk or a stuck pipe never holds up the loop.

Everything logged by structlog or the standard library (libraries, asyncio, warnings) goes the same
way: the caller's thread only puts it into a bounded queue; one thread renders and writes. When the queue
is full, lines are dropped and counted, and the count is logged once there is room.

A line cannot be forged: control characters and line separators in any text are escaped, and the lines of a
traceback, the only thing that takes more than one line, are indented under their own.
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

OUTPUT = "worker output"
"""Event of a line that a worker printed; its fields are `worker`, `stream` and `line`."""
TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
"""Trace id for log lines of the current task; empty for none."""
CAPACITY = 10_000
"""Limit on lines that wait to be written."""
FLUSH_WITHIN = 2.0
"""Longest wait, in seconds, for the last lines to be written at the end."""

# C0 and C1 controls, line and paragraph separators, and the marks that reorder text on a terminal.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_INDENT = "    | "

_Event = MutableMapping[str, Any]


@contextmanager
def running(level: str = "info", json: bool = False, stream: TextIO | None = None) -> Iterator[Writer]:
    """Log to `stream` while the context lasts; then write what is left and restore the former set-up.

    Arguments:
        level: least important level that is logged: debug, info, warning or error.
        json: one JSON object a line, instead of text for people.
        stream: stream to write to; None for standard error.
    """
    logging.captureWarnings(True)
    try:
        with _structlog(level, _wrap), _writing(logging.getLogger(), level, json, stream or sys.stderr) as writer:
            yield writer
    finally:
        logging.captureWarnings(False)


@contextmanager
def beside(level: str = "info", json: bool = False) -> Iterator[None]:
    """Log while the context lasts, as a guest in a program that may have a log of its own.

    A program that has set up structlog gets all lines its way. One that has set up the standard library's logging gets
    them there, from loggers below `headway`. Else they are written to standard error, and nothing else is.

    Arguments:
        level: least important level that is logged: debug, info, warning or error.
        json: one JSON object a line, instead of text for people, where they are written here.
    """
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
_guests: list[None] = []
"""One item for each `beside` under way: the first sets the log up, the last takes that back."""
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


_UNTOUCHED = None if structlog.is_configured() else tuple(structlog.get_config()["processors"])
"""Processors of structlog in a program that has not set it up; None where it had done so before this was imported."""


def _is_set_up() -> bool:
    """Return True if the program has set structlog up. Who captures lines for a test and puts everything back has not."""
    return structlog.is_configured() and tuple(structlog.get_config()["processors"]) != _UNTOUCHED


@contextmanager
def _structlog(level: str, *last: structlog.typing.Processor) -> Iterator[None]:
    """Send what is logged by structlog to the standard library's loggers, and restore what was."""
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
    """Write what comes to a logger, and restore its handlers."""
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
    """Return `text` with everything escaped that could start a new line or steer a terminal."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


class _Outbox(logging.handlers.QueueHandler):
    """Handler that puts records into the queue without ever waiting."""

    def __init__(self, waiting: queue.SimpleQueue[logging.LogRecord | None]) -> None:
        super().__init__(waiting)
        self._waiting = waiting
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Fix what may change before the writer gets there. The writer renders."""
        if record.args:
            record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue one record, or drop and count it."""
        if self._waiting.qsize() >= CAPACITY:
            self._dropped += 1
            return
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            text = f"{lost} log lines were dropped: they came faster than they could be written"
            self._waiting.put(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
        self._waiting.put(record)


class Writer(logging.handlers.QueueListener):
    """Thread that renders and writes log lines, and that a stuck stream cannot keep from ending.

    Arguments:
        waiting: queue of records.
        handler: writes one record.
        stream: stream that it writes to.

    Attributes:
        write_blocked: whether the last lines could not be written in time. The thread then holds the locks of its stream
            and handler, for which the interpreter would wait at its end.
    """

    write_blocked = False

    def __init__(
        self, waiting: queue.SimpleQueue[logging.LogRecord | None], handler: logging.Handler, stream: TextIO
    ) -> None:
        super().__init__(waiting, handler)
        self._descriptor, self._path = _file_of(stream)

    def reopen(self) -> bool:
        """Open the log's file anew by its name, after the present one was renamed or removed.

        False when the log goes to no file, or no file of that name can be opened.
        """
        if self._path is None:
            return False
        try:
            fresh = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            get_logger(__name__).warning("the log cannot be opened anew", path=self._path, error=str(exc))
            return False
        try:
            os.dup2(fresh, self._descriptor)
        finally:
            os.close(fresh)
        return True

    def stop(self) -> None:
        """Wait for the last lines, but not for ever: the thread is a daemon."""
        if self._thread is not None:
            self.enqueue_sentinel()
            self._thread.join(FLUSH_WITHIN)
            self.write_blocked = self._thread.is_alive()
            self._thread = None


def _file_of(stream: TextIO) -> tuple[int, str | None]:
    """Return the descriptor and path of the regular file that a stream goes to; no path when it goes elsewhere."""
    try:
        descriptor = stream.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor, None
        return descriptor, str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except (OSError, ValueError):  # No descriptor, as of a stream in memory; or no /proc.
        return -1, None


def _pin(logger: Any, name: str, event: _Event) -> _Event:
    """Take hold, on the caller's thread, of what the writer could no longer see.

    That is the exception being handled, and the state of objects that may change.
    """
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    for key, value in event.items():
        if key not in _KEPT and not isinstance(value, str | int | float | bool | None):
            event[key] = repr(value)
    return event


def _describe_record(logger: Any, name: str, event: _Event) -> _Event:
    """Return the level and logger of a line that came by way of the standard library."""
    record = event["_record"]
    event.setdefault("level", record.levelname.lower())
    event.setdefault("logger", record.name)
    event.setdefault("timestamp", datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"))
    return event


def _defuse(logger: Any, name: str, event: _Event) -> _Event:
    """Escape what the console renderer prints verbatim. It prints all other values as Python literals, which is safe."""
    safe: _Event = {escape(key): value for key, value in event.items()}
    safe["event"] = escape(str(event.get("event", "")))
    if "logger" in event:
        safe["logger"] = escape(str(event["logger"]))
    if "exception" in event:
        safe["exception"] = "\n".join(_INDENT + escape(line) for line in event["exception"].splitlines())
    return safe


class _Console:
    """Renderer for people. A line that another program printed is shown as it is, behind the program's name.

    Arguments:
        console: renderer of all other lines.
        colours: whether colours are understood.
    """

    def __init__(self, console: structlog.typing.Processor, colours: bool) -> None:
        self._console = console
        self._name = "\x1b[36m{} |\x1b[0m" if colours else "{} |"

    def __call__(self, logger: Any, name: str, event: _Event) -> Any:
        if event["event"] != OUTPUT or "line" not in event:
            return self._console(logger, name, event)
        who = self._name.format(escape(str(event.get("worker", ""))))
        return f"{event['timestamp']} [{event['level']:<9}] {who} {escape(str(event['line']))}"


_KEPT = ("exc_info", "stack_info")


def _name_trace(logger: Any, name: str, event: _Event) -> _Event:
    if trace_id := TRACE_ID.get():
        event.setdefault("trace_id", trace_id)
    return event


_ADDED: tuple[structlog.typing.Processor, ...] = (structlog.contextvars.merge_contextvars, _name_trace, _pin)
_wrap = structlog.stdlib.ProcessorFormatter.wrap_for_formatter
_exception = structlog.processors.format_exc_info


def _formatter(json: bool, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    rendering: list[structlog.typing.Processor] = [
        _describe_record,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _exception,
    ]
    if json:
        rendering.append(structlog.processors.JSONRenderer())
    else:
        rendering += [_defuse, _Console(_console(colours), colours)]
    return structlog.stdlib.ProcessorFormatter(processors=rendering)


def _console(colours: bool) -> structlog.dev.ConsoleRenderer:
    """Return the renderer of text for people."""
    return structlog.dev.ConsoleRenderer(
        colors=colours,
        repr_native_str=True,
        sort_keys=False,
        pad_event_to=0,
        exception_formatter=structlog.dev.plain_traceback,
    )
