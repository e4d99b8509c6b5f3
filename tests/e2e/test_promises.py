"""Many clients send everything at once while faults hit the service. The checker then judges the whole history.

HEADWAY_TEST_PROMISES_SECONDS is how long each service is tested (5), HEADWAY_TEST_PROMISES_SEED is the random seed, and
HEADWAY_TEST_PROMISES_FAULTS lists faults, comma-separated, by their names in `tests.promises.faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.fleet import AWAY, fleet
from tests.e2e.server import serving
from tests.e2e.troubles import Troubles
from tests.identity.writing import entry, key_of
from tests.promises.checker import check
from tests.promises.client import Door
from tests.promises.crowd import Crowd
from tests.promises.journal import runs_in
from tests.promises.numbers_in import NUMBERS_IN
from tests.promises.operation import History, canonical
from tests.promises.requests import WAYS
from tests.promises.ways_in import WAYS_IN, WayIn
from tests.servers.ports import Port
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

SECONDS = float(os.environ.get("HEADWAY_TEST_PROMISES_SECONDS", "5"))
SEED = int(os.environ.get("HEADWAY_TEST_PROMISES_SEED", "1"))
FAULTS = os.environ.get(
    "HEADWAY_TEST_PROMISES_FAULTS",
    "redis stalled,gpu killed,connections cut,redis killed\\, durable,gateway killed,worker killed",
)
RATE, POISON, LARGE = 120.0, 0.01, 0.05
TARGET, FITTED, NUMBERS = (f"tests.targets.marked:{name}" for name in ("Marked", "Fitted", "Numbers"))
VALUES = '{"t": 0}', '{"t": 1}', '{"t": 1.0}'
"""Call parameters for Fitted. 1 and 1.0 may share a call."""
TENANTS = "acme", "globex", "capped"
CAPPED = 4.0, 40.0
"""Requests per second and burst of the last tenant on the only model. The limits for all models are twice as high."""
SHARED = "--cache", "--collapse", "--keys", "keys.toml", "--user-rate", "0", "--result-ttl-s", "3600"
PATIENT = "--request-timeout-ms", "30000", "--queue-timeout-ms", "30000", "--task-timeout-ms", "30000"
UNHAPPY = AWAY | {
    "batch failed", "worker process ended", "worker output dropped", "probe failed",
    "the outcome of a batch could not be handed in",  # Requests with short deadlines give up while the server is away.
}  # fmt: skip


def promised(
    folder: Path,
    doors: list[Door],
    trouble: Callable[[History], None] | None = None,
    ways: Sequence[WayIn] = WAYS_IN,
    parameters: Sequence[str] = (),
) -> History:
    """Run a crowd of clients against these doors, and check everything. Returns the history."""
    tenants = {tenant: f"Bearer {key_of(tenant)}" for tenant in TENANTS}

    async def drive() -> History:
        crowd = Crowd(doors, tenants, RATE, SEED, poison=POISON, large=LARGE, ways=ways, parameters=parameters)
        crowd.history.limits |= {(TENANTS[-1], ""): CAPPED, (TENANTS[-1], None): (2 * CAPPED[0], 2 * CAPPED[1])}
        troubling = asyncio.to_thread(trouble, crowd.history) if trouble else asyncio.sleep(0.0)
        await asyncio.gather(crowd.run(SECONDS), troubling)
        await crowd.audit()
        return crowd.history

    history = asyncio.run(drive())
    history.runs = runs_in(folder / "journal")
    violations = check(history)
    counts = Counter(violation.promise for violation in violations)
    assert not violations, f"seed {SEED}: {dict(counts)}\n" + "\n".join(map(str, violations[:5]))
    return history


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with the tenants' keys."""
    rate, burst = CAPPED[0] * 60, CAPPED[1]
    model = f"{{default = {{rate = {rate}, burst = {burst}}}}}"
    limit = f"rate = {2 * rate}\nburst = {2 * burst}\nmodel_limits = {model}\n"
    keys = (entry(tenant, tenant, tenant, more=limit if tenant == TENANTS[-1] else "") for tenant in TENANTS)
    (tmp_path / "keys.toml").write_text("".join(keys))
    return tmp_path


def test_one_process_keeps_its_promises(folder: Path) -> None:
    flags = "--workers", "2", "--max-batch-size", "8", *SHARED, *PATIENT
    with (
        contextlib.closing(Port()) as port,
        serving(folder, *flags, "--grpc-port", str(port.number), target=FITTED, lawful=False) as server,
    ):
        server.expected |= {"batch failed"}
        history = promised(folder, [Door("serve", server.port, grpc=port.number)], parameters=VALUES)
        outcomes = Counter(one.status for one in history.operations if not one.lost)
        assert min(outcomes[status] for status in (200, 202, 404, 422, 429)) > 0  # The other statuses depend on chance.
        assert len({one.way for one in history.operations if one.output is not None} & set(WAYS)) > len(WAYS_IN) // 2
        several = {one.way for one in history.operations if one.inputs}
        assert several <= {way.name for way in WAYS.values() if way.most > 1}
        assert len(several) > 2
        assert {run.parameters for run in history.runs if len(run.inputs) > 1} == {"", *map(canonical, VALUES)}


@pytest.mark.parametrize(("target", "ways"), [(TARGET, WAYS_IN), (NUMBERS, NUMBERS_IN)], ids=["texts", "numbers"])
def test_a_fleet_keeps_its_promises_whatever_befalls_it(folder: Path, target: str, ways: Sequence[WayIn]) -> None:
    allow_sleep = "enable-debug-command local"
    with (
        RedisServer("valkey", folder / "redis", allow_sleep, durable=True) as redis,
        ChaosProxy(redis.port) as proxy,
        fleet(
            folder, redis, gateways=0, workers=2, controllers=1, url=f"redis://127.0.0.1:{proxy.port}/0",
            gateway_flags=(*SHARED, *PATIENT), worker_flags=("--max-batch-size", "8"), target=target, lawful=False,
            patience=3.0,
        ) as it,
    ):  # fmt: skip
        it.expected |= UNHAPPY
        doors = []
        for _ in range(2):
            with contextlib.closing(Port()) as port:
                server = it.start("gateway", "--grpc-port", str(port.number))
                doors.append(Door(f"gateway-{server.port}", server.port, grpc=server.grpc_port))
        names = [name.replace("\0", ",").strip() for name in FAULTS.replace("\\,", "\0").split(",") if name]

        def trouble(history: History) -> None:
            Troubles(it, redis, proxy, doors, history, SEED).make(names, SECONDS)

        promised(folder, doors, trouble if names else None, ways)
        apart = {key: left for key, left in redis.ends().items() if "}:P:" in key or "}:R:" in key}
        assert min(apart.values(), default=1) > 0, "large values that were left have an end"
