from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from headway.core.arrivals import replay
from headway.errors import SettingError
from headway.load.schedule import TraceFile, due_times
from headway.load.spec import LoadSpec, Target


def order(arrivals: str, seed: int = 1) -> LoadSpec:
    return LoadSpec(target=Target("h", 80, "h", "/"), rate=100.0, duration=1.0, arrivals=arrivals, seed=seed)


def test_dues_end_with_the_duration() -> None:
    assert list(due_times(order("uniform"))) == [number / 100 for number in range(100)]
    poisson = list(due_times(order("poisson")))
    assert 0.9 < poisson[-1] < 1.0
    assert 60 < len(poisson) < 140


def test_one_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert list(due_times(order("poisson"))) == list(due_times(order("poisson")))
    assert list(due_times(order("poisson"))) != list(due_times(order("poisson", seed=2)))


def test_a_trace_is_replayed_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP\r\n10\r\n11\r\n13\r\n")
    dues = list(due_times(order(str(path))))
    assert dues[:4] == pytest.approx([0, 1 / 150, 3 / 150, 3 / 100])
    assert dues[-1] == pytest.approx(0.99 + 1 / 150)
    assert list(islice(replay(TraceFile(path), 100.0), len(dues))) == dues


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"TIMESTAMP\n1\n\xff\n", "is not UTF-8 text"),
        (b"TIMESTAMP\n1\n2\n1\n", "line 4.*earlier"),
        (b"", "has no rate"),
    ],
)
def test_a_trace_that_is_none_is_refused_before_the_load(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=says):
        due_times(order(str(path)))


def test_a_word_that_is_no_kind_of_arrivals_is_refused() -> None:
    with pytest.raises(SettingError, match=r"--arrivals = 'poison'.*Use poisson, uniform, or the path"):
        due_times(order("poison"))
