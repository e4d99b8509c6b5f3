"""Models of a fleet, as a gateway learns them from the reports of workers."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from structlog.testing import capture_logs

from headway.config import Settings, on_terms, terms_of
from headway.config.target import ModelSettings
from headway.core.health import SILENT_AFTER, UNKNOWN_FOR
from headway.fleet.models import MISSED_FOR, FleetModels
from headway.gateway.served_models import ServedModels
from headway.model import ModelReport, WorkerInfo, WorkerStatus
from headway.runtime.counters import ControllerCounts, GatewayCounts


def worker(model: str, id: str = "", status: WorkerStatus = WorkerStatus.HEALTHY, **own: object) -> WorkerInfo:
    target = str(own.pop("target", ""))
    settings = Settings(**own)  # type: ignore[arg-type]
    report = ModelReport(settings.model_version, target, terms_of(settings))
    return WorkerInfo(worker_id=id or f"{model}/gpu-0", model=model, status=status, runs=report)


def gone(*models: str, reason: str = "") -> list[WorkerInfo]:
    """Workers that have left, or went silent for a reason."""
    return [msgspec.structs.replace(worker(one, status=WorkerStatus.OFFLINE), reason=reason) for one in models]


class Known:
    """What a process was last told to serve."""

    def __init__(self, **settings: object) -> None:
        self.settings = Settings(**settings)  # type: ignore[arg-type]
        self.served = ServedModels(self.settings.served, self.settings)
        self.told = 0
        self.now = 0.0
        self.forgotten: list[str] = []
        self.models = FleetModels(self.settings, self._serve, lambda: self.now, self.forgotten.append)

    def _serve(self, served: Mapping[str, Settings]) -> None:
        self.told += 1
        self.served.serve(served)

    def learn(self, *workers: WorkerInfo) -> list[str]:
        self.models.learn(workers)
        self.served.learn(workers)
        return self.served.models


def test_models_come_and_go_with_their_workers() -> None:
    known = Known()
    assert known.learn() == ["default"]
    for _ in range(2):
        assert known.learn(worker("a"), worker("b")) == ["a", "b"], "nobody has named the model default"
    assert known.told == 1, "nothing is told while nothing changes"
    assert known.learn(worker("a"), *gone("b")) == ["a", "b"], "it may come back"
    assert known.learn(worker("a")) == ["a"]
    assert known.learn(*gone("a")) == ["a"], "it may come back"
    assert known.learn() == ["default"]


@pytest.mark.parametrize("back", [(), (worker("b"),)])
def test_a_model_lost_by_the_registry_is_served_while_workers_may_return(back: tuple[WorkerInfo, ...]) -> None:
    known = Known(default_model="a")
    known.learn(worker("a", max_batch_size=7), worker("b"))
    for _ in range(2):
        known.now += UNKNOWN_FOR / 2
        assert known.learn(*back) == ["a", "b"]
        assert (known.served.default, known.served["a"].settings.max_batch_size) == ("a", 7)
    assert known.learn(worker("a"), *back) == ["a", "b"]
    known.learn(*back)
    known.now += UNKNOWN_FOR
    assert known.learn(*back) == (["b"] if back else ["default"])


def test_which_models_there_are_is_in_doubt_until_the_registry_is_read_and_once_it_is_not_any_more() -> None:
    known = Known()
    assert known.models.in_doubt()
    known.learn(worker("a"))
    known.now += SILENT_AFTER
    assert not known.models.in_doubt()
    known.now += 0.1
    assert known.models.in_doubt()
    known.learn()
    assert not known.models.in_doubt()


@pytest.mark.parametrize(("settings", "at_first"), [({}, []), ({"model": "own"}, ["own"])])
def test_a_process_that_takes_no_requests_presumes_no_model(settings: dict[str, str], at_first: list[str]) -> None:
    known: list[list[str]] = []
    own = Settings(**settings)  # type: ignore[arg-type]
    models = FleetModels(own, lambda it: known.append(sorted(it)), lambda: 0.0, lambda model: None, presumes=False)
    assert sorted(models.served) == sorted(models.named) == at_first
    for workers in ([worker("default")], gone("default"), []):
        models.learn(workers)
    assert known == [sorted([*at_first, "default"]), at_first]


SILENT, TOLD_TO_STOP = "not heard of for 10 s", ""


@pytest.mark.parametrize(("reason", "missed"), [(SILENT, ["a", "b"]), (TOLD_TO_STOP, ["b"])])
def test_a_model_whose_last_workers_went_silent_is_missed_for_an_hour(reason: str, missed: list[str]) -> None:
    known = Known()
    known.learn(worker("a"), worker("b"))
    known.learn(*gone("a", reason=reason), worker("b"))
    assert sorted(known.models.counted) == ["a", "b"]
    assert known.learn(worker("b")) == ["b"], "it is served no more"
    for _ in range(3):
        assert sorted(known.models.counted) == missed
        known.now += MISSED_FOR / 3
        known.learn(worker("b"))
    known.now += 1.0
    known.learn(worker("b"))
    assert sorted(known.models.counted) == ["b"]
    for workers in (gone("a", reason=SILENT), [], [worker("a")], gone("a"), []):
        known.learn(*workers, worker("b"))
    assert sorted(known.models.counted) == ["b"], "it came again, and its last worker was not silent"


def test_what_was_counted_of_a_model_is_forgotten_an_hour_after_it_was_served() -> None:
    known = Known(model="own")
    for workers in ([worker("a")], gone("a"), []):
        known.learn(*workers, worker("b"))
    known.now += MISSED_FOR
    known.learn(worker("b"))
    assert known.forgotten == []
    known.now += 1.0
    for _ in range(2):
        known.learn(worker("b"))
    assert known.forgotten == ["a"]
    for workers in ([worker("a")], gone("a"), [], [worker("a")]):
        known.learn(*workers, worker("b"))
    known.now += 2 * MISSED_FOR
    known.learn(worker("a"), worker("b"))
    assert known.forgotten == ["a"], "it is served again"


def test_a_model_that_is_gone_leaves_nothing_in_the_counters() -> None:
    counters, empty = GatewayCounts(), GatewayCounts()
    for model in ("a", "b"):
        counters.requests[model, "free", "ok"] += 1
        counters.request_seconds[model, "free"].observe(0.1)
        counters.queue_seconds[model, "free"].observe(0.1)
        counters.refusals["rate", "free", model] += 1
        counters.shared[model, "key", "kept"] += 1
        counters.runs[model, 3].count += 1
        counters.failed_seconds[model] += 1.0
        counters.last_answer[model] = 1.0
        counters.throttle[model] = 1.0
        counters.direct[model] += 1
    counters.forget("a")
    tables = {name: table for name, table in vars(counters).items() if isinstance(table, dict) and table}
    of_models = {name: table for name, table in tables.items() if not vars(empty)[name]}
    assert len(of_models) == 10
    assert all(len(table) == 1 for table in of_models.values())
    decided = ControllerCounts()
    for model in ("a", "b"):
        decided.scaling_decisions[model, "up"] += 1
    decided.forget("a")
    assert decided.scaling_decisions == {("b", "up"): 1}


def test_a_fallback_for_a_model_that_nobody_named_and_nobody_runs_is_warned_of() -> None:
    for settings, warned in (({"model": "own"}, False), ({}, True)):
        known = Known(broker="redis://127.0.0.1:1/0", fallback="spare.py:f", **settings)
        with capture_logs() as logs:
            for _ in range(2):
                known.learn(worker("a"))
        told = [(line["model"], line["models"]) for line in logs if line["log_level"] == "warning"]
        assert told == [("default", "a")] * warned


def test_a_learned_model_is_served_on_the_terms_of_its_workers() -> None:
    known = Known(queue_timeout_ms=1500.0)
    known.learn(
        worker("a", max_batch_size=100, cache=True), worker("b", request_timeout_ms=1000.0, queue_timeout_ms=500.0)
    )
    a, b = known.served["a"], known.served["b"]
    assert (a.settings.max_batch_size, a.sharing, a.queue_timeout) == (100, True, 1.5)
    assert (b.sharing, b.queue_timeout, b.longest) == (False, 0.5, 1.0)
    known.learn(worker("a", max_batch_size=50))
    assert known.served["a"].settings.max_batch_size == 50


def test_what_the_process_itself_says_of_a_model_holds() -> None:
    own = (ModelSettings("a", values=(("max_batch_size", 7),)),)
    known = Known(models=own)
    assert known.learn(worker("a", max_batch_size=100), worker("b")) == ["a", "b"]
    assert known.served["a"].settings.max_batch_size == 7
    known.learn(*gone("a", "b"))
    assert known.learn() == ["a"]


@pytest.mark.parametrize(
    ("settings", "workers", "default"),
    [
        ({}, ["a"], "a"),
        ({}, ["a", "b"], ""),
        ({"default_model": "b"}, ["a", "b"], "b"),
        ({"default_model": "b"}, ["a", "c"], ""),
        ({"model": "b"}, ["a", "b"], "b"),
        ({}, ["a", "default"], "default"),
    ],
)
def test_an_unnamed_request_means(settings: dict[str, object], workers: list[str], default: str) -> None:
    known = Known(**settings)
    known.learn(*map(worker, workers))
    assert known.served.default == default


def test_dedup_keys_go_by_the_versions_that_workers_run() -> None:
    known = Known(model="a")
    known.learn(worker("a", model_version="3"))
    assert (known.served["a"].versions.label, known.served["a"].reported) == ("3", ("3",))
    known.learn(worker("a", "x", model_version="3"), worker("a", "y", model_version="4"))
    assert (known.served["a"].versions.label, known.served["a"].reported) == ("3,4", ("3", "4"))


def test_two_targets_under_one_name_and_version_are_warned_of_once() -> None:
    known = Known(model="a")
    with capture_logs() as logs:
        for _ in range(2):
            known.learn(worker("a", "x", target="1"), worker("a", "y", target="2"))
        known.learn(worker("a", "x", target="1"), worker("a", "y", target="2", model_version="2"))
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["model"], warning["version"], warning["workers"]) == ("a", "1", "x, y")


def test_terms_that_do_not_fit_are_left_out() -> None:
    here = Settings(request_timeout_ms=1000.0, queue_timeout_ms=1000.0)
    assert on_terms(here, "a", terms_of(Settings(queue_timeout_ms=3000.0))).queue_timeout_ms == 1000.0
    odd = (("max_batch_size", 8), ("max_queue", -1), ("cache", 3), ("of a later release", "x"), ("port", 1))
    found = on_terms(here, "a", odd)
    assert (found.model, found.max_batch_size, found.max_queue, found.cache) == ("a", 8, here.max_queue, False)
    assert found.port == here.port


def weights_told(weights: str, *turns: Sequence[WorkerInfo]) -> list[tuple[str, str, str]]:
    """Model, versions and hint of each line about weights of the model `a`, as workers come and go."""
    models = (ModelSettings("a", values=(("version_weights", weights),)),)
    known = Known(broker="redis://127.0.0.1:6379/0", models=models)
    with capture_logs() as logs:
        for workers in turns:
            known.learn(*workers)
    lines = [line for line in logs if "have a weight and no worker" in line["event"]]
    return [(line["model"], line["versions"], line["hint"]) for line in lines]


def test_weights_that_name_a_version_without_a_worker_are_told_once_with_what_becomes_of_its_requests() -> None:
    third = msgspec.structs.replace(worker("a"), version="3")
    both = third, msgspec.structs.replace(third, worker_id="b", version="7")
    told = weights_told("3=9,7=1", [third], [third], both, [third])
    assert [line[:2] for line in told] == [("a", "7"), ("a", "7")], "again after it had one"
    assert "other versions answer" in told[0][2]
    [(_, _, hint)] = weights_told("7=1", [third])
    assert "requests that name no version wait for a worker" in hint
