"""Whoever ends tasks ends them, though their first cancellation is lost, as it is by libraries now and then.

CASES and ALIKE are all places in Headway that end what may await redis-py, asyncpg, aiohttp or gRPC.
"""

import ast
import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

import headway
from headway.app.signals import _Hangups
from headway.brokers.reap_timer import ReapTimer
from headway.brokers.redis import failover
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.cluster import Cluster
from headway.brokers.redis.connection import RedisConnection
from headway.brokers.redis.mailbox import Mailbox
from headway.brokers.redis.receipts import Receipts
from headway.brokers.redis.sentinels import Sentinels
from headway.brokers.redis.shard_router import ShardRouter
from headway.brokers.redis.wakeups import Wakeups
from headway.bulk.feeder import Feeder
from headway.bulk.job_run import JobRun
from headway.http.server.listener import Listener
from headway.model import Slot
from headway.runtime.race import end, end_all, race
from headway.runtime.supervisor import Supervisor
from headway.worker.batcher import Batcher
from headway.worker.helping import Claims
from headway.worker.shared_gpus import SharedGpus
from headway.worker.starting import start_all
from tests.redis.test_sentinel import A, Sentinel
from tests.virtual_time import Clock

ROOT = Path(headway.__file__).parent
SLOT = Slot("gpu-0", "m", 1, version="1")


class Deaf(asyncio.Task[Any]):
    """Task that goes on as if nothing had come where `end` cancels it for the first time."""

    heard = False

    def cancel(self, msg: Any = None) -> bool:
        if sys._getframe(1).f_code is end.__code__ and not self.heard:
            self.heard = True
            return True
        return super().cancel(msg)


async def forever(*asked: object) -> None:
    await asyncio.Event().wait()


def task() -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(forever())


def bare(kind: type[Any], **attributes: object) -> Any:
    """Object of a kind that has nothing but these."""
    made = object.__new__(kind)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


async def nothing(*asked: object) -> None: ...


async def cancelled(work: Awaitable[object]) -> None:
    running = asyncio.ensure_future(work)
    await asyncio.sleep(1.0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def a_pause() -> None:
    servers = bare(failover._Servers, ask_beside=nothing)
    async with failover._paused(servers, A, monotonic() + 3600.0):
        await asyncio.sleep(0)


async def a_supervisor() -> None:
    supervisor = Supervisor()
    supervisor.start("loop", forever)
    await asyncio.sleep(1.0)
    await supervisor.stop()


async def a_failing_start() -> None:
    async def fail() -> None:
        raise ValueError

    with suppress(ValueError):
        await start_all([forever(), fail()])


async def a_job_that_ends() -> None:
    run = bare(
        JobRun, _read=forever, _make=forever, _read_all=False, _ending=lambda: None, _fault=None, _wait=forever, _let_go=print
    )  # fmt: skip
    await cancelled(run._answer())


async def a_job_taken_up_again() -> None:
    feeder = bare(Feeder, _tasks={"j": task()}, runs={}, _of=None)
    with suppress(AttributeError):
        await feeder._begin(SimpleNamespace(id="j"))


async def a_vote() -> None:
    made = Sentinels([], "headway", {}, nothing)
    made.sentinels = list[Any]([Sentinel(A), Sentinel(A), Sentinel(A, silent=True)])
    await made._vote("headway")


async def a_listener() -> None:
    nobody = SimpleNamespace(
        tasks={task()}, connections=[], close=print, emptied=nothing, hangups=SimpleNamespace(close=print)
    )
    await bare(Listener, _context=nobody, _sockets=[], _next_look=None).close()


async def a_wait_for_work() -> None:
    home = SimpleNamespace(wakeups=SimpleNamespace(sleep=forever))
    router = SimpleNamespace(home=lambda *asked: home, alone=False)
    broker = bare(RedisBroker, _router=router, _idle_at={}, _look_around=forever, _unlisten=nothing)
    await cancelled(broker.wait_for_work(SLOT, None))


async def a_batch_on_its_way() -> None:
    backend = SimpleNamespace(gone=lambda: asyncio.get_running_loop().create_future())
    batcher = bare(Batcher, _clock=monotonic, _fresh=None, held=False, _winding_down=False, _retire=False)
    batcher._handing_in, batcher._serve_one, batcher._swap = task(), forever, nothing
    await cancelled(batcher._serve_until_gone(backend))


CASES: dict[str, Callable[[], Awaitable[object]]] = {
    "app/signals.py: _Hangups.end": lambda: bare(_Hangups, _task=task()).end(),
    "brokers/reap_timer.py: ReapTimer.close": lambda: bare(ReapTimer, _task=task(), _timer=None).close(),
    "brokers/redis/broker.py: RedisBroker.wait_for_work": a_wait_for_work,
    "brokers/redis/cluster.py: Cluster.close": lambda: bare(Cluster, _looking=task(), _servers={}).close(),
    "brokers/redis/connection.py: RedisConnection.close": lambda: bare(
        RedisConnection,
        _looking=task(),
        **dict.fromkeys(("_calls", "_claims", "_reads", "_values"), SimpleNamespace(close=nothing)),
    ).close(),
    "brokers/redis/failover.py: _paused": a_pause,
    "brokers/redis/mailbox.py: Mailbox.close": lambda: bare(
        Mailbox, _streams=[SimpleNamespace(task=task())], _bringing={task()}
    ).close(),
    "brokers/redis/mailbox.py: Mailbox.remove": lambda: bare(
        Mailbox, _streams=[SimpleNamespace(task=task(), queue="q")]
    ).remove(["q"]),
    "brokers/redis/receipts.py: Receipts.close": lambda: bare(Receipts, _telling=task(), _receipts={}).close(),
    "brokers/redis/sentinels.py: Sentinels._vote": a_vote,
    "brokers/redis/sentinels.py: Sentinels.aclose": lambda: bare(
        Sentinels, _listening=[task()], _voting=task(), _next=task(), sentinels=[]
    ).aclose(),
    "brokers/redis/sentinels.py: Sentinels.renew": lambda: bare(Sentinels, _listening=[task()], sentinels=[]).renew(),
    "brokers/redis/shard_router.py: ShardRouter.close": lambda: bare(ShardRouter, _counting=task()).close(),
    "brokers/redis/wakeups.py: Wakeups.close": lambda: bare(Wakeups, _task=task()).close(),
    "bulk/feeder.py: Feeder._begin": a_job_taken_up_again,
    "bulk/feeder.py: Feeder.close": lambda: bare(Feeder, _tasks={"j": task()}, _pumps={"m": task()}, runs={}).close(),
    "bulk/job_run.py: JobRun._answer": a_job_that_ends,
    "http/server/listener.py: Listener.close": a_listener,
    "runtime/race.py: end_all": lambda: (task(), end_all())[1],
    "runtime/race.py: race": lambda: race(forever(), nothing()),
    "runtime/supervisor.py: Supervisor.stop": a_supervisor,
    "worker/batcher.py: Batcher._serve_until_gone": a_batch_on_its_way,
    "worker/helping.py: Claims.wait": lambda: cancelled(
        Claims(SLOT, bare(RedisBroker, wait_for_work=forever), bare(object)).wait(None)
    ),
    "worker/shared_gpus.py: SharedGpus.stop": lambda: bare(
        SharedGpus, _turns={}, _moving={task()}, _on={}, _serving={}, _tell_gone=nothing
    ).stop(),
    "worker/starting.py: start_all": a_failing_start,
}
ALIKE = {
    "app/background.py: BackgroundService._serve": "end_all",
    "app/runner.py: run": "end_all, and the watcher of files",
    "app/runner.py: run.ready": "the watcher of files",
    "app/signals.py: _unless": "race",
    "gateway/judge.py: Judge._wait_for_news": "race",
    "http/tasks.py: _Tasks._follow": "race",
    "load/generator.py: run_load.drive": "a line of progress now and then",
    "runtime/supervisor.py: Supervisor._keep": "Supervisor.stop",
    "worker/gpu_turns.py: TurnedSource.wait_for_work": "race",
}
"""Places that do what another one does, or await nothing of others."""


@pytest.mark.parametrize("place", CASES)
async def test_what_loses_its_first_cancellation_ends(place: str, clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    made = list[Deaf]()

    def make(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> Deaf:
        made.append(Deaf(work, loop=loop, **how))
        return made[-1]

    loop.set_task_factory(make)
    with capture_logs() as logs:
        await CASES[place]()
    loop.set_task_factory(None)
    assert all(one.done() for one in made)
    assert [one for one in made if one.heard], "it ends what it has begun"
    assert {"task does not end, cancelling it again"} == {line["event"] for line in logs if "tasks" in line}


def places(names: set[str]) -> Iterator[str]:
    """Functions of Headway that use one of these of `headway.runtime.race`, as FILE: NAME."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "headway.runtime.race"
            for alias in node.names
        }
        if path == ROOT / "runtime/race.py":
            imported = names
        waiting = deque[tuple[ast.AST, str]]([(tree, "")])
        while waiting:
            node, name = waiting.popleft()
            used = [node.func, *node.args] if isinstance(node, ast.Call) else []
            if any(isinstance(one, ast.Name) and one.id in imported & names for one in used):
                yield f"{path.relative_to(ROOT)}: {name}"
            for child in ast.iter_child_nodes(node):
                own = (
                    getattr(child, "name", "")
                    if isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef)
                    else ""
                )
                waiting.append((child, ".".join(filter(None, (name, own)))))


def test_all_who_end_tasks_are_tried() -> None:
    assert set(places({"end", "end_all", "race"})) == CASES.keys() | ALIKE.keys()


def test_nobody_cancels_once_and_waits() -> None:
    """A function that cancels something and waits for it ends it with `end`, but for a client, which has none."""
    found = set[str]()
    for path in sorted(ROOT.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            cancels = [one.lineno for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "cancel"]
            waits = [
                one.lineno
                for one in calls
                if ast.unparse(one.func) == "asyncio.wait"
                or any(how.arg == "return_exceptions" for how in one.keywords)
            ]
            if cancels and waits and min(cancels) < max(waits):
                found.add(f"{path.relative_to(ROOT)}: {function.name}")
    assert found == {"client/async_client.py: infer_many", "runtime/race.py: end"}
