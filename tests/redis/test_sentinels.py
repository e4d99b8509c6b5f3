"""Whom the Sentinels are believed to name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ResponseError

from headway.brokers.redis.sentinels import Address, Sentinels

A, B = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


class Sentinel:
    """Names a primary, fails, or never answers."""

    def __init__(self, names: Address | Exception | None, *, down: bool = False, silent: bool = False) -> None:
        self._names = names
        self._down = down
        self._silent = silent

    async def execute_command(self, *command: str) -> Any:
        assert command == ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "headway")
        if self._silent:
            await asyncio.Event().wait()
        if isinstance(self._names, Exception):
            raise self._names
        return None if self._names is None else [self._names[0].encode(), str(self._names[1]).encode()]

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        assert isinstance(self._names, tuple)
        return {"headway": {"ip": A[0], "port": A[1], "is_sdown": self._down, "is_odown": False}}


def named(*sentinels: Sentinel, avoiding: Address | None = None) -> Address:
    made = Sentinels([], {})
    made.sentinels = list[Any](sentinels)
    if avoiding is not None:
        made.avoid(avoiding)

    async def main() -> Address:
        return await asyncio.wait_for(made.discover_master("headway"), 5)

    return asyncio.run(main())


def test_most_of_them_are_believed() -> None:
    assert named(Sentinel(A), Sentinel(B), Sentinel(A)) == A


def test_a_silent_one_is_not_waited_for_when_most_agree() -> None:
    assert named(Sentinel(A), Sentinel(None, silent=True), Sentinel(A)) == A


def test_one_that_knows_another_than_who_has_refused_is_believed_before_the_rest() -> None:
    assert named(Sentinel(A), Sentinel(A), Sentinel(B), avoiding=A) == B


def test_who_has_refused_is_asked_again_when_nobody_else_is_named() -> None:
    assert named(Sentinel(A), Sentinel(A), Sentinel(NoConnection("gone")), avoiding=A) == A


def test_a_primary_that_is_down_is_not_named() -> None:
    assert named(Sentinel(A, down=True), Sentinel(A)) == A
    assert named(Sentinel(A, down=True), Sentinel(B, down=True)) == B
    with pytest.raises(MasterNotFoundError):
        named(Sentinel(A, down=True), Sentinel(A, down=True))


def test_when_none_is_named_the_reasons_are_told() -> None:
    with pytest.raises(MasterNotFoundError, match="No master found for 'headway' : ConnectionError: gone"):
        named(Sentinel(None), Sentinel(NoConnection("gone")))


def test_what_is_no_sentinel_says_so() -> None:
    with pytest.raises(ResponseError, match="unknown command"):
        named(Sentinel(ResponseError("unknown command 'SENTINEL'")))
