from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headway.model import Capacity, TierDepth, WorkerInfo, WorkerStatus
from headway.runtime.counters import Counters, Histogram
from headway.telemetry import metrics
from headway.telemetry.metrics import State

TIERS = ("enterprise", "paid", "free")

NAMES = {
    "headway_requests": ("counter", {"model", "tier", "outcome"}),
    "headway_request_seconds": ("histogram", {"model", "tier"}),
    "headway_queue_seconds": ("histogram", {"model", "tier"}),
    "headway_queue_depth": ("gauge", {"model", "tier"}),
    "headway_queue_oldest_seconds": ("gauge", {"model", "tier"}),
    "headway_batch_size": ("histogram", {"model"}),
    "headway_batches": ("counter", {"model", "reason"}),
    "headway_batch_fill_ratio": ("histogram", {"model"}),
    "headway_gpu_batch_seconds": ("histogram", {"model", "worker"}),
    "headway_gpu_utilization": ("gauge", {"model", "worker"}),
    "headway_workers": ("gauge", {"model", "status"}),
    "headway_capacity_items_per_second": ("gauge", {"model"}),
    "headway_capacity_estimated": ("gauge", {"model"}),
    "headway_throttle_per_second": ("gauge", {"model"}),
    "headway_broker_up": ("gauge", set()),
    "headway_worker_restarts": ("counter", {"worker"}),
    "headway_model_loads": ("counter", {"model", "worker"}),
    "headway_model_load_seconds": ("histogram", {"model"}),
    "headway_model_evictions": ("counter", {"reason"}),
    "headway_large_payloads": ("counter", {"direction", "way"}),
    "headway_refusals": ("counter", {"reason", "tier"}),
    "headway_input_policy": ("counter", {"rule", "effect"}),
    "headway_keys_age_seconds": ("gauge", set()),
    "headway_client_retries": ("counter", set()),
    "headway_shared": ("counter", {"model", "kind", "how"}),
    "headway_ledger_dropped": ("counter", set()),
    "headway_direct": ("counter", {"model"}),
    "headway_retries": ("counter", {"cause"}),
    "headway_dlq_depth": ("gauge", {"model"}),
    "headway_wasted_gpu_seconds": ("counter", {"cause"}),
    "headway_batching_overhead_seconds": ("histogram", set()),
    "headway_breaker_state": ("gauge", {"backend"}),
    "headway_tls_certificate_expiry_timestamp_seconds": ("gauge", set()),
    "headway_remote_certificate_expiry_timestamp_seconds": ("gauge", set()),
    "headway_tls_handshakes_failed": ("counter", {"port", "reason"}),
}


def full_state() -> State:
    counters = Counters()
    counters.requests["m", "paid", "ok"] = 7
    counters.request_seconds["m", "paid"].observe(0.15)
    counters.queue_seconds["m", "paid"].observe(0.05)
    counters.batch_size["m"].observe(32)
    counters.batch_fill["m"].observe(1.0)
    counters.batches["m", "full"] = 3
    counters.gpu_seconds["m", "gpu-0"].observe(0.1)
    counters.refusals["overloaded", "free"] = 5
    counters.input_policy["overrides", "refused"] = 6
    counters.keys_age = 0.25
    counters.certificate_ends = 1.8e9
    counters.remote_certificate_ends = 1.9e9
    counters.tls_failures["public", "no_certificate"] = 2
    counters.shared["m", "same", "joined"] = 9
    counters.client_retries = 10
    counters.ledger_dropped = 8
    counters.direct["m"] = 3
    counters.throttle["m"] = 140.0
    counters.retries["crashed"] = 2
    counters.wasted_seconds["departed"] = 0.25
    counters.overhead_seconds.observe(0.0007)
    counters.breaker_state["gpu-0"] = 2
    counters.worker_restarts["gpu-0"] = 4
    counters.model_loads["m", "m/gpu-0"] = 3
    counters.load_seconds["m"].observe(31.0)
    counters.model_evictions["cold"] = 2
    counters.large_payloads["in", "arena"] = 12
    workers = [
        WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, utilisation=0.5),
        WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.OFFLINE),
    ]
    capacities = [Capacity(model="m", healthy=1, degraded=0, items_per_second=320.0, usable_per_second=224.0)]
    return State(counters, TIERS, [TierDepth("m", 2, 11, 0.5)], workers, letters={"m": 6}, capacities=capacities)


def scraped(state: State) -> dict[str, Metric]:
    text = asyncio.run(metrics.exposition(state)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_has_its_name_type_and_labels() -> None:
    families = {name: family for name, family in scraped(full_state()).items() if name.startswith("headway_")}
    assert set(families) == set(NAMES)
    for name, (kind, labels) in NAMES.items():
        assert families[name].type == kind, name
        assert families[name].samples, name
        for sample in families[name].samples:
            assert set(sample.labels) - {"le"} == labels, name


@pytest.mark.parametrize(
    ("family", "labels", "value"),
    [
        ("requests", {"model": "m", "tier": "paid", "outcome": "ok"}, 7),
        ("queue_depth", {"model": "m", "tier": "free"}, 11),
        ("queue_oldest_seconds", {"model": "m", "tier": "free"}, 0.5),
        ("batches", {"model": "m", "reason": "full"}, 3),
        ("gpu_utilization", {"model": "m", "worker": "gpu-0"}, 0.5),
        ("workers", {"model": "m", "status": "healthy"}, 1),
        ("workers", {"model": "m", "status": "offline"}, 1),
        ("workers", {"model": "m", "status": "degraded"}, 0),
        ("worker_restarts", {"worker": "gpu-0"}, 4),
        ("model_loads", {"model": "m", "worker": "m/gpu-0"}, 3),
        ("model_evictions", {"reason": "cold"}, 2),
        ("large_payloads", {"direction": "in", "way": "arena"}, 12),
        ("refusals", {"reason": "overloaded", "tier": "free"}, 5),
        ("shared", {"model": "m", "kind": "same", "how": "joined"}, 9),
        ("client_retries", {}, 10),
        ("ledger_dropped", {}, 8),
        ("retries", {"cause": "crashed"}, 2),
        ("dlq_depth", {"model": "m"}, 6),
        ("wasted_gpu_seconds", {"cause": "departed"}, 0.25),
        ("breaker_state", {"backend": "gpu-0"}, 2),
    ],
)
def test_every_metric_shows_the_value_it_was_given(family: str, labels: dict[str, str], value: float) -> None:
    samples = scraped(full_state())[f"headway_{family}"].samples
    assert [sample.value for sample in samples if sample.labels == labels] == [value]


def test_what_is_no_metric_of_ours_is_the_process() -> None:
    assert {name for name in scraped(full_state()) if not name.startswith(("headway_", "process_"))} == set()


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_everything_once_and_cumulatively(values: list[float]) -> None:
    counters = Counters()
    for value in values:
        counters.request_seconds["m", "paid"].observe(value)
    counters.request_seconds["m", "paid"].observe(0.18)
    samples = scraped(State(counters, TIERS, [], [], {}))["headway_request_seconds"].samples
    buckets = {float(sample.labels["le"]): sample.value for sample in samples if sample.name.endswith("_bucket")}
    for bound, count in buckets.items():
        assert count == sum(value <= bound for value in [*values, 0.18]), bound
    assert buckets[math.inf] == len(values) + 1
    [total] = [sample.value for sample in samples if sample.name.endswith("_sum")]
    assert total == pytest.approx(sum(values) + 0.18)


def test_a_histogram_of_many_workers_is_one_family() -> None:
    counters = Counters()
    for number in range(30):
        counters.gpu_seconds["m", f"gpu-{number}"].observe(0.1)
    text = asyncio.run(metrics.exposition(State(counters, TIERS, [], [], {}))).decode()
    assert text.count("# TYPE headway_gpu_batch_seconds ") == 1
    assert text.count("# HELP headway_gpu_batch_seconds ") == 1
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "headway_gpu_batch_seconds"]
    workers = {sample.labels["worker"] for sample in family.samples}
    assert workers == {f"gpu-{number}" for number in range(30)}


def test_others_get_their_turn_during_a_scrape() -> None:
    counters = Counters()
    for number in range(100):
        counters.gpu_seconds["m", f"gpu-{number}"].observe(0.1)

    async def main() -> int:
        turns = 0
        scrape = asyncio.create_task(metrics.exposition(State(counters, TIERS, [], [], {})))
        while not scrape.done():
            turns += 1
            counters.gpu_seconds["m", f"late-{turns}"].observe(0.1)
            await asyncio.sleep(0)
        assert scrape.exception() is None
        return turns

    assert asyncio.run(main()) > len(NAMES)


def test_labels_with_any_text_survive() -> None:
    counters = Counters()
    counters.refusals['a"b\\c\nd', "ü"] = 1
    samples = scraped(State(counters, TIERS, [], [], {}))["headway_refusals"].samples
    assert samples[0].labels == {"reason": 'a"b\\c\nd', "tier": "ü"}


def test_the_empty_state_is_valid_text() -> None:
    families = scraped(State(Counters(), TIERS, [TierDepth("m", 0, 0, 0.0)], [], {}))
    assert families["headway_dlq_depth"].samples[0].value == 0
    assert not scraped(State(Counters(), TIERS, [], [], {}))["headway_dlq_depth"].samples


def test_histogram_bounds_ascend() -> None:
    for histogram in (Counters().overhead_seconds, Counters().batch_size["m"], Counters().batch_fill["m"]):
        assert isinstance(histogram, Histogram)
        assert list(histogram.bounds) == sorted(set(histogram.bounds))


def test_what_is_not_known_while_the_broker_is_away_is_left_out() -> None:
    counters = full_state().counters
    families = scraped(State(counters, TIERS, (), (), None, broker_up=False))
    assert [sample.value for sample in families["headway_broker_up"].samples] == [0]
    for name in ("queue_depth", "workers", "capacity_items_per_second", "dlq_depth"):
        assert not families[f"headway_{name}"].samples, name
    assert sum(sample.value for sample in families["headway_requests"].samples) == 7
    assert [sample.value for sample in scraped(full_state())["headway_broker_up"].samples] == [1]
