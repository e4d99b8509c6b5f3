"""Batches calls that are made at about the same time into one call per node, because periodic tasks wake up together.

A call waits a few turns of the event loop for others. Each call gets its own answer or error. If there are no others, the call is sent
as it is. Identical read-only calls become one call with one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

TURNS = 6  # Turns of the event loop for which calls gather. No task takes more turns from its timer to its call.
MOST = 16  # Maximum number of calls sent as one, because a step blocks the server.

T = TypeVar("T")


class Caller(Protocol):
    """Connection to the server."""

    async def call(self, function: str, key: str, *arguments: Any) -> Any: ...


class _Part(msgspec.Struct, frozen=True):
    """One call, and the callers that are waiting for its answer."""

    function: str
    key: str
    arguments: tuple[object, ...]
    answers: list[asyncio.Future[Any]]

    @property
    def wanted(self) -> list[asyncio.Future[Any]]:
        return [answer for answer in self.answers if not answer.done()]


class Together:
    """Collects calls that a process makes at about the same time. Calls are batched if `place` returns the same value for their
    keys. `error` turns the server's error message into an exception."""

    def __init__(self, link: Caller, place: Callable[[str], str], error: Callable[[str], Exception]) -> None:
        self._link, self._place, self._error = link, place, error
        self._gathering: dict[str, list[_Part]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def join(self, function: str, key: str, *arguments: object) -> Any:
        loop, place = asyncio.get_running_loop(), self._place(key)
        part = _Part(function, key, arguments, [loop.create_future()])
        if place not in self._gathering:
            self._gathering[place] = []
            sending = loop.create_task(self._send(place))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        self._gathering[place].append(part)
        return await part.answers[0]

    async def share(self, function: str, key: str, *arguments: object) -> Any:
        """Make a read-only call like `join`. Concurrent calls that differ only in the last argument share one answer."""
        for part in self._gathering.get(self._place(key), ()):
            if (part.function, part.key, part.arguments[:-1]) == (function, key, arguments[:-1]):
                part.answers.append(answer := asyncio.get_running_loop().create_future())
                return await answer
        return await self.join(function, key, *arguments)

    async def _send(self, place: str) -> None:
        try:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for part in self._gathering.pop(place):
                for answer in part.answers:
                    answer.cancel()
            raise
        parts = [part for part in self._gathering.pop(place) if part.wanted]
        await asyncio.gather(*(self._make(parts[first : first + MOST]) for first in range(0, len(parts), MOST)))

    async def _make(self, parts: list[_Part]) -> None:
        try:
            for part, answer in zip(parts, await self._answers(parts), strict=True):
                self._hand_out(part, *answer)
        except BaseException as exc:  # No caller may wait for ever, whatever the server answers.
            for wanted in (answer for part in parts for answer in part.wanted):
                wanted.set_exception(exc) if isinstance(exc, Exception) else wanted.cancel()
            if not isinstance(exc, Exception):
                raise

    async def _answers(self, parts: list[_Part]) -> Sequence[Sequence[Any]]:
        """Return a pair for each call: 1 and its result, or 0 and its error message."""
        if len(parts) == 1:
            [part] = parts
            return [(1, await self._link.call(part.function, part.key, *part.arguments))]
        each = ((part.function, part.key, len(part.arguments), *part.arguments) for part in parts)
        answers: Sequence[Sequence[Any]] = await self._link.call(
            "together", parts[0].key, *(argument for part in each for argument in part)
        )
        return answers

    def _hand_out(self, part: _Part, done: int, result: Any = None) -> None:
        for answer in part.wanted:
            if done:
                answer.set_result(result)
            else:
                answer.set_exception(self._error(result.decode(errors="replace")))


async def all_of(*calls: Awaitable[T]) -> list[T]:
    """Make calls concurrently and return their answers. If any fail, raise the first error once all have finished."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
