"""What a gateway knows of the kinds of its models and of weights, and what it lets in by that."""

import asyncio

import msgspec
import pytest

from headway import errors
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.core.queue_limits import QueueLimits
from headway.gateway.fleet_watchers import READ_WORKERS_EVERY, WorkersWatcher
from headway.gateway.served_models import ServedModels
from headway.model import (
    ALL_PARAMETERS,
    InferenceRequest,
    PerCall,
    RequestOptions,
    Value,
    ValueKind,
    WeightLine,
    WorkerInfo,
    WorkerStatus,
)
from headway.runtime.counters import BrokerCounts
from headway.runtime.supervisor import Supervisor
from tests.services.fake_backend import ANYBODY
from tests.virtual_time import Clock

HEALTHY, STARTING = WorkerStatus.HEALTHY, WorkerStatus.STARTING


def worker(
    takes: str, gives: str = "", model: str = "m", status: WorkerStatus = HEALTHY, id: str = "gpu-0"
) -> WorkerInfo:
    return WorkerInfo(worker_id=id, model=model, status=status, takes=takes, gives=gives)


@pytest.mark.parametrize(
    ("workers", "takes", "gives"),
    [
        ([worker("")], ValueKind.TEXT, ValueKind.TEXT),
        ([worker("text", "json")], ValueKind.TEXT, ValueKind.JSON),
        ([worker("text", "text"), worker("json", "json", id="gpu-1")], ValueKind.JSON, ValueKind.JSON),
        ([worker("bytes", "text"), worker("text", "text", id="gpu-1")], ValueKind.BYTES, ValueKind.TEXT),
        ([worker("of a later release", "json")], ValueKind.TEXT, ValueKind.JSON),
    ],
)
def test_kinds_are_learned_from_healthy_workers(workers: list[WorkerInfo], takes: ValueKind, gives: ValueKind) -> None:
    kinds = ServedModels(["m"])
    kinds.learn(workers)
    assert (kinds["m"].takes, kinds["m"].gives) == (takes, gives)


def test_parameters_are_for_a_model_all_of_whose_workers_take_them_or_of_which_nothing_is_known() -> None:
    blind = msgspec.structs.replace(worker("text"), sees=())
    kinds = ServedModels(["m"])
    known = [kinds["m"].sees("user")]
    for workers in ([blind], [worker("", status=STARTING)], [blind, worker("text", id="gpu-1")], [worker("text")]):
        kinds.learn(workers)
        known.append(kinds["m"].sees("user"))
    assert known == [True, False, False, False, True]
    some = [
        msgspec.structs.replace(worker("text", id=str(at)), sees=sees)
        for at, sees in enumerate([("s", "t"), ("t", "u"), ALL_PARAMETERS])
    ]
    kinds.learn(some)
    assert [name for name in ("s", "t", "u", "a") if kinds["m"].sees(name)] == ["t"], "what all of them see"


def test_requests_get_the_number_of_what_a_call_has_once() -> None:
    kinds, both = ServedModels(["m"]), ("seed", "temperature")

    def numbers(*per_call: PerCall) -> list[int]:
        kinds.learn(
            [msgspec.structs.replace(worker("text", id=str(at)), per_call=names) for at, names in enumerate(per_call)]
        )
        asked = [b"", b'{"temperature":1}', b'{"seed":3,"temperature":1.0}']
        return [
            kinds["m"].entry(InferenceRequest(ANYBODY, "id", RequestOptions(4.0, 1), "m", "a", text), (), "g", 1, None, False).shape
            for text in asked
        ]  # fmt: skip

    for names, rows in (((), True), (("t",), False)):
        kinds.learn([msgspec.structs.replace(worker("tensors"), per_call=names)])
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
    kinds.learn([worker("json", status=STARTING), worker("json", model="other")])
    assert (kinds["m"].takes, kinds["m"].gives, kinds["other"].takes) == (None, None, None)
    assert kinds.unchecked == {"m"}
    for takes, status in (("json", HEALTHY), ("", STARTING)):
        kinds.learn([worker(takes, status=status)])
        assert kinds["m"].takes is ValueKind.JSON


@pytest.mark.parametrize(
    ("value", "good"),
    [("aGVhZHdheQ==", True), ("", True), ("no base64", False), ("aGVhZHdheQ", False), ("é", False), (b"[1]", False)],
)
def test_a_model_of_octets_takes_base64_only(value: Value, good: bool) -> None:
    kinds = ServedModels(["m"])
    kinds.learn([worker("bytes", "bytes")])
    assert "m" not in kinds.unchecked
    failure = kinds.check("m", value)
    assert (failure is None) == good
    if failure is not None:
        assert (failure.code, "base64" in failure.message) == (errors.BAD_REQUEST, True)


def test_an_unknown_model_is_named_and_not_told_of_those_without_a_worker() -> None:
    failure = ServedModels(["m"]).check("other", "a")
    assert failure is not None and failure.code == errors.NOT_FOUND
    kinds = ServedModels(["m", "late"])
    assert kinds.absence("other").message.endswith("there is: late, m")
    kinds.learn([worker("text", "text")])
    assert kinds.absence("other").message.endswith("there is: late (no worker), m")


async def test_a_watcher_follows_the_workers(clock: Clock) -> None:
    broker = MemoryBroker({"m": QueueLimits(3, 8, 0.1, 100)}, DeadLetterBox(), BrokerCounts(), clock, lambda: 0.5)
    kinds, supervisor = ServedModels(["m"]), Supervisor()

    def takes() -> ValueKind | None:
        return kinds["m"].takes

    watcher = WorkersWatcher([kinds], broker, clock)
    await watcher.open()
    watcher.start(supervisor)
    await asyncio.sleep(READ_WORKERS_EVERY * 1.5)
    assert takes() is None
    await broker.heartbeat(worker("json", "json"))
    await asyncio.sleep(READ_WORKERS_EVERY)
    assert takes() is ValueKind.JSON
    await broker.heartbeat(worker("bytes", "json"))
    await watcher.look()
    assert takes() is ValueKind.BYTES
    await supervisor.stop()
    await watcher.close()


WEIGHED = Settings(model="m", max_batch_weight=100, weight="tokens")


def weighed(
    line: WeightLine | None, id: str = "gpu-0", model: str = "m", status: WorkerStatus = WorkerStatus.HEALTHY
) -> WorkerInfo:
    return WorkerInfo(worker_id=id, model=model, status=status, weight=line)


def test_inputs_weigh_their_characters_or_nothing_in_particular() -> None:
    chars = ServedModels(["default"], Settings(max_batch_weight=100))
    chars.learn([weighed(WeightLine(5.0, 5.0), model="default")])
    assert [chars["default"].weigh(text) for text in ("", "é", "日本", b"[1]")] == [1, 1, 2, 3]
    unbounded = ServedModels(["default"], Settings(weight="tokens"))
    assert [unbounded["default"].weigh(text) for text in ("", "é", "日本")] == [1, 1, 1]


def test_an_input_weighs_its_octets_until_healthy_workers_know_better_and_the_last_line_stays() -> None:
    served = ServedModels(["m"], WEIGHED)
    served.learn([weighed(None), weighed(WeightLine(1.0, 1.0), model="other")])
    served.learn([weighed(WeightLine(1.0, 1.0), status=WorkerStatus.STARTING)])
    assert [served["m"].weigh(text) for text in ("", "a", "日本", b"[1]")] == [1, 1, 6, 3]
    served.learn([weighed(WeightLine(2.0, 0.2)), weighed(WeightLine(4.0, 0.4), "gpu-1"), weighed(None, "gpu-2")])
    assert served["m"].weigh("a" * 10) == 6
    served.learn([weighed(None)])
    assert served["m"].weigh("a" * 10) == 6
