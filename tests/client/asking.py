"""Gives both clients the same blocking methods, so that one test suite covers both."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headway.client import AsyncClient, AsyncTask, Client
from tests.e2e.client import PATIENCE

CLIENTS = ("threads", "asyncio")


class Blocking:
    """A blocking version of an AsyncClient or AsyncTask. Its coroutines run on a loop in another thread."""

    def __init__(self, of: AsyncClient | AsyncTask, loop: asyncio.AbstractEventLoop) -> None:
        self._of, self._loop = of, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)

        def call(*arguments: Any, **how: Any) -> Any:
            result = found(*arguments, **how)
            if asyncio.iscoroutine(result):
                result = asyncio.run_coroutine_threadsafe(result, self._loop).result(PATIENCE)
            return Blocking(result, self._loop) if isinstance(result, AsyncTask) else result

        return call if callable(found) else found


AnyClient = Client | Blocking


@contextmanager
def asking(kind: str, *arguments: Any, **how: Any) -> Iterator[AnyClient]:
    if kind == "threads":
        with Client(*arguments, **how) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    blocking = Blocking(AsyncClient(*arguments, **how), loop)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield blocking
    finally:
        blocking.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
