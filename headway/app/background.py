"""A service in a thread of this process, for notebooks and tests.

with headway.serve(upper, port=0, block=False) as server:
    print(headway.Client(server.url).infer("hello").output)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar

from headway.app.banner import EVERYWHERE
from headway.app.model_plans import Given
from headway.app.wiring import Process, build
from headway.config import Settings
from headway.errors import HeadwayError
from headway.http.server.listener import Listener
from headway.model import Role
from headway.runtime import log
from headway.runtime.race import end_all

T = TypeVar("T")


class BackgroundService:
    """Service that runs in its own thread, which alone may use the parts of `process`. It is up when the constructor returns.

    Raises:
        SettingError: a setting can't be met, for example because a port is taken.
        TargetError: the target can't be loaded or breaks the rules.
        BrokerUnavailable: the broker doesn't answer.
    """

    def __init__(self, settings: Settings, role: Role, target: Given, listener: type[Listener] = Listener) -> None:
        self._settings, self._target = settings, target
        self._build = partial(build, settings, role, target, listener)
        self._up: Future[Process] = Future()
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._live, name="headway-serve", daemon=True)
        self._thread.start()
        try:
            self.process = self._up.result()
        except BaseException:
            self.stop(drain=False)
            raise
        public = self.process.public
        self.url = _url(settings, settings.host, public.port if public is not None else 0)
        self.admin_url = _url(settings, settings.admin_host, self.process.admin.port)
        atexit.register(self._abandon)

    def __repr__(self) -> str:
        return f"<headway server of {self._target} at {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, *, drain: bool = True) -> None:
        """End the service and wait until it has ended. Safe to call more than once. With `drain` held requests are answered
        first, within the drain time-out. Without it they get 503."""
        self._stopping = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # The loop may be closed.
                loop.call_soon_threadsafe(self._leave.set if drain else task.cancel)
        self._thread.join()
        atexit.unregister(self._abandon)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the service's event loop and return its result. Raises RuntimeError if the service has ended."""
        if self._loop is None or not self.running:
            work.close()
            raise RuntimeError("the service has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the service to end. Return True if it has. Raises HeadwayError if it failed."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._ended.result()
        return True

    def _abandon(self) -> None:
        """End the service at exit of the program. A forked child has no such thread, and so ends nothing."""
        if self._pid == os.getpid():
            self.stop(drain=False)

    def _live(self) -> None:
        import uvloop

        settings = self._settings
        try:
            with (
                log.beside(settings.log_level, json=settings.log_json),
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(self._serve())
            self._ended.set_result(None)
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as exc:
            self._ended.set_exception(exc)
        if not self._up.done():
            self._up.set_exception(self._ended.exception() or HeadwayError("the service was stopped before it was up"))

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopping:
            return
        process = self._build()
        try:
            await process.service.start()
            self._up.set_result(process)
            await self._leave.wait()
            await process.service.drain()
        finally:
            await process.service.stop()
            await end_all()


def _url(settings: Settings, host: str, port: int) -> str:
    address = EVERYWHERE.get(host, host)
    return f"{settings.scheme}://[{address}]:{port}" if ":" in address else f"{settings.scheme}://{address}:{port}"
