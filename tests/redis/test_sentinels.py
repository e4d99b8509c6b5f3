"""Primary that the Sentinels are believed to name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ResponseError

from headway.brokers.redis.link import Address
from headway.brokers.redis.sentinels import Sentinels, deposed_by

A, B = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


class Sentinel:
    """Names a primary, fails, or never answers."""

    def __init__(
        self, names: Address | Exception | None, *, config_epoch: int = 0, down: bool = False, silent: bool = False
    ) -> None:
        self._names = names
        self._config_epoch = config_epoch
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
        state = {
            "ip": A[0],
            "port": A[1],
            "is_sdown": self._down,
            "is_odown": False,
            "config-epoch": self._config_epoch,
        }
        return {"headway": state}


class Asked:
    """Asks Sentinels, one answer after the other; what is left is noted."""

    def __init__(self, avoiding: Address | None = None) -> None:
        self.left: list[Address] = []
        self._asks = Sentinels([], "headway", {}, self._leave)
        if avoiding is not None:
            self._asks.avoid(avoiding)

    def __call__(self, *sentinels: Sentinel) -> Address:
        async def main() -> Address:
            return await asyncio.wait_for(self._asks.discover_master("headway"), 5)

        self._asks.sentinels = list[Any](sentinels)
        return asyncio.run(main())

    async def _leave(self, address: Address) -> None:
        self.left.append(address)


def named(*sentinels: Sentinel, avoiding: Address | None = None) -> Address:
    return Asked(avoiding)(*sentinels)


def test_most_of_them_are_believed() -> None:
    assert named(Sentinel(A), Sentinel(B), Sentinel(A)) == A


def test_a_silent_one_is_not_waited_for_when_most_agree() -> None:
    assert named(Sentinel(A), Sentinel(None, silent=True), Sentinel(A)) == A


def test_one_that_knows_another_than_who_has_refused_is_believed_before_the_rest() -> None:
    assert named(Sentinel(A), Sentinel(A), Sentinel(B), avoiding=A) == B


def test_who_has_refused_is_asked_again_when_nobody_else_is_named() -> None:
    assert named(Sentinel(A), Sentinel(A), Sentinel(NoConnection("gone")), avoiding=A) == A


def test_the_highest_epoch_is_believed_before_most_of_them() -> None:
    assert named(Sentinel(A), Sentinel(B, config_epoch=1), Sentinel(A), avoiding=A) == B
    assert named(Sentinel(A), Sentinel(B, config_epoch=1), Sentinel(None), avoiding=B) == B


def test_what_most_have_missed_is_not_believed_again_while_one_knows_better() -> None:
    asked = Asked()
    assert asked(Sentinel(B, config_epoch=1), Sentinel(B, config_epoch=1)) == B
    assert asked(Sentinel(A), Sentinel(A), Sentinel(B, config_epoch=1)) == B


def test_an_epoch_that_nobody_knows_any_more_does_not_count() -> None:
    asked = Asked()
    assert asked(Sentinel(B, config_epoch=7)) == B
    assert asked(Sentinel(A), Sentinel(A), Sentinel(A)) == A


def test_the_old_primary_is_left_once_another_is_named() -> None:
    asked = Asked()
    for names in (A, A, B, B):
        asked(Sentinel(names))
    assert asked.left == [A]


@pytest.mark.parametrize(
    "event",
    ["headway 10.0.0.1 6379 10.0.0.2 6379", "slave 10.0.0.2:6379 10.0.0.2 6379 @ headway 10.0.0.1 6379"],
)
def test_what_a_sentinel_publishes_names_the_deposed_primary(event: str) -> None:
    assert deposed_by(event, "headway") == A
    assert deposed_by(event, "other") is None


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


def test_those_who_ask_at_once_share_two_votes_and_hear_of_what_came_before_they_asked() -> None:
    """A vote that had begun before may not know yet."""

    async def main() -> None:
        asks, before, after = Sentinels([], "headway", {}, leave), Counted(A), Counted(B, config_epoch=1)
        asks.sentinels = list[Any]([before])
        first = [asyncio.ensure_future(asks.discover_master("headway")) for _ in range(10)]
        await before.asked.wait()
        asks.sentinels = list[Any]([after])
        late = [asyncio.ensure_future(asks.discover_master("headway")) for _ in range(10)]
        await asyncio.sleep(0)
        before.go.set()
        after.go.set()
        assert await asyncio.gather(*first, *late) == [A] + [B] * 19
        assert (before.times, after.times) == (1, 1)

    async def leave(address: Address) -> None:
        pass

    asyncio.run(main())


class Counted(Sentinel):
    """Answers when it is told to, and counts how often it was asked."""

    def __init__(self, names: Address, config_epoch: int = 0) -> None:
        super().__init__(names, config_epoch=config_epoch)
        self.times, self.asked, self.go = 0, asyncio.Event(), asyncio.Event()

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        self.times += 1
        self.asked.set()
        await self.go.wait()
        return await super().sentinel_masters()
