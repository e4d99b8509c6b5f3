"""Pictures of simulations; needs matplotlib, which the extra `plot` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import SettingError
from headway.simulator.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_BATCHES = 15
"""Batch times of departures that the picture shows, from the end of the warm-up."""


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a picture of the latency distributions and of the departures over time, one colour for each policy.

    Arguments:
        records: records of one scenario under one or more policies.
        path: path of the picture; its ending decides the format.

    Raises:
        SettingError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        hint = "Install it: pip install 'headway[plot]'."
        raise SettingError("--plot", str(path), "needs matplotlib, which is not installed", hint) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (latencies, departures) = pyplot.subplots(2, 1, figsize=(10, 8), layout="constrained")
    _draw_latencies(latencies, records)
    _draw_departures(departures, records)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise SettingError("--plot", str(path), f"cannot be written: {exc}", "For example waits.png.") from None
    finally:
        pyplot.close(figure)


def _draw_latencies(axes: Axes, records: Sequence[Record]) -> None:
    for record in records:
        if record.latency:
            axes.ecdf([seconds * 1000 for seconds in record.latency], label=record.scenario.policy, compress=True)
    promise = records[0].scenario.promise
    if promise is not None:
        axes.axvline(promise * 1000, color="grey", linestyle=":", label="promise")
    axes.axhline(0.95, color="lightgrey", linewidth=0.8)
    axes.set(xlabel="latency in ms", ylabel="share of answers", title="Latency", xlim=(0, None))
    axes.legend(loc="lower right")


def _draw_departures(axes: Axes, records: Sequence[Record]) -> None:
    scenario = records[0].scenario
    until = min(scenario.duration, scenario.warmup + SHOWN_BATCHES * scenario.cycle(scenario.max_batch))
    for row, record in enumerate(records):
        shown = [(at, size) for at, size in zip(record.left_at, record.size, strict=True) if at < until]
        axes.vlines(
            [at for at, _ in shown],
            [row] * len(shown),
            [row + 0.9 * size / scenario.max_batch for _, size in shown],
            color=f"C{row}",
            linewidth=1.2,
        )
    axes.set(xlabel="seconds", title="Departures: each line a batch, its height the fill", ylim=(0, len(records)))
    axes.set_yticks([row + 0.45 for row in range(len(records))], [record.scenario.policy for record in records])
