"""Two operators drain at once: whatever the order of their steps, the second sees the first, and a model keeps a worker."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from headway.admin.drains import routes
from headway.errors import BadRequest
from headway.model import ProcessInfo, Role, WorkerInfo, WorkerStatus
from headway.ports import Fleet
from tests.contracts.brokers import Harness

NAMES = ("a", "b")
STEPS = 5
"""Questions of an order to the broker, at least: three of a look, and two of the write."""


class Interrupted:
    """A fleet and a broker; before one of the questions to them, something else happens."""

    def __init__(self, fleet: Fleet, before: int, other: Callable[[], Awaitable[None]]) -> None:
        self._fleet, self._left, self._other = fleet, before, other

    async def _asked(self) -> None:
        self._left -= 1
        if self._left == -1:
            await self._other()

    async def workers(self) -> list[WorkerInfo]:
        await self._asked()
        return [WorkerInfo(worker_id=f"{name}/gpu-0", model="m", status=WorkerStatus.HEALTHY) for name in NAMES]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any) -> Any:
            await self._asked()
            return await getattr(self._fleet, name)(*arguments)

        return ask


async def ordered(
    fleet: Fleet, name: str, before: int = -1, other: Callable[[], Awaitable[None]] | None = None
) -> bool:
    view: Any = Interrupted(fleet, before, other)  # type: ignore[arg-type]
    start = routes(SimpleNamespace(fleet=view, broker=view))[1]  # type: ignore[arg-type]
    try:
        await start.handler(SimpleNamespace(param={"name": name}.get))  # type: ignore[arg-type]
    except BadRequest as exc:
        assert str(exc).startswith("model m would have no healthy worker left")
        return False
    return True


async def test_of_two_orders_that_bare_a_model_just_one_is_taken(harness: Harness) -> None:
    for before in range(STEPS + 1):
        for name in NAMES:
            await harness.fleet.heartbeat(ProcessInfo(id=name, role=Role.WORKER, host=name, pid=1))
        taken: list[bool] = []

        async def other(taken: list[bool] = taken) -> None:
            taken.append(await ordered(harness.fleet_peer, "b"))

        taken.append(await ordered(harness.fleet, "a", before, other))
        if len(taken) == 1:
            assert before >= STEPS
            await other()
        assert sorted(taken) == [False, True]
        assert len(await harness.fleet.drains()) == 1
        await harness.fleet.undrain(NAMES)
