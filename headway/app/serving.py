"""`headway.serve`: runs everything in one process, as `headway serve` does, from a Python program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, overload

from headway.app.background import BackgroundService
from headway.app.model_plans import Given
from headway.app.python_target import TargetLike, target_of
from headway.backends.process import is_child
from headway.config import Settings, load
from headway.errors import HeadwayError, SettingError, TargetError
from headway.http.server.listener import Listener
from headway.model import Role

__all__ = ["BackgroundService", "serve"]

Value = str | int | float | bool | os.PathLike[str] | None
"""Value of a setting, or None if it isn't given."""

TargetsLike = TargetLike | Mapping[str, TargetLike]
"""Target, or a mapping of several models' targets by name or NAME@VERSION."""

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

    Worker processes import the target's script to find the target, so it needs this guard.

    Arguments:
        target: function or class defined at the top level of a module or script, `functools.partial` of a class for its
            arguments, or text as `headway serve` takes it. Several models are a dict of these by name, and versions of a
            model by NAME@VERSION.
        block: True to serve until SIGINT or SIGTERM, or False to serve in a thread that is up when the call returns.
        config: TOML file of settings, by default `headway.toml` in the working directory if it exists.
        settings: settings by name, for example `max_batch_size=64` (see docs/settings.md). An argument overrides the
            environment, which overrides the file. With `port=0` the system chooses the admin port, too.

    Returns:
        The running service if `block` is False: a context manager with `url`, `admin_url` and `stop()`.

    Raises:
        SettingError: a setting is unknown, invalid or can't be met.
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
            raise SettingError("reload", True, "needs a service that blocks", "Leave it out, or leave out block=False.")
        return start(loaded, given_targets)
    if threading.current_thread() is not threading.main_thread() or _in_loop():
        raise HeadwayError(
            "headway.serve blocks, which it can do in the main thread only, and not within an event loop, as notebooks "
            "have one. Use block=False."
        )
    _run(loaded, given_targets)
    return None


def refuse_in_worker(function: str) -> None:
    """Raise TargetError in a worker process, where a function that starts workers would do so endlessly."""
    if is_child():
        raise TargetError(
            f"{function} was called in a worker process, which imports this script to find its target. "
            'Put the call under: if __name__ == "__main__":'
        )


def _targets(target: TargetsLike) -> Given:
    if not isinstance(target, Mapping):
        return target_of(target)
    if not target:
        raise TargetError('target = {}: names no model. Give each a name and a target, for example {"upper": upper}.')
    return {name: target_of(model_target) for name, model_target in target.items()}


def start(settings: Settings, target: Given, listener: type[Listener] = Listener) -> BackgroundService:
    """Start a service in a thread. `serve` describes what this raises. Expected errors are raised without the frames of the
    service's thread, because their message says it all."""
    try:
        return BackgroundService(settings, Role.SERVE, target, listener)
    except HeadwayError as exc:
        raise exc.with_traceback(None) from None


def _run(settings: Settings, target: Given) -> None:
    """Serve until a signal comes. Then restore the signal handlers and the garbage collector."""
    import uvloop

    from headway.app import runner, signals
    from headway.runtime import log

    with ExitStack() as stack:
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        stack.callback(gc.unfreeze)
        stack.callback(gc.set_threshold, *gc.get_threshold())
        writer = stack.enter_context(log.running(settings.log_level, json=settings.log_json))
        loop = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        signals.ignore_until_ready()
        loop.run(runner.run(settings, Role.SERVE, target, writer.reopen))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
