"""Text of metrics: Prometheus' own, and OpenMetrics'. prometheus_client writes both, too, but brings HTTP servers, which no process needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from headway.runtime.counters import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of Prometheus text."""
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Media type of OpenMetrics text."""

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
"""Types of metrics."""

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Labels = Sequence[tuple[str, str]]
"""Names of labels with their values."""


def head(kind: str, name: str, text: str, *, openmetrics: bool) -> str:
    """Write the head of a metric, whose name is without `_total`. `text`: its meaning, without escapes."""
    shown = f"{name}_total" if kind is COUNTER and not openmetrics else name
    return f"# HELP {shown} {text}\n# TYPE {shown} {kind}\n"


def line(name: str, labels: str, value: float) -> str:
    """Write one sample; for `labels` see `label_text`."""
    return f"{name}{labels} {number(value)}\n"


def label_text(labels: Labels) -> str:
    """Write labels, in the order of their names; empty for none."""
    return (
        "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels)) + "}"
        if labels
        else ""
    )


def histogram_lines(name: str, labels: Labels, values: Histogram, *, exemplars: bool) -> Iterator[str]:
    """Write the samples of a histogram, with exemplars in its buckets or without."""
    bounds = [*map(str, map(float, values.bounds)), "+Inf"]
    for place, (bound, count) in enumerate(zip(bounds, accumulate(values.counts), strict=True)):
        bucket = line(f"{name}_bucket", label_text((*labels, ("le", bound))), count)
        if exemplars and place in values.exemplars:
            value, trace_id, at = values.exemplars[place]
            bucket = f'{bucket[:-1]} # {{trace_id="{trace_id}"}} {number(value)} {at}\n'
        yield bucket
    shown = label_text(labels)
    yield line(f"{name}_count", shown, values.count)
    yield line(f"{name}_sum", shown, values.sum)


def number(value: float) -> str:
    """Write a number as Prometheus does, which is Go's way: with an exponent from a million on."""
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    whole, _, rest = text.partition(".")
    if value > 0 and len(whole) > 6 and rest:
        mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
        return f"{mantissa}e+{len(whole) - 1:02d}"
    return text
