"""The models that a gateway learns about from workers' reports: their names, terms and kinds."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.config import Settings, on_terms, terms_of
from headway.config.target import ModelSettings
from headway.core.health import SILENT_AFTER, UNKNOWN_FOR
from headway.fleet.models import MISSED_FOR, FleetModels
from headway.gateway.served_models import ServedModels
from headway.model import ALL_PARAMETERS, ModelReport, PerCall, Value, ValueKind, WeightLine, WorkerInfo, WorkerStatus
from headway.runtime.counters import ControllerCounts, GatewayCounts
from tests.services.requests import request


def worker(model: str, id: str = "", status: WorkerStatus = WorkerStatus.HEALTHY, **own: object) -> WorkerInfo:
    target = str(own.pop("target", ""))
    settings = Settings(**own)  # type: ignore[arg-type]
    report = ModelReport(settings.model_version, target, terms_of(settings))
    return WorkerInfo(worker_id=id or f"{model}/gpu-0", model=model, status=status, runs=report)


def gone(*models: str, reason: str = "") -> list[WorkerInfo]:
    """Return workers that are offline, with `reason` if they went silent instead of leaving."""
    return [msgspec.structs.replace(worker(one, status=WorkerStatus.OFFLINE), reason=reason) for one in models]


class Known:
    """What a process knows about the models it serves."""

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
    """Return the model, versions and hint from each log line about the weights of `a`, as workers come and go."""
    models = (ModelSettings("a", values=(("version_weights", weights),)),)
    known = Known(broker="redis://127.0.0.1:6379/0", models=models)
    with capture_logs() as logs:
        for workers in turns:
            known.learn(*workers)
    lines = [line for line in logs if "have a weight but no worker" in line["event"]]
    return [(line["model"], line["versions"], line["hint"]) for line in lines]


def test_weights_that_name_a_version_without_a_worker_are_told_once_with_what_becomes_of_its_requests() -> None:
    third = msgspec.structs.replace(worker("a"), version="3")
    both = third, msgspec.structs.replace(third, worker_id="b", version="7")
    told = weights_told("3=9,7=1", [third], [third], both, [third])
    assert [line[:2] for line in told] == [("a", "7"), ("a", "7")], "again after it had one"
    assert "other versions answer" in told[0][2]
    [(_, _, hint)] = weights_told("7=1", [third])
    assert "requests that do not name a version wait for a worker" in hint


HEALTHY, STARTING = WorkerStatus.HEALTHY, WorkerStatus.STARTING


def taking(takes: str = "", gives: str = "", id: str = "gpu-0", **more: Any) -> WorkerInfo:
    return WorkerInfo(worker_id=id, takes=takes, gives=gives, **{"model": "m", "status": HEALTHY, **more})


@pytest.mark.parametrize(
    ("workers", "takes", "gives"),
    [
        ([taking("")], ValueKind.TEXT, ValueKind.TEXT),
        ([taking("text", "json")], ValueKind.TEXT, ValueKind.JSON),
        ([taking("text", "text"), taking("json", "json", id="gpu-1")], ValueKind.JSON, ValueKind.JSON),
        ([taking("bytes", "text"), taking("text", "text", id="gpu-1")], ValueKind.BYTES, ValueKind.TEXT),
        ([taking("of a later release", "json")], ValueKind.TEXT, ValueKind.JSON),
    ],
)
def test_kinds_are_learned_from_healthy_workers(workers: list[WorkerInfo], takes: ValueKind, gives: ValueKind) -> None:
    kinds = ServedModels(["m"])
    kinds.learn(workers)
    assert (kinds["m"].takes, kinds["m"].gives) == (takes, gives)


def test_parameters_are_for_a_model_all_of_whose_workers_take_them_or_of_which_nothing_is_known() -> None:
    blind = taking("text", sees=())
    kinds = ServedModels(["m"])
    known = [kinds["m"].sees("user")]
    for workers in ([blind], [taking("", status=STARTING)], [blind, taking("text", id="gpu-1")], [taking("text")]):
        kinds.learn(workers)
        known.append(kinds["m"].sees("user"))
    assert known == [True, False, False, False, True]
    some = [taking("text", id=str(at), sees=sees) for at, sees in enumerate([("s", "t"), ("t", "u"), ALL_PARAMETERS])]
    kinds.learn(some)
    assert [name for name in ("s", "t", "u", "a") if kinds["m"].sees(name)] == ["t"], "what all of them see"


def test_requests_get_the_number_of_what_a_call_has_once() -> None:
    kinds, both = ServedModels(["m"]), ("seed", "temperature")

    def numbers(*per_call: PerCall) -> list[int]:
        kinds.learn([taking("text", id=str(at), per_call=names) for at, names in enumerate(per_call)])
        asked = [b"", b'{"temperature":1}', b'{"seed":3,"temperature":1.0}']
        return [kinds["m"].entry(request(parameters=text), (), "g", 1, None, False).shape for text in asked]

    for names, rows in (((), True), (("t",), False)):
        kinds.learn([taking("tensors", per_call=names)])
        assert kinds["m"].takes_rows is rows
    assert numbers(()) == [0, 0, 0]
    none, one, other = numbers(("temperature",), ())
    assert none == 0 < one == other
    assert len(set(numbers(("temperature",), both))) == 3
    assert len(set(numbers(ALL_PARAMETERS))) == 3
    assert kinds["m"].weigh("long text") == 1
    assert not kinds["m"].is_plain
    assert numbers(()) == [0, 0, 0]
    assert kinds["m"].is_plain


def test_a_model_that_is_loaded_when_it_is_asked_for_is_ready() -> None:
    def shared(model: str, status: WorkerStatus, gpu: str = "gpu-0", at: float = 100.0) -> WorkerInfo:
        return WorkerInfo(worker_id=f"{model}/{gpu}", model=model, status=status, gpu=gpu, last_heartbeat=at)

    models = ["warm", "cold", "loading", "alone", "failed", "gone", "silent"]
    kinds = ServedModels(models)
    kinds.learn(
        [
            shared("warm", HEALTHY),
            shared("cold", WorkerStatus.COLD),
            shared("loading", STARTING),
            shared("alone", STARTING, gpu=""),
            shared("failed", WorkerStatus.FAILED),
            shared("gone", WorkerStatus.OFFLINE),
            shared("silent", WorkerStatus.COLD, at=89.0),
        ]
    )
    assert [model for model in models if kinds.has_worker(model)] == ["warm", "cold", "loading"]


def test_nothing_is_known_before_a_worker_is_healthy_and_what_was_known_stays_when_none_is() -> None:
    kinds = ServedModels(["m"])
    kinds.learn([taking("json", status=STARTING), taking("json", model="other")])
    assert (kinds["m"].takes, kinds["m"].gives, kinds["other"].takes) == (None, None, None)
    assert kinds.unchecked == {"m"}
    for takes, status in (("json", HEALTHY), ("", STARTING)):
        kinds.learn([taking(takes, status=status)])
        assert kinds["m"].takes is ValueKind.JSON


@pytest.mark.parametrize(
    ("value", "good"),
    [("aGVhZHdheQ==", True), ("", True), ("no base64", False), ("aGVhZHdheQ", False), ("é", False), (b"[1]", False)],
)
def test_a_model_of_octets_takes_base64_only(value: Value, good: bool) -> None:
    kinds = ServedModels(["m"])
    kinds.learn([taking("bytes", "bytes")])
    assert "m" not in kinds.unchecked
    failure = kinds.check("m", value)
    assert (failure is None) == good
    if failure is not None:
        assert (failure.code, "base64" in failure.message) == (errors.BAD_REQUEST, True)


def test_an_unknown_model_is_named_and_not_told_of_those_without_a_worker() -> None:
    failure = ServedModels(["m"]).check("other", "a")
    assert failure is not None and failure.code == errors.NOT_FOUND
    kinds = ServedModels(["m", "late"])
    assert kinds.absence("other").message.endswith("available: late, m")
    kinds.learn([taking("text", "text")])
    assert kinds.absence("other").message.endswith("available: late (no worker), m")


WEIGHED = Settings(model="m", max_batch_weight=100, weight="tokens")


def test_inputs_weigh_their_characters_or_nothing_in_particular() -> None:
    chars = ServedModels(["default"], Settings(max_batch_weight=100))
    chars.learn([taking(weight=WeightLine(5.0, 5.0), model="default")])
    assert [chars["default"].weigh(text) for text in ("", "é", "日本", b"[1]")] == [1, 1, 2, 3]
    unbounded = ServedModels(["default"], Settings(weight="tokens"))
    assert [unbounded["default"].weigh(text) for text in ("", "é", "日本")] == [1, 1, 1]


def test_an_input_weighs_its_octets_until_healthy_workers_know_better_and_the_last_line_stays() -> None:
    served = ServedModels(["m"], WEIGHED)
    served.learn([taking(), taking(weight=WeightLine(1.0, 1.0), model="other")])
    served.learn([taking(weight=WeightLine(1.0, 1.0), status=STARTING)])
    assert [served["m"].weigh(text) for text in ("", "a", "日本", b"[1]")] == [1, 1, 6, 3]
    served.learn(
        [taking(weight=WeightLine(2.0, 0.2)), taking(weight=WeightLine(4.0, 0.4), id="gpu-1"), taking(id="gpu-2")]
    )
    assert served["m"].weigh("a" * 10) == 6
    served.learn([taking()])
    assert served["m"].weigh("a" * 10) == 6
