"""Tests that are coroutine functions on a stand.

@on_stand(whole=True)
async def test_a_request_is_answered(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

Scene = Callable[..., Coroutine[Any, Any, None]]


def scene(play: Callable[[Scene], None], tools: int = 1) -> Callable[[Scene], Callable[..., None]]:
    """Make a test of a coroutine function, which `play` calls on a stand.

    Arguments:
        play: opens the stand, runs a coroutine function on it, and closes it.
        tools: number of the arguments that come from the stand; pytest gives those behind them.
    """

    def decorate(test: Scene) -> Callable[..., None]:
        return as_test(test, lambda **given: play(lambda *made: test(*made, **given)), tools)

    return decorate


def as_test(scene: Scene, play: Callable[..., None], tools: int) -> Callable[..., None]:
    """Have pytest call `play` with what it would give to a scene, but for the first arguments."""
    test = functools.wraps(scene)(play)
    parameters = [*inspect.signature(scene).parameters.values()][tools:]
    vars(test)["__signature__"] = inspect.Signature(parameters)
    return test


def scene_in(fixture: str, play: Callable[..., None]) -> Callable[[Scene], Callable[..., None]]:
    """Make a test of a coroutine function, which `play` calls on what it opens with the value of a fixture."""

    def decorate(test: Scene) -> Callable[..., None]:
        [_, *wanted] = inspect.signature(test).parameters.values()
        names = [one.name for one in wanted]

        def run(**given: Any) -> None:
            play(given[fixture], lambda made: test(made, **{name: given[name] for name in names}))

        place = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        parameters = [*wanted, *([] if fixture in names else [place])]
        vars(made := functools.wraps(test)(run))["__signature__"] = inspect.Signature(parameters)
        return made

    return decorate
