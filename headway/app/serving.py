"""`headway.serve`: everything in one process, as `headway serve` does it, from a Python program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
"""Value of a setting; None: as if it was not given."""

TargetsLike = TargetLike | Mapping[str, TargetLike]
"""Target, or those of several models by their names, or NAME@VERSION."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@overload
def serve(
    target: TargetsLike,
    *,
    block: Literal[True] = True,
    config: str | os.PathLike[str] | None = None,
    **settings: Value,
) -> None: ...


@overload
def serve(
    target: TargetsLike,
    *,
    block: Literal[False],
    config: str | os.PathLike[str] | None = None,
    **settings: Value,
) -> BackgroundService: ...


def serve(
    target: TargetsLike,
    *,
    block: bool = True,
    config: str | os.PathLike[str] | None = None,
    **settings: Value,
) -> BackgroundService | None:
    """Serve a target: HTTP, queue and GPU workers in one process.

        if __name__ == "__main__":
            headway.serve(upper, max_batch_size=64, workers=2)

    Worker processes import the target, and with it the script in which it is written; hence the guard.

    Arguments:
        target: function or class, defined at the top level of a module or script; `functools.partial` of a class, for
            its arguments; or text as `headway serve` takes it; or a dict of these by name, for several models, or by
            NAME@VERSION, for versions of a model.
        block: whether to serve until a signal comes (SIGINT or SIGTERM). If not, the service runs in a thread, and is
            up when the call returns.
        config: TOML file of settings; None: `headway.toml`, if there is one in the working directory.
        settings: settings by their names, for example `max_batch_size=64`; see the guide. An argument beats the
            environment, which beats the file. With `port=0` the admin port is the system's choice, too.

    Returns:
        The running service, where the call does not block: a context manager with `url`, `admin_url` and `stop()`.

    Raises:
        SettingError: a setting is unknown, wrong or cannot be met.
        TargetError: the target cannot be loaded or breaks the rules.
        BrokerUnavailable: the broker does not answer.
    """
    refuse_in_worker("headway.serve")
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    if given.get("port") == 0:
        given.setdefault("admin_port", 0)
    found = _targets(target)
    targets = dict.fromkeys(found) if isinstance(found, Mapping) else [""]
    loaded = load(given, file=None if config is None else Path(config), spell=str, targets=targets)
    if not block:
        if loaded.reload:
            raise SettingError("reload", True, "needs a service that blocks", "Leave it out, or leave out block=False.")
        return start(loaded, found)
    if threading.current_thread() is not threading.main_thread() or _in_loop():
        raise HeadwayError(
            "headway.serve blocks, which it can do in the main thread only, and not within an event loop, as notebooks "
            "have one. Use block=False."
        )
    _run(loaded, found)
    return None


def refuse_in_worker(function: str) -> None:
    """Raise TargetError in a worker process, where a function that starts workers would start them without end."""
    if is_child():
        raise TargetError(
            f"{function} was called in a worker process, which imports this script to find its target. "
            'Put the call under: if __name__ == "__main__":'
        )


def _targets(target: TargetsLike) -> Given:
    """Target that is given, or those by name. Raises TargetError."""
    if not isinstance(target, Mapping):
        return target_of(target)
    if not target:
        raise TargetError('target = {}: names no model. Give each a name and a target, for example {"upper": upper}.')
    return {name: target_of(one) for name, one in target.items()}


def start(settings: Settings, target: Given, listener: type[Listener] = Listener) -> BackgroundService:
    """Start a service in a thread, with listeners of a kind; for what it raises see `serve`.

    An error that is foreseen has its cause in its message. The frames of the service's thread would only hide it.
    """
    try:
        return BackgroundService(settings, Role.SERVE, target, listener)
    except HeadwayError as exc:
        raise exc.with_traceback(None) from None


def _run(settings: Settings, target: Given) -> None:
    """Serve until a signal comes; then all is as before."""
    import uvloop

    from headway.app import runner, signals
    from headway.runtime import log

    with (
        _signals_kept(),
        _collector_kept(),
        log.running(settings.log_level, json=settings.log_json) as writer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        signals.ignore_until_ready()
        loop.run(runner.run(settings, Role.SERVE, target, writer.reopen))


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the reactions to signals in the end."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, reaction in before.items():
            signal.signal(number, reaction if reaction is not None else signal.SIG_DFL)


@contextmanager
def _collector_kept() -> Iterator[None]:
    """Restore the garbage collector in the end, which a service sets to its own needs."""
    before = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
