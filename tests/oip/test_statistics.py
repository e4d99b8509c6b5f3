from headway.oip.metadata import BatchStatistics, Duration, InferenceStatistics, statistics_of
from headway.runtime.counters import GatewayCounts

SECOND = 1_000_000_000


def test_nothing_has_happened_at_first() -> None:
    nothing = statistics_of(GatewayCounts(), "m", "1", lambda: 5.0, lambda: 1e9)
    assert (nothing.last_inference, nothing.inference_count, nothing.execution_count) == (0, 0, 0)
    assert nothing.inference_stats.success == nothing.inference_stats.fail == Duration(0, 0)
    assert nothing.batch_stats == ()


def test_the_counters_of_one_model_are_added_up_over_its_tiers() -> None:
    counters = GatewayCounts()
    for model in ("m", "other"):
        counters.requests[model, "paid", "ok"] = 5
        counters.requests[model, "free", "ok"] = 2
        counters.requests[model, "free", "cancelled"] = 1
        counters.requests[model, "paid", "backend_error"] = 1
        counters.request_seconds[model, "paid"].observe_all([1.0, 1.0, 2.0])
        counters.request_seconds[model, "free"].observe(0.5)
        counters.failed_seconds[model] = 2.0
        counters.queue_seconds[model, "paid"].observe_all([0.25, 0.25])
        counters.shared[model, "same", "kept"] = 3
        for size, seconds in ((2, 0.5), (1, 0.25)):
            counters.runs[model, size].count += 1
            counters.runs[model, size].seconds += seconds
        counters.last_answer[model] = 90.0
    found = statistics_of(counters, "m", "7", lambda: 100.0, lambda: 1e9)
    assert (found.name, found.version) == ("m", "7")
    assert found.last_inference == (1_000_000_000 - 10) * 1000
    assert (found.inference_count, found.execution_count) == (4, 2)
    stats = found.inference_stats
    assert stats.success == Duration(7, 2 * SECOND + SECOND // 2)
    assert stats.fail == Duration(2, 2 * SECOND)
    assert stats.queue == Duration(2, SECOND // 2)
    assert stats.compute_infer == Duration(2, 3 * SECOND // 4)
    assert stats.cache_hit == Duration(3, 0)
    assert [(one.batch_size, one.compute_infer) for one in found.batch_stats] == [
        (1, Duration(1, SECOND // 4)),
        (2, Duration(1, SECOND // 2)),
    ]
    alike: list[InferenceStatistics | BatchStatistics] = [stats, *found.batch_stats]
    for one in alike:  # Otherwise Triton's perf_analyzer exits: its counts "must be the same".
        assert one.compute_input.count == one.compute_infer.count == one.compute_output.count > 0
        assert one.compute_input.ns == one.compute_output.ns == 0
