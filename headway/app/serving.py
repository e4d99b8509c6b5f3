"""`headway.serve`: run everything in one process from a Python program, as `headway serve` does.

With `block=False`, the service runs in a thread of the program, for notebooks and tests:

    with headway.serve(upper, port=0, block=False) as server:
        print(headway.Client(server.url).infer("hello").output)

A worker is a separate process that imports its target, so a target given as an object must be importable by name. A worker finds
objects of the running script through the script's file, and other objects through their module.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, TypeVar, overload

from headway.app.banner import EVERYWHERE
from headway.app.model_plans import Given
from headway.app.wiring import Process, build
from headway.backends.process import is_child
from headway.config import Settings, load
from headway.config.target import FileTarget, ModuleTarget, Target, parse_target
from headway.core import arguments
from headway.errors import HeadwayError, SettingError, TargetError
from headway.http.server.listener import Listener
from headway.model import Role
from headway.runtime import log
from headway.runtime.race import end_all

__all__ = ["BackgroundService", "serve"]

TargetLike = str | Callable[..., Any]  # Function, class, `functools.partial` of a class, or string naming a target.

_RUN_AS = ("__main__", "__mp_main__")  # Names of the program's module. Children of `multiprocessing` use the second.
_INSTALLED = ("site-packages", "dist-packages")


def target_of(given: TargetLike) -> Target:
    """Return the target that an object or string names. Raises TargetError if worker processes couldn't import it."""
    if isinstance(given, str):
        return parse_target(given)
    if isinstance(given, functools.partial) and isinstance(given.func, type):
        return _with_arguments(given)
    if not (isinstance(given, type) or inspect.isfunction(given)):
        kind = type(given).__name__
        raise _unfit(kind, "is neither a function nor a class", "Pass the class itself; each worker builds its own.")
    name, qualified = given.__module__, given.__qualname__
    if "<lambda>" in qualified:
        raise _unfit(qualified, "has no name by which workers could import it", "Write a function: def f(inputs): …")
    if "<locals>" in qualified:
        outer = qualified.partition(".<locals>")[0]
        hint = "Move it to the top level of its module."
        raise _unfit(qualified, f"is defined inside {outer}, where workers cannot import it", hint)
    module = sys.modules.get(name)
    if name in _RUN_AS:
        return _of_program(given, module)
    if module is None or _resolve(module, qualified) is not given:
        hint = "Pass the object with this name, or a string: module:name."
        raise _unfit(qualified, f"is not the object that {name}:{qualified} names", hint)
    return ModuleTarget(name, qualified, folder=_folder(module, name))


def _with_arguments(given: functools.partial[Any]) -> Target:
    if given.args:
        raise _unfit(given.func.__qualname__, "has positional arguments", "Pass them by name.")
    try:
        text = arguments.write(given.keywords)
    except arguments.NoArguments as exc:
        hint = "Arguments go to another process, so they must be strings, numbers, True, False, lists or dicts."
        raise _unfit(given.func.__qualname__, f"cannot get these arguments: {exc}", hint) from None
    named = target_of(given.func)
    return dataclasses.replace(named, arguments=text) if isinstance(named, ModuleTarget | FileTarget) else named


def _of_program(given: Any, module: ModuleType | None) -> Target:
    """Return a target from the running program: a script, a module run by `python -m`, a notebook or an interactive session."""
    qualified = given.__qualname__
    file = getattr(module, "__file__", None)
    if module is None or file is None or not Path(file).is_file() or _source(given) != Path(file).resolve():
        hint = "Write it to a file (in a notebook with %%writefile upper.py), and pass a string: 'upper.py:upper'."
        raise _unfit(
            qualified, "is defined in a notebook or an interactive session, where workers cannot import it", hint
        )
    if _resolve(module, qualified) is not given:
        raise _unfit(
            qualified, f"is not the object that {file}:{qualified} names", "Call serve after its last definition."
        )
    spec = getattr(module, "__spec__", None)
    if spec is not None and "." in spec.name:
        return ModuleTarget(spec.name, qualified, folder=_folder(module, spec.name))
    return FileTarget(Path(file).resolve(), qualified)


def _source(given: Any) -> Path | None:
    try:
        return Path(inspect.getfile(given)).resolve()
    except (OSError, TypeError):
        return None


def _resolve(module: ModuleType, qualified: str) -> object:
    target: object = module
    for part in qualified.split("."):
        target = getattr(target, part, None)
    return target


def _folder(module: ModuleType, name: str) -> str:
    """Return the folder that a module was imported from, or "" if workers find the module without it."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    path = Path(file).resolve()
    path = path.parent if path.name == "__init__.py" else path
    root = path.parents[name.count(".")]
    installed = any(part in _INSTALLED for part in root.parts) or root.is_relative_to(sys.base_prefix)
    return "" if installed else str(root)


def _unfit(name: str, reason: str, hint: str) -> TargetError:
    return TargetError(f"target {name} {reason}. {hint}")


T = TypeVar("T")


class BackgroundService:
    """A service in its own thread. Only that thread may use the parts of `process`. The constructor returns once the service is
    up, and raises the same errors as `serve`."""

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
        """End the service and wait until it has ended. Safe to call more than once. If `drain`, the service first answers the requests
        that it holds, within the drain timeout. Otherwise, they get 503."""
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
        """Wait up to `timeout` seconds for the service to end. Return True if it ended. Raises HeadwayError if it failed."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._ended.result()
        return True

    def _abandon(self) -> None:
        if self._pid == os.getpid():  # A forked child doesn't have the service's thread.
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


Value = str | int | float | bool | os.PathLike[str] | None  # The value of a setting, or None for its default.
TargetsLike = TargetLike | Mapping[str, TargetLike]  # A target, or a mapping from model name or NAME@VERSION to target.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@overload
def serve(
    target: TargetsLike, *, block: Literal[True] = True, config: str | os.PathLike[str] | None = None, **settings: Value
) -> None: ...


@overload
def serve(
    target: TargetsLike, *, block: Literal[False], config: str | os.PathLike[str] | None = None, **settings: Value
) -> BackgroundService: ...


def serve(
    target: TargetsLike, *, block: bool = True, config: str | os.PathLike[str] | None = None, **settings: Value
) -> BackgroundService | None:
    """Serve a target: HTTP, queue and GPU workers in one process.

        if __name__ == "__main__":
            headway.serve(upper, max_batch_size=64, workers=2)

    The script needs this guard, because worker processes import it to find the target.

    Arguments:
        target: function or class at the top level of a module or script, `functools.partial` of a class with arguments, or
            string as for `headway serve`. For several models, a dict from name to target, or from NAME@VERSION to target for
            versions of a model.
        block: True to serve until SIGINT or SIGTERM, or False to serve in a thread. The service is then up when the call returns.
        config: TOML file with settings, by default `headway.toml` in the working directory if it exists.
        settings: settings by name, for example `max_batch_size=64` (see docs/settings.md). Arguments override the environment, which
            overrides the file. With `port=0`, the system chooses the admin port too.

    Returns:
        The running service if `block` is False: a context manager with `url`, `admin_url` and `stop()`.

    Raises:
        SettingError: a setting is unknown, invalid or can't be applied.
        TargetError: the target can't be loaded or breaks the rules.
        BrokerUnavailable: the broker doesn't answer.
    """
    refuse_in_worker("headway.serve")
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    if given.get("port") == 0:
        given.setdefault("admin_port", 0)
    given_targets = _targets(target)
    names = dict.fromkeys(given_targets) if isinstance(given_targets, Mapping) else [""]
    loaded = load(given, file=None if config is None else Path(config), spell=str, targets=names)
    if not block:
        if loaded.reload:
            raise SettingError("reload", True, "does not work with block=False", "Leave out one of them.")
        return start(loaded, given_targets)
    if threading.current_thread() is not threading.main_thread() or _in_loop():
        raise HeadwayError(
            "headway.serve can only block in the main thread, and not inside an event loop such as a notebook's. "
            "Use block=False."
        )
    _run(loaded, given_targets)
    return None


def refuse_in_worker(function: str) -> None:
    """Raise TargetError in a worker process, where a function that starts workers would start them without end."""
    if is_child():
        raise TargetError(
            f"{function} was called in a worker process, which imports this script to find its target. "
            'Put the call under: if __name__ == "__main__":'
        )


def _targets(target: TargetsLike) -> Given:
    if not isinstance(target, Mapping):
        return target_of(target)
    if not target:
        hint = 'Give each model a name and a target, for example {"upper": upper}.'
        raise TargetError(f"target = {{}}: names no model. {hint}")
    return {name: target_of(model_target) for name, model_target in target.items()}


def start(settings: Settings, target: Given, listener: type[Listener] = Listener) -> BackgroundService:
    """Start a service in a thread. Raises the same errors as `serve`."""
    try:
        return BackgroundService(settings, Role.SERVE, target, listener)
    except HeadwayError as exc:
        raise exc.with_traceback(None) from None  # The message of an expected error is enough.


def _run(settings: Settings, target: Given) -> None:
    """Serve until a signal arrives. Then restore the signal handlers and the garbage collector."""
    import uvloop

    from headway.app import runner

    with ExitStack() as stack:
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        stack.callback(gc.unfreeze)
        stack.callback(gc.set_threshold, *gc.get_threshold())
        writer = stack.enter_context(log.running(settings.log_level, json=settings.log_json))
        loop = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.ignore_until_ready()
        loop.run(runner.run(settings, Role.SERVE, target, writer.reopen))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
