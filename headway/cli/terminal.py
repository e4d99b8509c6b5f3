"""Terminal functions for commands: show progress, fit text to the screen, and read single keys."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence

SILENT = 2.0  # Seconds before the first line appears.
EVERY = 0.5  # Seconds between updates on a terminal, where each line replaces the previous one.
_CLEAR = "\r\x1b[K"

HELP = """Keys
  q      quit
  ?      show or leave this help
  s      sort the workers by the next column
  r      reverse the order"""


class Waiting:
    """Work in progress, described by `text`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def tell(self, text: str) -> None:
        self.text = text


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Waiting]:
    """Show `text` and the elapsed seconds on standard error if the block runs longer than SILENT. On a terminal,
    this is a single line that disappears at the end. In a file or pipe, a new line is written at growing intervals."""
    work, ended = Waiting(text), threading.Event()
    thread = threading.Thread(target=_show, args=(work, ended), daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


def _show(work: Waiting, ended: threading.Event) -> None:
    began, live = time.monotonic(), sys.stderr.isatty()
    pause, shown = SILENT, False
    while not ended.wait(pause):
        seconds = time.monotonic() - began
        shown = True
        _write(f"{_CLEAR}{work.text} … {seconds:.0f} s" if live else f"{work.text} … {seconds:.0f} s\n")
        pause = EVERY if live else seconds  # That is, after 2, 4, 8 … seconds.
    if live and shown:
        _write(_CLEAR)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # A command must not fail because its progress can't be shown.
        sys.stderr.write(text)
        sys.stderr.flush()


def fit(text: str, width: int, height: int) -> str:
    """Cut text to `width` columns and `height` lines. If lines are cut, the last line says how many."""
    lines = [line if len(line) <= width else f"{line[: max(width - 1, 0)]}…" for line in text.splitlines()]
    if len(lines) > height:
        left = len(lines) - height + 1
        lines = [*lines[: max(height - 1, 0)], f"… {left} more lines: the terminal is too short"[:width]]
    return "\n".join(lines)


def narrowed(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Drop columns of a table, in the order in which `spare` lists their headings, until it fits into `width` (0 for no limit)."""
    columns = list(range(len(head)))
    widths = [max(len(row[column]) for row in (head, *rows)) for column in columns]
    for name in spare:
        if not width or sum(widths[column] for column in columns) + 2 * (len(columns) - 1) <= width:
            break
        columns = [column for column in columns if head[column] != name]
    return tuple(head[column] for column in columns), [tuple(row[column] for column in columns) for row in rows]


@contextlib.contextmanager
def keyboard() -> Iterator[bool]:
    """Put the terminal into single-key mode without echo while the block runs. Yields False if there is no keyboard."""
    import termios
    import tty

    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, ValueError, termios.error):
        yield False
        return
    tty.setcbreak(number)
    try:
        yield True
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def key_within(seconds: float, has_keys: bool) -> str:
    """Wait up to `seconds` for a key press. Return the key, or an empty string if there was none."""
    if not has_keys:
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") if ready else ""
