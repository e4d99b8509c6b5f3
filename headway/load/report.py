"""Report of a load test: percentiles, rates and outcomes, made from its record.

Times are in milliseconds here, as people read them. Percentiles come from HdrHistogram with three significant
digits, so they are exact to 0.1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from hdrh.histogram import HdrHistogram

from headway.load.record import Record, Stream
from headway.load.spec import LoadSpec

_HIGHEST_US = 3_600_000_000
_DIGITS = 3


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of times in milliseconds; all 0 when `count` is 0."""

    count: int
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = msgspec.field(default=0.0, name="p99.9")
    max: float = 0.0


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the requests of one tier, or of all.

    Attributes:
        requests: requests that fell due.
        answered: requests that got a 2xx answer.
        refused: requests that got 429 or 503.
        failed: requests that got any other status, or no answer.
        answered_rate: 2xx answers per second, until the last answer came.
        in_time: 2xx answers within the promise; null without a promise.
        goodput: answers within the promise per second of the load's duration; null without a promise.
        latency_ms: milliseconds from the due instant to a 2xx answer.
        refusal_ms: milliseconds from the due instant to a refusal.
        refused_without_retry_after: refusals that did not say when to come back.
        outcomes: count of every outcome; `ok` for 2xx, else status and error code, or what befell the connection. Their
            sum is `requests`.
    """

    requests: int
    answered: int
    refused: int
    failed: int
    answered_rate: float
    in_time: int | None
    goodput: float | None
    latency_ms: Latency
    refusal_ms: Latency
    refused_without_retry_after: int
    outcomes: dict[str, int]


class Self(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the generator itself.

    Attributes:
        lag_ms: milliseconds after its due instant at which the generator got to each request; part of every latency.
        cpu_us_per_request: CPU time, user and system, in microseconds.
        cpu_share: share of one core it used.
        connections_opened, connections_peak: connections in all, and at once.
        waited_for_connection: requests that found no free connection when they were due.
    """

    lag_ms: Latency
    cpu_us_per_request: float
    cpu_share: float
    connections_opened: int
    connections_peak: int
    waited_for_connection: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a load test.

    Attributes:
        command: command line, API keys left out.
        started_at: ISO 8601, UTC.
        url, rate, duration_s, arrivals, seed, promise_ms, expect: as ordered.
        interrupted: whether it was stopped before its time.
        arrivals_cv: coefficient of variation of the gaps between due instants: 0 even, about 1 Poisson.
        offered_rate: requests that fell due, per second.
        elapsed_s: seconds from the start until every request had its outcome.
        total: figures of all requests.
        tiers: figures of each tier, when there is a mix.
        mismatches: 2xx answers that are not the right answer to their request; null when not checked.
        mismatched: the first few of them.
        generator: measurements of the generator itself.
    """

    command: list[str]
    started_at: str
    url: str
    rate: float
    duration_s: float
    arrivals: str
    seed: int
    promise_ms: float | None
    expect: str
    interrupted: bool
    arrivals_cv: float
    offered_rate: float
    elapsed_s: float
    total: Flow
    tiers: dict[str, Flow]
    mismatches: int | None
    mismatched: list[str]
    generator: Self

    @property
    def unreached(self) -> bool:
        """Whether not one request got an answer of any status."""
        return self.total.requests > 0 and not any(
            label == "ok" or label[:3].isdigit() for label in self.total.outcomes
        )


def make_report(spec: LoadSpec, record: Record, command: Sequence[str], started_at: str) -> Report:
    """Make the report of a finished load test. `command` and `started_at` are passed on as they are."""
    seconds = min(spec.duration, record.elapsed) if record.interrupted else spec.duration
    until = max(seconds, record.last_answer)
    target, requests = spec.target, len(record.dues)
    return Report(
        command=list(command),
        started_at=started_at,
        url=target.url,
        rate=spec.rate,
        duration_s=spec.duration,
        arrivals=spec.arrivals,
        seed=spec.seed,
        promise_ms=None if spec.promise is None else spec.promise * 1000,
        expect=spec.expect,
        interrupted=record.interrupted,
        arrivals_cv=record.variation,
        offered_rate=requests / seconds,
        elapsed_s=record.elapsed,
        total=_flow(record.streams, requests, spec.promise, seconds, until),
        tiers={
            stream.name: _flow([stream], sent, spec.promise, seconds, until)
            for stream, sent in zip(record.streams, record.sent, strict=True)
            if spec.mix
        },
        mismatches=None if spec.expect == "none" else record.mismatches,
        mismatched=record.mismatched,
        generator=Self(
            lag_ms=_latency([record.lags]),
            cpu_us_per_request=record.cpu / requests * 1e6 if requests else 0.0,
            cpu_share=record.cpu / record.elapsed if record.elapsed else 0.0,
            connections_opened=record.opened,
            connections_peak=record.peak,
            waited_for_connection=record.waited,
        ),
    )


def to_json(report: Report) -> bytes:
    """Report as indented JSON, with a line feed at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _flow(streams: Sequence[Stream], requests: int, promise: float | None, seconds: float, until: float) -> Flow:
    answered = sum(len(stream.answered) for stream in streams)
    refused = sum(len(stream.refused) for stream in streams)
    outcomes: Counter[str] = Counter()
    for stream in streams:
        outcomes.update(stream.failed)
    failed = outcomes.total() - refused
    if answered:
        outcomes["ok"] = answered
    in_time = None
    if promise is not None:
        in_time = sum(latency <= promise for stream in streams for latency in stream.answered)
    return Flow(
        requests=requests,
        answered=answered,
        refused=refused,
        failed=failed,
        answered_rate=answered / until,
        in_time=in_time,
        goodput=None if in_time is None else in_time / seconds,
        latency_ms=_latency([stream.answered for stream in streams]),
        refusal_ms=_latency([stream.refused for stream in streams]),
        refused_without_retry_after=sum(stream.refused_without_retry_after for stream in streams),
        outcomes=dict(outcomes.most_common()),
    )


def _latency(series: Iterable[Sequence[float]]) -> Latency:
    # Equal values are counted first, which is fast; the histogram then takes each value once, with its count.
    counts: Counter[int] = Counter()
    for seconds in series:
        counts.update([max(1, round(value * 1e6)) for value in seconds])
    if not counts:
        return Latency(count=0)
    largest = max(counts) / 1000.0
    histogram = HdrHistogram(1, _HIGHEST_US, _DIGITS)
    for value, count in counts.items():
        histogram.record_value(min(value, _HIGHEST_US), count)
    found = histogram.get_percentile_to_value_dict([50.0, 90.0, 95.0, 99.0, 99.9])
    p50, p90, p95, p99, p999 = (min(found[key] / 1000.0, largest) for key in (50.0, 90.0, 95.0, 99.0, 99.9))
    return Latency(
        count=counts.total(),
        mean=sum(value * count for value, count in counts.items()) / counts.total() / 1000.0,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=largest,
    )
