"""Whoever ends tasks ends them though their first cancellation is lost, as it is by libraries now and then: by `end`.

What `end`, `end_all` and `race` do is tried in test_supervisor.
"""

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import headway

ROOT = Path(headway.__file__).parent
RACES = {"end", "end_all", "race"}
ENDING = {
    "app/serving.py: BackgroundService._serve",
    "app/runner.py: run",
    "app/runner.py: run.ready",
    "app/runner.py: _Hangups.end",
    "app/runner.py: _unless",
    "brokers/reap_timer.py: ReapTimer.close",
    "brokers/redis/broker.py: RedisBroker.wait_for_work",
    "brokers/redis/clients.py: Cluster.close",
    "brokers/redis/connection.py: RedisConnection.close",
    "brokers/redis/failover.py: _paused",
    "brokers/redis/broker.py: Mailbox.close",
    "brokers/redis/broker.py: Mailbox.remove",
    "brokers/redis/receipts.py: Receipts.close",
    "brokers/redis/clients.py: Sentinels._vote",
    "brokers/redis/clients.py: Sentinels.aclose",
    "brokers/redis/clients.py: Sentinels.renew",
    "brokers/redis/shard_router.py: ShardRouter.close",
    "brokers/redis/shard_queue.py: Wakeups.close",
    "bulk/jobs.py: Feeder._begin",
    "bulk/jobs.py: Feeder.close",
    "bulk/job_run.py: JobRun._answer",
    "gateway/judge.py: Judge._wait_for_news",
    "http/server/listener.py: Listener.close",
    "http/tasks.py: _Tasks._follow",
    "load/generator.py: run_load.drive",
    "runtime/race.py: end_all",
    "runtime/race.py: race",
    "runtime/supervisor.py: Supervisor._keep",
    "runtime/supervisor.py: Supervisor.stop",
    "worker/batcher.py: Batcher._serve_until_gone",
    "worker/gpu_turns.py: TurnedSource.wait_for_work",
    "worker/helping.py: Claims.wait",
    "worker/shared_gpus.py: SharedGpus.stop",
    "worker/starting.py: start_all",
}
"""Functions of Headway that end what may await redis-py, asyncpg, aiohttp or gRPC."""


def sources(text: str) -> Iterator[tuple[Path, ast.Module]]:
    """Modules of Headway with this text in them."""
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if text in source:
            yield path.relative_to(ROOT), ast.parse(source)


def endings(path: Path, tree: ast.Module) -> Iterator[str]:
    """Functions of a module that use `end`, `end_all` or `race`, or pass one of them on, as FILE: NAME."""
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "headway.runtime.race"
        for alias in node.names
    }
    names = imported & RACES if imported else RACES
    waiting = deque[tuple[ast.AST, str]]([(tree, "")])
    while waiting:
        node, name = waiting.popleft()
        used = [node.func, *node.args] if isinstance(node, ast.Call) else []
        if any(isinstance(each, ast.Name) and each.id in names for each in used):
            yield f"{path}: {name}"
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef)
            own = getattr(child, "name", "") if named else ""
            waiting.append((child, ".".join(filter(None, (name, own)))))


def test_all_places_that_end_tasks_do_so_with_end() -> None:
    modules = [*sources("from headway.runtime.race import"), *sources("async def end_all(")]
    assert {place for module in modules for place in endings(*module)} == ENDING


def test_nobody_cancels_once_and_waits() -> None:
    """A function that cancels something and waits for it ends it with `end`, but for a client, which has none."""
    found = set[str]()
    for path, tree in sources(".cancel("):
        for function in ast.walk(tree):
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            cancels = [
                call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "cancel"
            ]
            waits = [
                call.lineno
                for call in calls
                if ast.unparse(call.func) == "asyncio.wait"
                or any(how.arg == "return_exceptions" for how in call.keywords)
            ]
            if cancels and waits and min(cancels) < max(waits):
                found.add(f"{path}: {function.name}")
    assert found == {"client/async_client.py: infer_many", "runtime/race.py: end"}
