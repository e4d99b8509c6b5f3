import asyncio
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from headway import errors
from headway.core import failures
from headway.core.admission import Refused
from headway.core.input_policy import Effect
from headway.model import (
    Capacity,
    CostLine,
    CostShape,
    GpuFigures,
    ProcessInfo,
    Role,
    Scaling,
    TierDepth,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.counters import Counters
from headway.telemetry import metrics
from headway.telemetry.figures import FleetState, ProcessFigures, State
from tests.core.test_rollout import PLAN

TIERS = ("enterprise", "paid", "free")

FAMILIES: dict[str, tuple[str, dict[str, str], float]] = {
    "requests": ("counter", {"model": "m", "tier": "paid", "outcome": "ok"}, 7),
    "request_seconds": ("histogram", {"model": "m", "tier": "paid"}, 1),
    "queue_seconds": ("histogram", {"model": "m", "tier": "paid"}, 1),
    "queue_depth": ("gauge", {"model": "m", "tier": "free"}, 11),
    "queue_oldest_seconds": ("gauge", {"model": "m", "tier": "free"}, 0.5),
    "bulk_waiting": ("gauge", {"model": "m"}, 0),
    "bulk_delayed_requests": ("counter", {"model": "m"}, 0),
    "batch_size": ("histogram", {"model": "m"}, 1),
    "batches": ("counter", {"model": "m", "reason": "full"}, 3),
    "inputs": ("counter", {"model": "m", "version": "8", "outcome": "item"}, 19),
    "batch_fill_ratio": ("histogram", {"model": "m"}, 1),
    "gpu_batch_seconds": ("histogram", {"model": "m", "worker": "gpu-0"}, 1),
    "gpu_utilization": ("gauge", {"model": "m", "worker": "gpu-0"}, 0.5),
    "gpu_memory_used_bytes": ("gauge", {"model": "m", "worker": "gpu-0"}, 61),
    "gpu_memory_total_bytes": ("gauge", {"model": "m", "worker": "gpu-0"}, 80),
    "gpu_device_utilization": ("gauge", {"model": "m", "worker": "gpu-0"}, 0.7),
    "gpu_power_watts": ("gauge", {"model": "m", "worker": "gpu-0"}, 310.5),
    "gpu_temperature_celsius": ("gauge", {"model": "m", "worker": "gpu-0"}, 62),
    "gpu_lost": ("gauge", {"model": "m", "worker": "gpu-0"}, 1),
    "gpu_ecc_errors": ("counter", {"model": "m", "worker": "gpu-0"}, 3),
    "gpu_xid_errors": ("counter", {"model": "m", "worker": "gpu-0", "cause": "model"}, 1),
    "workers": ("gauge", {"model": "m", "status": "healthy"}, 1),
    "padded_models": ("gauge", {"model": "m"}, 1),
    "capacity_items_per_second": ("gauge", {"model": "m"}, 320.0),
    "capacity_estimated": ("gauge", {"model": "m"}, 0),
    "desired_workers": ("gauge", {"model": "m"}, 3),
    "scaling_decisions": ("counter", {"model": "m", "direction": "up"}, 17),
    "rollout_changes": ("counter", {"model": "m", "change": "step"}, 19),
    "rollout_share": ("gauge", {"model": "m", "version": "4"}, 0.01),
    "rollout_rolled_back": ("gauge", {"model": "m", "version": "4"}, 0),
    "throttle_per_second": ("gauge", {"model": "m"}, 140.0),
    "broker_up": ("gauge", {}, 1),
    "worker_restarts": ("counter", {"worker": "gpu-0"}, 4),
    "bulk_kills": ("counter", {"worker": "gpu-0"}, 1),
    "model_loads": ("counter", {"model": "m", "worker": "m/gpu-0"}, 3),
    "model_load_seconds": ("histogram", {"model": "m"}, 1),
    "model_evictions": ("counter", {"reason": "cold"}, 2),
    "large_payloads": ("counter", {"direction": "in", "way": "arena"}, 12),
    "refusals": ("counter", {"reason": "overloaded", "tier": "free", "model": "m"}, 5),
    "build_info": ("gauge", {"version": "1.2.3"}, 1),
    "draining": ("gauge", {}, 0),
    "leader": ("gauge", {}, 1),
    "broker_call_seconds": ("histogram", {}, 1),
    "broker_call_failures": ("counter", {}, 11),
    "trace_spans_dropped": ("counter", {"reason": "queue"}, 13),
    "broker_memory_bytes": ("gauge", {}, 1000),
    "broker_memory_limit_bytes": ("gauge", {}, 5000),
    "open_connections": ("gauge", {"port": "public"}, 13),
    "pending_requests": ("gauge", {}, 14),
    "promise_seconds": ("gauge", {}, 0.2),
    "bulk_jobs": ("gauge", {"status": "in_progress"}, 4),
    "bulk_paused": ("gauge", {}, 1),
    "bulk_lines": ("counter", {"outcome": "answered"}, 6),
    "ledger_backlog": ("gauge", {}, 15),
    "expected_workers": ("gauge", {}, 4),
    "min_workers": ("gauge", {"model": "m"}, 2),
    "max_workers": ("gauge", {"model": "m"}, 5),
    "processes": ("gauge", {"process_role": "controller"}, 1),
    "capacity_usable_items_per_second": ("gauge", {"model": "m"}, 224.0),
    "dead_letters": ("counter", {"model": "m"}, 16),
    "input_policy": ("counter", {"rule": "overrides", "effect": "refused"}, 6),
    "keys_age_seconds": ("gauge", {}, 0.25),
    "client_retries": ("counter", {}, 10),
    "shared": ("counter", {"model": "m", "kind": "same", "how": "joined"}, 9),
    "tokens": ("counter", {"model": "m", "tenant": "acme", "how": "run"}, 21),
    "ledger_dropped": ("counter", {}, 8),
    "direct": ("counter", {"model": "m"}, 3),
    "retries": ("counter", {"cause": "crashed"}, 2),
    "dlq_depth": ("gauge", {"model": "m"}, 6),
    "wasted_gpu_seconds": ("counter", {"cause": "departed"}, 0.25),
    "batching_overhead_seconds": ("histogram", {}, 1),
    "breaker_state": ("gauge", {"backend": "gpu-0"}, 2),
    "tls_certificate_expiry_timestamp_seconds": ("gauge", {}, 1800000000.0),
    "remote_certificate_expiry_timestamp_seconds": ("gauge", {}, 1900000000.0),
    "tls_handshakes_failed": ("counter", {"port": "public", "reason": "no_certificate"}, 2),
}
"""The type of each metric, and the labels and value of one of its series in `full_state` (for a histogram, its observations)."""
MORE: list[tuple[str, dict[str, str], float]] = [
    ("gpu_lost", {"model": "m", "worker": "gpu-1"}, 0),
    ("gpu_xid_errors", {"model": "m", "worker": "gpu-0", "cause": "gpu"}, 4),
    ("workers", {"model": "m", "status": "offline"}, 1),
    ("workers", {"model": "m", "status": "degraded"}, 0),
    ("refusals", {"reason": "overloaded", "tier": "paid", "model": "m"}, 0),
    ("processes", {"process_role": "gateway"}, 0),
    ("scaling_decisions", {"model": "m", "direction": "down"}, 0),
    ("rollout_changes", {"model": "m", "change": "rolled back"}, 0),
]
"""More series."""

GPU = GpuFigures(
    memory_used=61, memory_total=80, utilisation=0.7, power=310.5, temperature=62, ecc_errors=3, xids={31: 1, 94: 2, 79: 2}, lost="gone"
)  # fmt: skip
NEW_GPU = GpuFigures(memory_used=0, memory_total=80, utilisation=0.0, power=0.0, temperature=30, ecc_errors=0)


def full_state() -> State:
    counters = Counters()
    counters.gateway.requests["m", "paid", "ok"] = 7
    counters.gateway.request_seconds["m", "paid"].observe(0.15)
    counters.gateway.queue_seconds["m", "paid"].observe(0.05)
    counters.worker.batch_size["m"].observe(32)
    counters.worker.batch_fill["m"].observe(1.0)
    counters.worker.batches["m", "full"] = 3
    counters.worker.inputs["m", "8", "item"] = 19
    counters.worker.gpu_seconds["m", "gpu-0"].observe(0.1)
    counters.gateway.refusals["overloaded", "free", "m"] = 5
    counters.input_policy["overrides", "refused"] = 6
    counters.store.keys_age = 0.25
    counters.tls.ends = 1.8e9
    counters.tls.remote_ends = 1.9e9
    counters.tls.failures["public", "no_certificate"] = 2
    counters.gateway.shared["m", "same", "joined"] = 9
    counters.gateway.tokens["m", "acme", "run"] = 21
    counters.gateway.client_retries = 10
    counters.store.ledger_dropped = 8
    counters.bulk_lines["answered"] = 6
    counters.gateway.direct["m"] = 3
    counters.gateway.throttle["m"] = 140.0
    counters.broker.retries["crashed"] = 2
    counters.worker.wasted_seconds["departed"] = 0.25
    counters.gateway.overhead_seconds.observe(0.0007)
    counters.worker.breaker_state["gpu-0"] = 2
    counters.worker.restarts["gpu-0"] = 4
    counters.worker.bulk_kills["gpu-0"] = 1
    counters.worker.loads["m", "m/gpu-0"] = 3
    counters.worker.load_seconds["m"].observe(31.0)
    counters.worker.evictions["cold"] = 2
    counters.worker.large_payloads["in", "arena"] = 12
    counters.broker.call_seconds.observe(0.0008)
    counters.broker.call_failures = 11
    counters.spans_dropped["queue"] = 13
    counters.controller.scaling_decisions["m", "up"] = 17
    counters.controller.rollout_changes["m", "step"] = 19
    cost = CostLine(CostShape.PADDED, 0.008, 1e-6, 900.0)
    workers = [
        WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.HEALTHY, utilisation=0.5, cost=cost),
        WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.OFFLINE, reason="no heartbeat"),
    ]
    scaling = Scaling(desired=3, current=1, least=2, most=5)
    capacity = Capacity(
        model="m", healthy=1, degraded=0, items_per_second=320.0, usable_per_second=224.0, scaling=scaling, rollout=PLAN
    )
    own = ProcessFigures(
        TIERS,
        ["m"],
        version="1.2.3",
        connections={"public": 13},
        pending=14,
        promise=0.2,
        ledger_backlog=15,
        bulk_jobs={"in_progress": 4},
        bulk_paused=1,
        slots={("m", "gpu-0"): 0.5},
        gpus={("m", "gpu-0"): GPU, ("m", "gpu-1"): GpuFigures()},
        leader=True,
    )
    fleet = FleetState(
        [TierDepth("m", 2, 11, 0.5)],
        workers,
        {"m": 6},
        {"m": 16},
        [capacity],
        [ProcessInfo(id="c", role=Role.CONTROLLER, host="h", pid=1)],
        expected=4,
        memory=(1_000, 5_000),
    )
    return State(counters, own, fleet)


def state_of(counters: Counters) -> State:
    return State(counters, ProcessFigures(TIERS, ["m"], pending=0))


def scraped(state: State) -> dict[str, Metric]:
    text = asyncio.run(metrics.exposition(state)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_has_its_name_type_labels_and_value() -> None:
    families = {name: family for name, family in scraped(full_state()).items() if not name.startswith("process_")}
    assert set(families) == {f"headway_{name}" for name in FAMILIES}
    for name, (kind, labels, value) in FAMILIES.items():
        family = families[f"headway_{name}"]
        assert family.type == kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels.keys(), name
        assert values(family, labels) == [value], name
    for name, labels, value in MORE:
        assert values(families[f"headway_{name}"], labels) == [value], (name, labels)


def values(family: Metric, labels: dict[str, str]) -> list[float]:
    series = [sample for sample in family.samples if sample.labels == labels]
    return [sample.value for sample in series if not sample.name.endswith(("_created", "_sum"))]


def test_what_is_not_known_of_a_gpu_has_no_series() -> None:
    families = scraped(full_state())
    watched = ("memory_used_bytes", "memory_total_bytes", "device_utilization", "power_watts", "temperature_celsius")
    for name in (*watched, "ecc_errors"):
        assert {one.labels["worker"] for one in families[f"headway_gpu_{name}"].samples} == {"gpu-0"}, name


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_everything_once_and_cumulatively(values: list[float]) -> None:
    counters = Counters()
    for value in values:
        counters.gateway.request_seconds["m", "paid"].observe(value)
    counters.gateway.request_seconds["m", "paid"].observe(0.18)
    samples = scraped(state_of(counters))["headway_request_seconds"].samples
    samples = [sample for sample in samples if sample.labels["tier"] == "paid"]
    buckets = {float(sample.labels["le"]): sample.value for sample in samples if sample.name.endswith("_bucket")}
    for bound, count in buckets.items():
        assert count == sum(value <= bound for value in [*values, 0.18]), bound
    assert buckets[math.inf] == len(values) + 1
    [total] = [sample.value for sample in samples if sample.name.endswith("_sum")]
    assert total == pytest.approx(sum(values) + 0.18)


def test_a_histogram_of_many_workers_is_one_family() -> None:
    counters = Counters()
    for number in range(30):
        counters.worker.gpu_seconds["m", f"gpu-{number}"].observe(0.1)
    text = asyncio.run(metrics.exposition(state_of(counters))).decode()
    assert text.count("# TYPE headway_gpu_batch_seconds ") == 1
    assert text.count("# HELP headway_gpu_batch_seconds ") == 1
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "headway_gpu_batch_seconds"]
    workers = {sample.labels["worker"] for sample in family.samples}
    assert workers == {f"gpu-{number}" for number in range(30)}


def test_others_get_their_turn_during_a_scrape() -> None:
    counters = Counters()
    for number in range(100):
        counters.worker.gpu_seconds["m", f"gpu-{number}"].observe(0.1)

    async def main() -> int:
        turns = 0
        scrape = asyncio.create_task(metrics.exposition(state_of(counters)))
        while not scrape.done():
            turns += 1
            counters.worker.gpu_seconds["m", f"late-{turns}"].observe(0.1)
            await asyncio.sleep(0)
        assert scrape.exception() is None
        return turns

    assert asyncio.run(main()) > len(FAMILIES)


def test_labels_with_any_text_survive() -> None:
    counters = Counters()
    counters.gateway.refusals['a"b\\c\nd', "ü", "m"] = 1
    samples = scraped(state_of(counters))["headway_refusals"].samples
    assert [one.labels for one in samples if one.value] == [{"reason": 'a"b\\c\nd', "tier": "ü", "model": "m"}]


def test_every_series_is_there_from_the_start_with_nothing_counted() -> None:
    own = ProcessFigures(
        TIERS,
        ["m", "other"],
        connections={"admin": 0},
        pending=0,
        promise=0.2,
        fallbacks=["m"],
        rules=["words"],
        ledger_backlog=0,
        bulk_jobs={"in_progress": 0},
        bulk_paused=0,
        slots={("m", "gpu-0"): 0.0},
        gpus={("m", "gpu-0"): NEW_GPU},
        versions=[("m", "8")],
        leader=False,
        secure=["public"],
    )
    families = scraped(State(Counters(), own, FleetState(memory=(0, 1))))
    ends = ("tls_certificate_expiry_timestamp_seconds", "remote_certificate_expiry_timestamp_seconds")
    of_rollouts = ("rollout_share", "rollout_rolled_back")
    later = {f"headway_{name}" for name in ("throttle_per_second", "keys_age_seconds", "tokens", *of_rollouts, *ends)}
    assert {name for name, family in families.items() if name.startswith("headway_") and not family.samples} == later
    busy = full_state()
    for name, family in scraped(State(busy.counters, own, busy.fleet)).items():
        before = {(one.name, *sorted(one.labels.items())) for one in families[name].samples}
        after = {(one.name, *sorted(one.labels.items())) for one in family.samples}
        made_up = {key for key in after - before if ("rule", "overrides") in key or ("worker", "m/gpu-0") in key}
        assert name in later or after - before == made_up, name


def test_no_label_that_is_counted_is_missing_from_the_start() -> None:
    assert {code.lower() for code in errors.REFUSALS} - set(metrics.OUTCOMES) == {
        "unauthenticated",
        *(code.lower() for code in errors.SHOWN),
    } & {"unauthenticated", "scarce"}
    assert {*metrics.REFUSED, *metrics.REFUSED_UNREAD, *metrics.REFUSED_STRANGERS} >= {
        failures.POLICY, failures.CULPRIT, failures.over_capacity(1.0).reason, failures.scarcity(1.0).reason,
        failures.conflict().reason, failures.refusal(Refused(1.0, tier_only=True)).reason,
        failures.refusal(Refused(1.0, tier_only=False)).reason, failures.refusal(Refused(1.0, False, most=3)).reason, failures.not_here("m").reason,
    }  # fmt: skip
    assert set(metrics.EFFECTS) == {effect.value for effect in Effect}


def test_a_model_that_is_served_no_longer_has_no_series() -> None:
    state = full_state()
    own = msgspec.structs.replace(state.own, models=["other"], slots=None)
    state.counters.gateway.throttle["m"] = 3.0
    fleet = FleetState([TierDepth("m", 0, 0, 0.0)], [], {}, {"m": 16}, state.fleet.capacities if state.fleet else ())
    families = scraped(State(state.counters, own, fleet))
    by_gateways = (
        "requests",
        "request_seconds",
        "queue_seconds",
        "refusals",
        "shared",
        "direct",
        "throttle_per_second",
    )
    of_fleet = ("queue_depth", "queue_oldest_seconds", "workers", "capacity_items_per_second", "capacity_estimated")
    for name in (*by_gateways, *of_fleet, "capacity_usable_items_per_second", "dlq_depth", "dead_letters"):
        assert not [one for one in families[f"headway_{name}"].samples if one.labels["model"] == "m"], name


def test_a_model_that_is_served_no_longer_keeps_the_series_of_its_dead_letters() -> None:
    own = ProcessFigures(TIERS, ["other"])
    families = scraped(
        State(Counters(), own, FleetState(letters={"m": 1, "gone": 0}, letters_ever={"m": 4, "gone": 2}))
    )
    assert {one.labels["model"]: one.value for one in families["headway_dlq_depth"].samples} == {"m": 1, "other": 0}
    ever = [one for one in families["headway_dead_letters"].samples if one.name.endswith("_total")]
    assert {one.labels["model"]: one.value for one in ever} == {"m": 4, "other": 0}


def test_a_model_without_workers_has_an_explicit_zero_and_who_was_told_to_stop_is_no_loss() -> None:
    samples = scraped(State(Counters(), ProcessFigures(TIERS, ["m"]), FleetState()))["headway_workers"].samples
    assert {one.labels["status"]: one.value for one in samples} == {status.value: 0 for status in WorkerStatus}
    left = WorkerInfo(worker_id="gpu-0", model="m", status=WorkerStatus.OFFLINE)
    lost = WorkerInfo(worker_id="gpu-1", model="m", status=WorkerStatus.OFFLINE, reason="no heartbeat")
    samples = scraped(State(Counters(), ProcessFigures(TIERS), FleetState(workers=[left, lost])))[
        "headway_workers"
    ].samples
    assert {one.labels["status"]: one.value for one in samples if one.value} == {"offline": 1}


def test_a_worker_goes_by_the_label_that_its_process_gives_it() -> None:
    state = full_state()
    own = msgspec.structs.replace(state.own, worker_label=lambda worker: f"host/{worker}")
    families = scraped(State(state.counters, own, state.fleet))
    for name, label in (("gpu_batch_seconds", "worker"), ("gpu_utilization", "worker"), ("breaker_state", "backend"),
                        ("worker_restarts", "worker"), ("bulk_kills", "worker"), ("model_loads", "worker")):  # fmt: skip
        found = {one.labels[label] for one in families[f"headway_{name}"].samples}
        assert found <= {"host/gpu-0", "host/m/gpu-0"}, name
        assert found, name


def test_figures_of_the_fleet_are_left_out_where_another_process_exports_them_or_the_broker_is_away() -> None:
    state = full_state()
    for broker_up in (True, False):
        families = scraped(State(state.counters, state.own, None, broker_up))
        assert [sample.value for sample in families["headway_broker_up"].samples] == [int(broker_up)]
        for name in (
            *("queue_depth", "queue_oldest_seconds", "workers", "expected_workers", "processes", "dlq_depth"),
            *("capacity_items_per_second", "capacity_usable_items_per_second", "capacity_estimated", "dead_letters"),
            *("broker_memory_bytes", "broker_memory_limit_bytes"),
        ):
            assert not families[f"headway_{name}"].samples, name
        counted = [one for one in families["headway_requests"].samples if one.name.endswith("_total")]
        assert sum(sample.value for sample in counted) == 7


def test_latencies_have_exemplars_in_openmetrics() -> None:
    state = full_state()
    state.counters.gateway.request_seconds["m", "paid"].exemplify(0.15, "0af7651916cd43dd8448eb211c80319c", 1.7e9)
    text = asyncio.run(metrics.exposition(state, exemplars=True)).decode()
    assert text.count("# EOF\n") == 1 and text.endswith("# EOF\n")
    found = {
        sample.labels["le"]: sample.exemplar
        for family in openmetrics_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.name == "headway_request_seconds_bucket" and sample.exemplar is not None
    }
    [(bound, exemplar)] = found.items()
    assert bound == "0.15"
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "0af7651916cd43dd8448eb211c80319c"}, 0.15)
    plain = asyncio.run(metrics.exposition(state)).decode()
    assert "trace_id=" not in plain and "# EOF" not in plain


def test_exemplars_are_for_those_who_ask() -> None:
    assert not any(map(metrics.asks_for_exemplars, ("", "text/plain;version=0.0.4", "*/*")))
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    assert metrics.asks_for_exemplars(prometheus)
