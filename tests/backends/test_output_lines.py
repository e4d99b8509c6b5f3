import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends import process
from headway.backends.process.output_lines import Lines, printable


def test_a_line_ends_where_it_ends_a_progress_bar_is_many_and_blank_ones_are_none() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw", 0.0) == ["one"]
    assert lines.feed(b"o\nthree", 0.0) == ["two"]
    assert lines.finish() == ["three"]
    assert lines.finish() == []
    assert Lines().feed(b"10%\r20%\r\n\n\n100%\n", 0.0) == ["10%", "20%", "100%"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("naïve 漢字 😀".encode(), "naïve 漢字 😀"),
        (b"caf\xe9", "caf\\xe9"),
        (b"\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\u2028b\u202ec\u0085d".encode(), "a\\u2028b\\u202ec\\x85d"),
        (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
        (b"nul\0", "nul\\x00"),
        (b"a\tb", "a       b"),
    ],
)
def test_what_does_not_print_is_escaped(raw: bytes, shown: str) -> None:
    assert printable(raw) == shown


def test_a_long_line_is_cut_even_when_it_never_ends() -> None:
    lines = Lines(longest=10)
    assert lines.feed(b"x" * 25, 0.0) == ["xxxxxxxxxx … (cut)"]
    assert lines.feed(b"x" * 1000, 0.0) == []
    assert lines.feed(b"x\nnext\n", 0.0) == ["next"]
    assert lines.feed(b"y" * 11 + b"\nz\n", 0.0) == ["yyyyyyyyyy … (cut)", "z"]


def test_a_flood_is_counted_its_last_words_are_kept_and_a_second_later_lines_pass_again() -> None:
    lines = Lines(per_second=3, tail=20)
    assert lines.feed(b"a\nb\nc\nd\ne\n", 5.0) == ["a", "b", "c"]
    assert lines.feed(b"f\n" * 50_000, 5.9) == []
    assert lines.take_dropped() == 50_002
    assert lines.take_dropped() == 0
    assert lines.feed(b"flood\n" * 1000 + b"out of memory\nbye", 5.9) == []
    assert lines.last_words(2) == ["out of memory", "bye"]
    assert lines.feed(b", half a line\nwhole\n", 6.0) == ["whole"], "half a line is not taken for a whole one"


def dumped(*frames: str, before: str = "") -> list[str]:
    """Return `last_words` for a Python crash dump with these frames above Headway's own."""
    ours = [f'{Path(process.__file__).parent}/child.py", line {n} in main' for n in range(12)]
    of_thread = "".join(f'  File "{frame}\n' for frame in (*frames, *ours))
    dump = f"Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  <no Python frame>\n\nCurrent thread 0x2 (most recent call first):\n{of_thread}\nExtension modules: msgspec._core (total: 1)\n"
    lines = Lines()
    lines.feed((before + dump).encode(), 0.0)
    return lines.last_words(5)


def test_last_words_of_a_crash_are_the_frames_of_the_target_however_deep_in_a_library() -> None:
    assert dumped('model.py", line 3 in deep', 'model.py", line 5 in run') == [
        "Fatal Python error: Aborted",
        'File "model.py", line 3 in deep',
        'File "model.py", line 5 in run',
    ]
    library = [f'/env/lib/python3.11/site-packages/torch/nn.py", line {n} in forward' for n in range(90)]
    assert dumped(*library, 'model.py", line 5 in run', before="starting\nterminate called\n  what(): boom\n") == [
        "terminate called",
        "  what(): boom",
        "Fatal Python error: Aborted",
        'File "/env/lib/python3.11/site-packages/torch/nn.py", line 0 in forward',
        'File "model.py", line 5 in run',
    ]
    assert dumped()[-1] == "Extension modules: msgspec._core (total: 1)"


@given(st.lists(st.binary(max_size=60)), st.integers(1, 30))
def test_whatever_is_printed_comes_out_bounded_and_printable(chunks: list[bytes], longest: int) -> None:
    lines = Lines(longest=longest, per_second=10**6)
    out = [line for chunk in chunks for line in lines.feed(chunk, 0.0)] + lines.finish()
    assert all(line.isprintable() for line in out)
    assert all(len(line) <= 12 * longest + 10 for line in out)
    whole = [piece for piece in re.split(rb"[\r\n]", b"".join(chunks)) if piece]
    assert [line for line in out if not line.endswith("(cut)")] == [printable(p) for p in whole if len(p) <= longest]
