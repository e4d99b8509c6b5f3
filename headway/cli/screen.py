"""Terminal of `headway top`: fitting text to it, and reading single keys."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence

HELP = """Keys
  q      quit
  ?      this help, and back
  s      sort the workers by the next column
  r      sort the other way round"""


def fit(text: str, width: int, height: int) -> str:
    """Cut a text to `width` columns and `height` lines, and say how much was cut."""
    lines = [line if len(line) <= width else f"{line[: max(width - 1, 0)]}…" for line in text.splitlines()]
    if len(lines) > height:
        left = len(lines) - height + 1
        lines = [*lines[: max(height - 1, 0)], f"… {left} more lines: the terminal is too low"[:width]]
    return "\n".join(lines)


def narrowed(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Drop columns of a table until it fits `width` (0 for no limit), in the order of their headings in `spare`."""
    kept = list(range(len(head)))
    widths = [max(len(row[column]) for row in (head, *rows)) for column in kept]
    for name in spare:
        if not width or sum(widths[column] for column in kept) + 2 * (len(kept) - 1) <= width:
            break
        kept = [column for column in kept if head[column] != name]
    return tuple(head[column] for column in kept), [tuple(row[column] for column in kept) for row in rows]


@contextlib.contextmanager
def keyboard() -> Iterator[bool]:
    """Read single keys from standard input, without echo. Yields False if there is no keyboard."""
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
    """Wait for a key for some seconds; empty if none is pressed."""
    if not has_keys:
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") if ready else ""
