"""Plots of simulations. They need matplotlib, which isn't always installed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway.config.extras import install_hint
from headway.errors import SettingError
from headway.simulator.record import Record
from headway.simulator.report import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")  # Allowed file extensions.
WINDOWS = 100  # Maximum number of points of a line over time.
LEAST_WINDOW = 5  # Minimum number of batch times per point. With fewer, chance would hide the trend.
WIDEST = 4.0  # Width of the widest line in points.
STYLES = ("-", "--", ":", "-.")  # Line styles of tiers, highest first, if colours distinguish policies.


def check(path: Path) -> None:
    """Check before a run that a plot can probably be written to `path`. Raises SettingError if not, or if matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        hint = f"Use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        raise SettingError("--plot", str(path), "does not have the extension of a supported format", hint)
    reason = ""
    if path.is_dir():
        reason = "is a directory"
    elif not path.parent.is_dir():
        reason = "is in a directory that does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise SettingError("--plot", str(path), f"cannot be written: {reason}", "For example waits.png.")
    try:
        import matplotlib  # noqa: F401 - only to check whether it is installed
    except ImportError:
        raise SettingError(
            "--plot", str(path), "needs matplotlib, which is not installed", install_hint("plot")
        ) from None


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a plot (see `picture`) in the format given by the extension of `path`. Raises SettingError if it can't be written."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = picture(records)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise SettingError("--plot", str(path), f"cannot be written: {exc}", "For example waits.png.") from None
    finally:
        pyplot.close(figure)


def picture(records: Sequence[Record]) -> Figure:
    """Plot the latency of each tier and the fill of batches over time, and the distribution of latencies. The records are of one
    scenario with one or more policies. The legend is below the axes, so that it doesn't cover any data."""
    from matplotlib import pyplot

    figure: Figure
    figure, (waits, fills, shares) = pyplot.subplots(3, 1, figsize=(11, 11), layout="constrained")
    scenario = records[0].scenario
    for number, record in enumerate(records):
        for line in _lines(record, number, len(records)):
            _draw_waits(waits, record, line)
            latencies = [record.latency[index] * 1000 for index in line.answers]
            if latencies:
                shares.ecdf(latencies, color=line.color, linestyle=line.style, linewidth=line.width, compress=True)
        _draw_fill(fills, record, f"C{number}" if len(records) > 1 else "black")
    for axes in (waits, fills):
        _mark(axes, records)
        axes.set_xlim(scenario.warmup, scenario.duration)
        axes.set_xlabel("seconds")
    if scenario.queue.promise is not None:
        waits.axhline(scenario.queue.promise * 1000, color="grey", linestyle=":", label="promise")
        shares.axvline(scenario.queue.promise * 1000, color="grey", linestyle=":")
    shares.axhline(0.95, color="lightgrey", linewidth=0.8)
    waits.set(ylabel="ms", title="95th percentile of latency, by arrival time", ylim=(0, None))
    fills.set(ylabel="share of the largest batch", title="Fill of batches", ylim=(0, 1.15))
    shares.set(xlabel="latency in ms", ylabel="share of answers", title="Latency of all answers", xlim=(0, None))
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def windows(record: Record) -> tuple[float, int]:
    """Return the seconds per point of a line over time, and the number of points."""
    scenario = record.scenario
    span = scenario.duration - scenario.warmup
    count = min(WINDOWS, int(span / (LEAST_WINDOW * scenario.cycle(scenario.max_batch))))
    return span / max(count, 1), max(count, 1)


class _Line(NamedTuple):
    name: str
    color: str
    style: str
    width: float
    answers: Sequence[int]  # Indices in the record of the answers of one tier.


def _lines(record: Record, number: int, policies: int) -> Iterator[_Line]:
    """Yield a line for each tier. Those of higher tiers are wider, so that they are visible behind the others."""
    tiers = list(record.scenario.mix)
    for index, tier in enumerate(tiers):
        names = [record.scenario.policy] * (policies > 1) + [tier] * (len(tiers) > 1)
        yield _Line(
            name=" ".join(names) or record.scenario.policy,
            color=f"C{number}" if policies > 1 else f"C{index}",
            style=STYLES[index % len(STYLES)] if policies > 1 else "-",
            width=min(1.2 + len(tiers) - 1 - index, WIDEST),
            answers=[place for place, answered in enumerate(record.tier) if answered == index],
        )


def _draw_waits(axes: Axes, record: Record, line: _Line) -> None:
    seconds, count = windows(record)
    latencies: list[list[float]] = [[] for _ in range(count)]
    for index in line.answers:
        latencies[_window(record, record.arrived[index], seconds, count)].append(record.latency[index])
    middles = [record.scenario.warmup + (number + 0.5) * seconds for number in range(count)]
    heights = [percentile(sorted(values), 0.95) * 1000 for values in latencies]
    marker = "." if sum(not math.isnan(height) for height in heights) < 3 else None
    axes.plot(
        middles, heights, color=line.color, linestyle=line.style, linewidth=line.width, marker=marker, label=line.name
    )


def _draw_fill(axes: Axes, record: Record, color: str) -> None:
    seconds, count = windows(record)
    sizes, batches = [0] * count, [0] * count
    for at, size in zip(record.left_at, record.size, strict=True):
        number = _window(record, at, seconds, count)
        sizes[number] += size
        batches[number] += 1
    middles = [record.scenario.warmup + (number + 0.5) * seconds for number in range(count)]
    most = record.scenario.max_batch
    means = [size / number / most if number else math.nan for size, number in zip(sizes, batches, strict=True)]
    axes.plot(middles, means, color=color, linewidth=1.2)


def _window(record: Record, at: float, seconds: float, count: int) -> int:
    return min(int((at - record.scenario.warmup) / seconds), count - 1)


def _mark(axes: Axes, records: Sequence[Record]) -> None:
    scenario = records[0].scenario
    for number, step in enumerate(scenario.steps):
        axes.axvline(step.at, color="dimgrey", linewidth=1, label="rate changes" if number == 0 else None)
        axes.annotate(f"{step.rate:g}/s", (step.at, 1), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(2, -10), textcoords="offset points", color="dimgrey")  # fmt: skip
    for number, kill in enumerate(scenario.faults.kills):
        label = "workers are killed" if number == 0 else None
        axes.axvline(kill.at, color="black", linewidth=1, linestyle="--", label=label)
        axes.annotate(f"−{kill.workers}", (kill.at, 1), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(2, -20), textcoords="offset points", color="black")  # fmt: skip
    if scenario.faults.fail_every:
        died = records[0].died_at
        axes.plot(died, [0.0] * len(died), "|", color="black", markersize=12, clip_on=False, label="a worker dies")
