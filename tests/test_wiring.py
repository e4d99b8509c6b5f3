"""The parts of a process, by role."""

import asyncio
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from headway import brokers, errors
from headway.app import backends, wiring
from headway.app.backends import worker_name
from headway.app.brokers import make_broker_bundle
from headway.app.devices import NO_DEVICES, Devices, Gpus
from headway.app.model_plans import WeightsResource
from headway.app.roles import ROLES
from headway.app.wiring import Process
from headway.app.workers import make_batchers, make_fallback, make_pool
from headway.backends.process.group_guard import GroupGuard
from headway.brokers.memory.broker import MemoryBroker
from headway.brokers.memory.dead_letters import DeadLetterBox
from headway.config import Settings
from headway.config.target import ModelSettings, parse_target
from headway.core.retention import KEPT
from headway.errors import SettingError, TargetError
from headway.gateway.gateway import Gateway
from headway.gateway.served_models import ServedModels
from headway.model import ItemResult, Lease, Role
from headway.runtime.counters import BrokerCounts, Counters
from tests.contracts.brokers import AT_ONCE, ask, slot
from tests.contracts.dedup_keys import task

BROKER = "redis://:canary@127.0.0.1:1/0"
TARGET = "tests.targets.gates:Gated"

T = TypeVar("T")


def within_a_loop(act: Callable[[], T]) -> T:
    async def main() -> T:
        return act()

    return asyncio.run(main())


def built(role: Role, target: str = "", **settings: object) -> Process:
    return within_a_loop(lambda: wiring.build(Settings(**settings), role, target))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", [Role.SERVE, Role.WORKER])
def test_a_remote_api_has_no_weight_function(role: Role) -> None:
    weighed: dict[str, Any] = {"max_batch_weight": 100, "weight": "tokens"}
    with pytest.raises(SettingError, match="a remote API has no functions to call") as caught:
        built(role, "http://127.0.0.1:1/", broker=BROKER, **weighed)
    assert caught.value.setting == "weight"
    fallback = built(Role.GATEWAY, broker=BROKER, fallback="http://127.0.0.1:1/", **weighed).service
    assert fallback is not None


def test_a_role_apart_needs_a_broker() -> None:
    for role in (Role.GATEWAY, Role.WORKER, Role.CONTROLLER):
        with pytest.raises(SettingError) as caught:
            built(role, TARGET)
        assert caught.value.setting == "broker"
        assert caught.value.reason == f"is needed by a {role.value}, which works with other processes"
        assert "--broker redis://" in caught.value.hint and "headway serve" in caught.value.hint


@pytest.mark.parametrize("role", Role)
def test_only_who_takes_requests_has_a_public_port_and_one_for_grpc_if_it_is_asked_for(role: Role) -> None:
    takes, runs = role in (Role.SERVE, Role.GATEWAY), role in (Role.SERVE, Role.WORKER)
    for port in (0, 8081):
        process = built(role, TARGET, broker=BROKER, grpc_port=port)
        kinds = [type(listener).__name__ for listener in process.service._public]
        assert kinds == ["Listener", "GrpcListener"][: takes + (takes and port > 0)]
        assert ((process.public is not None), (process.target is not None)) == (takes, runs)
    if role is Role.SERVE:
        assert built(role, TARGET).public is not None


def test_a_grpc_port_without_its_packages_is_told_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("headway.grpc.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hpack", None)
    with pytest.raises(SettingError, match=r"grpc_port = 8081: needs the packages hpack and protobuf") as caught:
        built(Role.SERVE, TARGET, grpc_port=8081)
    assert "pip install 'grpcio" in caught.value.hint


def test_models_share_gpus_where_they_may_and_remote_apis_keep_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_gpus", lambda: Gpus(("0", "1")))
    targets = {"a": TARGET, "far": "http://127.0.0.1:1/", "b": TARGET}
    models = tuple(ModelSettings(name) for name in targets)

    def workers(**settings: Any) -> set[str]:
        made = within_a_loop(lambda: wiring.build(Settings(models=models, **settings), Role.SERVE, targets))
        assert made.pool is not None
        assert set(made.pool.slots) == {batcher.slot.worker for batcher in made.pool.batchers}
        return set(made.pool.slots)

    assert workers() == {"a/gpu-0", "far/remote-0", "b/gpu-0"}, "a has GPU 0, b has GPU 1"
    shared = {f"{name}/gpu-{number}" for name in "ab" for number in range(2)}
    remote = {"far/remote-0", "far/remote-1"}
    assert workers(workers=2, models_per_gpu=2) == shared | remote
    assert workers(workers=2, models_per_gpu=1) == {"a/gpu-0", "b/gpu-1"} | remote
    with pytest.raises(SettingError, match="workers = 3"):
        workers(workers=3, models_per_gpu=1)


@pytest.mark.parametrize(("broker", "prefix"), [("", ""), (BROKER, "host/")])
def test_versions_of_a_model_have_workers_that_claim_for_them(broker: str, prefix: str) -> None:
    models = (ModelSettings("a", versions=(ModelSettings("1"), ModelSettings("2"))), ModelSettings("b"))
    settings = Settings(models=models, broker=broker, name="host", devices="cpu")
    targets = dict.fromkeys(("a@1", "a@2", "b"), TARGET)
    made = within_a_loop(lambda: wiring.build(settings, Role.SERVE, targets))
    assert made.pool is not None
    slots = [(one.slot.worker, str(one.slot.queue), one.slot.runs.version) for one in made.pool.batchers]
    assert slots == [
        (f"{prefix}a@1/cpu-0", "a@1", "1"),
        (f"{prefix}a@2/cpu-0", "a@2", "2"),
        (f"{prefix}b/cpu-0", "b@1" if broker else "b", "1"),
    ]


def test_a_version_without_a_target_is_told_where_to_write_it() -> None:
    settings = Settings(models=(ModelSettings("a", versions=(ModelSettings("1"), ModelSettings("2"))),))
    with pytest.raises(TargetError, match=r"model 'a@2' has no target. Give a@2=TARGET .* in \[models.\"a@2\"\]"):
        within_a_loop(lambda: wiring.build(settings, Role.SERVE, {"a@1": TARGET}))


def test_a_process_is_called_by_its_host_and_number_unless_it_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(Role.SERVE, TARGET).settings.name == f"{socket.gethostname()}-{os.getpid()}"
    assert built(Role.SERVE, TARGET, name="edge").settings.name == "edge"
    monkeypatch.setattr(socket, "gethostname", lambda: "söme host" * 50)
    assert built(Role.SERVE, TARGET).settings.name.startswith("s-me-host")


def test_workers_are_told_apart_over_a_broker() -> None:
    local, remote = parse_target(TARGET), parse_target("http://127.0.0.1:9100/batch")
    alone, shared = Settings(workers=2, name="host"), Settings(workers=2, name="host", broker=BROKER)
    gpus, mixed = Devices(("3", "4"), 2), Devices(("0", "cpu"), 2)
    for settings, target, devices, names in (
        (alone, local, gpus, ["gpu-0", "gpu-1"]),
        (alone, local, mixed, ["gpu-0", "cpu-1"]),
        (shared, local, gpus, ["host/gpu-0", "host/gpu-1"]),
        (shared, remote, NO_DEVICES, ["host/remote-0", "host/remote-1"]),
    ):
        assert [worker_name(settings, target, devices, number) for number in range(2)] == names


def test_calls_to_a_remote_api_need_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_gpus", lambda: Gpus(("3",), "3"))
    assert built(Role.SERVE, "http://127.0.0.1:9100/batch", workers=8).devices == NO_DEVICES
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES=3"):
        built(Role.SERVE, TARGET, workers=8)


def test_an_environment_whose_gpus_are_not_there_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_gpus", lambda: Gpus((), None, "they are not there"))
    for devices, warned in (("", ["they are not there"]), ("cpu,cpu", [])):
        with capture_logs() as logs:
            built(Role.SERVE, TARGET, workers=2, devices=devices)
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == warned


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_a_port_that_others_reach_without_a_key_is_warned_of(host: str, tmp_path: Path) -> None:
    def warned(**settings: Any) -> list[Any]:
        with capture_logs() as logs:
            built(Role.SERVE, TARGET, **settings)
        return [line for line in logs if line["log_level"] == "warning"]

    [warning] = warned(host=host, default_tier="free")
    assert (warning["host"], warning["let_in"]) == (host, "everybody, as free")
    assert "--keys" in warning["hint"]
    keys = tmp_path / "keys.toml"
    keys.write_text("keys = []")
    assert warned(host=host, keys=str(keys)) == warned(host="127.0.0.1") == []


def test_a_target_that_is_none_is_found_out_before_anything_starts() -> None:
    with pytest.raises(TargetError, match=r"no\.py"):
        built(Role.WORKER, "no.py:thing", broker=BROKER)


@pytest.mark.parametrize("fallback", ["no.py:thing", "nonsense", "http://user:canary@spare/batch", "ftp://spare"])
def test_a_fallback_that_is_no_target_is_a_bad_setting(fallback: str) -> None:
    with pytest.raises(SettingError) as caught:
        built(Role.GATEWAY, broker=BROKER, fallback=fallback)
    assert caught.value.setting == "fallback"
    assert "is not a target" in caught.value.reason
    assert "canary" not in str(caught.value)


def test_direct_mode_is_for_who_has_a_broker_elsewhere_and_a_fallback(tmp_path: Path) -> None:
    (tmp_path / "spare.py").write_text("def spare(inputs):\n    return inputs\n")
    fallback = f"{tmp_path / 'spare.py'}:spare"
    for broker, given, expected in (("", fallback, False), (BROKER, "", False), (BROKER, fallback, True)):
        settings = Settings(broker=broker, fallback=given)
        made = within_a_loop(functools.partial(make_fallback, settings, Counters(), time.monotonic))
        assert (made is not None) == expected


def test_each_model_may_have_a_fallback_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "spare.py").write_text("def spare(inputs):\n    return inputs\n")
    spare = f"{tmp_path / 'spare.py'}:spare"
    tables = (
        ModelSettings("a", values=(("fallback", spare),)),
        ModelSettings("b", values=(("fallback", "http://127.0.0.1:1/batch"),)),
        ModelSettings("c"),
    )

    def answers(**settings: Any) -> set[str]:
        made = within_a_loop(
            lambda: make_fallback(Settings(broker=BROKER, models=tables, **settings), Counters(), time.monotonic)
        )
        assert made is not None
        assert {slot.rpartition("/")[0].partition("/")[2] for slot in made.workers.slots} == {*made.models}
        return {*made.models}

    assert answers() == {"a", "b"}
    assert answers(fallback=spare, default_model="c") == {"a", "b", "c"}
    assert answers(fallback=f"c={spare}") == {"a", "b", "c"}
    assert answers(fallback=spare) == {"a", "b"}, "the first has its own"
    with pytest.raises(
        SettingError,
        match=r"fallback = 'd=x.py:f': is for the model 'd', but this process only has settings for a, b, c",
    ):
        built(Role.GATEWAY, broker=BROKER, models=tables, fallback="d=x.py:f")
    wrong = (ModelSettings("a", values=(("fallback", "nowhere.py:f"),)), *tables[1:])
    with pytest.raises(SettingError, match=r"models.a.fallback = 'nowhere.py:f': is not a target"):
        built(Role.GATEWAY, broker=BROKER, models=wrong)


def test_without_its_client_the_redis_broker_is_a_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis" or ".brokers.redis" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(brokers, "redis", None, raising=False)  # Otherwise a fresh import would outlive the test.
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(SettingError) as caught:
        built(Role.CONTROLLER, broker=BROKER)
    assert str(caught.value) == (
        "broker = 'redis://…@127.0.0.1:1/0': needs the package redis, which is not installed. "
        "Run pip install 'redis>=8.1,<9' 'hiredis>=3.5,<4'."
    )
    assert built(Role.SERVE, TARGET).public is not None


def test_outcomes_are_kept_in_the_memory_that_is_set() -> None:
    broker = make_broker_bundle(Settings(memory_mb=16), BrokerCounts(), lambda: 0.0).broker
    asked = [ask(id=id, model="default", dedup_keys=(task(id),)) for id in ("oldest", "older", "old", "new", "newest")]

    async def run() -> list[bool]:
        for entry in asked:
            assert await broker.enqueue([entry]) == [None]
            lease = await broker.claim(slot(model="default"), AT_ONCE)
            assert isinstance(lease, Lease)
            await broker.complete(lease, [ItemResult("x" * 240_000)])
        return [await broker.outcome(entry.tenant, entry.id) is not None for entry in asked]

    assert asyncio.run(run()) == [False, True, True, True, True]


def backends_of(target: str, **settings: Any) -> list[Any]:
    counters, clock = Counters(), time.monotonic
    broker = MemoryBroker({}, DeadLetterBox(), counters.broker, clock, lambda: 0.5)
    given, devices = Settings(workers=2, **settings), Devices(("cpu",) * 2, 2)
    make = make_batchers(given, parse_target(target), devices, counters.worker, clock)
    pool = make_pool(given, devices, make, broker)
    return [batcher._make_backend() for batcher in pool.batchers]


def test_workers_share_the_guard_of_what_they_start_and_are_recycled_as_is_set() -> None:
    one, two = backends_of(TARGET)
    assert isinstance(one._guard, GroupGuard)
    assert one._guard is two._guard
    one, _ = backends_of(TARGET, recycle_rss_mb=3)
    assert one._recycle_rss == 3 << 20


def test_calls_to_one_remote_api_share_the_rest_that_it_asks_for() -> None:
    one, two = backends_of("http://127.0.0.1:1/batch")
    one._breaker.rest(time.monotonic(), 60.0)
    assert two._breaker.rest_left(time.monotonic()) > 0.0
    assert one._credentials is two._credentials, "their file is read, and a change of it logged, once"


def test_settings_without_effect_are_told_where_clients_come() -> None:
    def told(role: Role, **settings: Any) -> list[tuple[str, str]]:
        with capture_logs() as logs:
            within_a_loop(lambda: wiring.build(Settings(**settings), role, TARGET))
        return [(line["setting"], line["without"]) for line in logs if line["event"] == "a setting has no effect"]

    assert told(Role.SERVE, shards=16, ledger_content=True) == [
        ("--shards", "--broker"),
        ("--ledger-content", "--ledger"),
    ]
    assert told(Role.SERVE) == []
    assert told(Role.WORKER, broker=BROKER, ledger_content=True) == []
    assert told(Role.SERVE, version_weights="3=1") == [("--version-weights", "--broker")]
    kept = [("--min-warm", "--models-per-gpu")]
    assert told(Role.SERVE, min_warm=1) == told(Role.WORKER, broker=BROKER, min_warm=1) == kept
    alone = [("--models-per-gpu", "a second model that runs here")]
    assert told(Role.SERVE, models_per_gpu=2) == told(Role.WORKER, broker=BROKER, models_per_gpu=2) == alone
    table = ModelSettings("a", TARGET, (("min_warm", 1),))
    assert told(Role.SERVE, models=(table,)) == [("[models.a] min_warm", "--models-per-gpu")]


def test_a_gateway_that_has_not_heard_of_the_fleet_does_not_say_which_models_there_are_not() -> None:
    settings, counters, now = Settings(broker=BROKER), Counters(), 100.0
    broker = MemoryBroker({}, DeadLetterBox(), counters.broker, lambda: now, lambda: 0.5, KEPT)

    def serve(served: Mapping[str, Settings]) -> None:
        gateway.served.serve(served)

    models = wiring.make_fleet_models(settings, ROLES[Role.GATEWAY], broker, serve, lambda model: None, lambda: now)
    assert models is not None
    in_doubt = models.in_doubt
    gateway = Gateway(settings, [*settings.served], broker, counters.gateway, lambda: now, in_doubt=in_doubt)

    def codes() -> list[str]:
        found = (gateway.served.check(model, "a") for model in ("late", ""))
        return [failure.code for failure in found if failure is not None]

    assert codes() == [errors.NO_WORKERS] * 2
    models.learn([])
    assert codes() == [errors.NOT_FOUND, errors.BAD_REQUEST]


def test_weights_of_versions_that_are_not_there_stop_a_process_that_has_all_there_are(tmp_path: Path) -> None:
    versions = ModelSettings("1", TARGET), ModelSettings("2", TARGET)

    def weighed(text: str, broker: str = "", file: str = "") -> Settings:
        model = ModelSettings("a", values=(("version_weights", text),), versions=versions)
        return Settings(models=(model,), broker=broker, weights_file=file)

    def of(settings: Settings) -> Process:
        return within_a_loop(lambda: wiring.build(settings, Role.SERVE))

    assert of(weighed("1=9,2=1,3=0")).plans.keys() == {"a@1", "a@2"}
    with pytest.raises(SettingError) as refused:
        of(weighed("1=9,3=1"))
    assert str(refused.value) == (
        "models.a.version_weights = '1=9,3=1': no target is given for a@3. Name versions that are served here: 1, 2."
    )
    assert of(weighed("1=9,3=1", broker=BROKER)).plans, "others of the fleet may run it"
    file = tmp_path / "headway.toml"
    file.write_text("[models.a]\nversion_weights = '1=9,3=1'\n")
    settings = weighed("1=9,2=1", file=str(file))
    with pytest.raises(SettingError, match="no target is given for a@3"):
        asyncio.run(WeightsResource(settings, ServedModels(["a"], settings, lambda: 0.5), lambda: None).reread())
