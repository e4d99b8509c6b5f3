"""Draws the picture for docs/padding.md: P95 by requests per second of a model that pads, first come and with similar lengths together.

    python bench/simulated/padding_plot.py --traces DIR     lengths of the Azure trace conv, see traces.py; needs matplotlib

Two simulated GPUs run batches of at most 32 inputs. A mean batch without padding takes 50 ms, of which α is 8.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.simulated.fit import read_lengths
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import QueueRules, Scenario

RATES = range(100, 1_250, 50)
ALPHA, SECONDS, MAX_BATCH = 0.008, 0.05, 32
PROMISE_MS, HIGHEST_MS = 200, 600
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "padding.svg"


def main() -> int:
    parser = argparse.ArgumentParser(description="P95 of a model that pads, before and after.")
    parser.add_argument("--traces", type=Path, metavar="DIR", required=True, help="where the Azure traces lie")
    lengths = read_lengths(parser.parse_args().traces)["conv"]
    beta = (SECONDS - ALPHA) / MAX_BATCH / statistics.fmean(lengths)
    scenario = Scenario(
        rate=1.0, workers=2, alpha=ALPHA, beta=beta, max_batch=MAX_BATCH, weights=lengths, padded=True, warmup=20.0, duration=35.0,
        queue=QueueRules(queue_timeout=60.0, timeout=60.0, max_queue=100_000),
    )  # fmt: skip
    before, after = _p95(replace(scenario, first_come=True)), _p95(scenario)
    _draw(before, after)
    for name, curve in (("first come", before), ("of like length", after)):
        print(f"{name}: {', '.join(f'{rate}/s {p95:.0f} ms' for rate, p95 in curve)}")
    return 0


def _p95(scenario: Scenario) -> list[tuple[int, float]]:
    """Return P95 in ms by rate, up to the first that is too high to show."""
    curve = list[tuple[int, float]]()
    for rate in RATES:
        latency = sorted(simulate(replace(scenario, rate=float(rate))).latency)
        curve.append((rate, percentile(latency, 0.95) * 1000.0))
        if curve[-1][1] > HIGHEST_MS:
            break
    return curve


def _draw(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> None:
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "padding", "font.family": "sans-serif"})
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*before, strict=True), color="#b4443c", label="before: first come, first served")
    axes.plot(*zip(*after, strict=True), color="#1f6f4a", label="after: of like length together, cut into calls")
    axes.axhline(PROMISE_MS, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xlabel="requests a second", ylabel="P95, ms", xlim=(0, RATES[-1]), ylim=(0, HIGHEST_MS))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
