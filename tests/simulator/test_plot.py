from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from headway.simulator.engine import simulate
from headway.simulator.plot import picture, windows
from headway.simulator.scenario import Faults, Kill, QueueRules, Scenario, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytestmark = pytest.mark.processes
"""Where matplotlib finds no list of fonts that it has kept, it asks a program for one."""

RUN = Scenario(
    rate=300.0, workers=3, alpha=0.02, max_batch=16, duration=12.0, warmup=2.0, mix={"gold": 1.0, "free": 3.0},
    queue=QueueRules(promise=0.1), steps=(Step(5.0, 400.0), Step(9.0, 200.0)),
    faults=Faults(kills=(Kill(6.0, 1), Kill(7.0, 2)), restart=1.0),
)  # fmt: skip


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Draw without a screen, and close the figures. Imported here because importing matplotlib slows collection."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def xs(line: Any) -> list[float]:
    return [float(x) for x in line.get_xdata()]


def names(figure: Figure) -> Sequence[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_whole_run_is_shown_with_its_tiers_kills_and_steps() -> None:
    drawn = picture([simulate(RUN)])
    assert names(drawn) == ["gold", "free", "rate changes", "workers are killed", "promise"]
    waits, _, shares = drawn.axes
    assert len({line.get_color() for line in waits.lines[:2]}) == 2
    assert len(shares.lines) == 4  # Two tiers, the promise, and 95 %.
    for axes in drawn.axes[:2]:
        assert axes.get_xlim() == (2.0, 12.0)
        seen = xs(axes.lines[0])
        assert min(seen) < 2.2
        assert max(seen) > 11.8
        assert {5.0, 6.0, 7.0, 9.0} <= {xs(line)[0] for line in axes.lines if len(set(xs(line))) == 1}
        assert [text.get_text() for text in axes.texts] == ["400/s", "200/s", "−1", "−2"]


def test_policies_have_colours_and_tiers_styles() -> None:
    figure = picture([simulate(replace(RUN, policy=policy)) for policy in ("paced", "window")])
    assert names(figure)[:4] == ["paced gold", "paced free", "window gold", "window free"]
    lines = figure.axes[0].lines
    assert (lines[0].get_color(), lines[2].get_color()) == ("C0", "C1")
    assert (lines[0].get_linestyle(), lines[1].get_linestyle()) == ("-", "--")


def test_deaths_by_chance_are_marked() -> None:
    record = simulate(replace(RUN, faults=Faults(fail_every=5.0, restart=1.0)))
    figure = picture([record])
    assert record.deaths == len(record.died_at) > 0
    assert "a worker dies" in names(figure)


def test_a_short_run_without_tiers_is_one_line() -> None:
    record = simulate(replace(RUN, duration=2.1, mix={"all": 1.0}, steps=(), faults=Faults(), queue=QueueRules()))
    assert windows(record)[1] == 1
    assert names(picture([record])) == ["paced"]
