"""Tests that are coroutine functions on a stand: the usual one, or one that a decorator configures.

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
    """A fixture value for coroutine tests: `play` calls the test with the real argument in its place.

    If a test takes several, the last one plays it and makes them all.
    """

    play: Callable[[Scene], object]


def scene(play: Callable[[Scene], None], tools: int = 1) -> Callable[[Scene], Callable[..., None]]:
    """Turn a coroutine function into a test, which `play` calls on a stand.

    Arguments:
        play: opens the stand, runs a coroutine function on it, and closes it.
        tools: number of leading arguments that the stand provides; pytest provides the others.
    """

    def decorate(test: Scene) -> Callable[..., None]:
        return as_test(test, lambda **given: play(lambda *made: test(*made, **given)), tools)

    return decorate


def as_test(scene: Scene, play: Callable[..., None], tools: int) -> Callable[..., None]:
    """Make pytest call `play` with the fixtures of a scene, except its first arguments."""
    test = functools.wraps(scene)(play)
    parameters = [*inspect.signature(scene).parameters.values()][tools:]
    vars(test)["__signature__"] = inspect.Signature(parameters)
    return test
