"""Tests that are coroutine functions on a stand: on the usual one, or on one that a decorator asks for.

async def test_a_request_is_answered(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ...

@on_stand(whole=True)
async def test_a_request_is_answered(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    ...
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

Scene = Callable[..., Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Played:
    """Value of a fixture for a coroutine function, which gets in its place what `play` calls it with.

    A test that takes several of these is played by the last one, which makes all of them.
    """

    play: Callable[[Scene], object]


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
