"""Both clients under one set of blocking methods, so that one suite holds them to one behaviour."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from headway.client import AsyncClient, AsyncTask, Client, Task
from tests.e2e.client import PATIENCE

CLIENTS = ("threads", "asyncio")


class BlockingTask:
    """AsyncTask whose methods block."""

    def __init__(self, call: Callable[[Coroutine[Any, Any, Any]], Any], task: AsyncTask) -> None:
        self._call, self._task, self.id = call, task, task.id

    def status(self) -> Any:
        return self._call(self._task.status())

    def result(self, timeout: float | None = None) -> Any:
        return self._call(self._task.result(timeout))

    def cancel(self) -> None:
        self._call(self._task.cancel())


class BlockingClient:
    """AsyncClient on a loop of its own, in a thread, whose methods block."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        self._client = AsyncClient(*arguments, **how)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def infer(self, *arguments: Any, **how: Any) -> Any:
        return self._call(self._client.infer(*arguments, **how))

    def infer_many(self, *arguments: Any, **how: Any) -> Any:
        return self._call(self._client.infer_many(*arguments, **how))

    def submit(self, *arguments: Any, **how: Any) -> BlockingTask:
        return BlockingTask(self._call, self._call(self._client.submit(*arguments, **how)))

    def task(self, id: str) -> BlockingTask:
        return BlockingTask(self._call, self._client.task(id))

    def close(self) -> None:
        self._call(self._client.close())

    def end(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


AnyClient = Client | BlockingClient
AnyTask = Task | BlockingTask


@contextmanager
def asking(kind: str, *arguments: Any, **how: Any) -> Iterator[AnyClient]:
    if kind == "threads":
        with Client(*arguments, **how) as client:
            yield client
        return
    blocking = BlockingClient(*arguments, **how)
    try:
        yield blocking
    finally:
        blocking.end()
