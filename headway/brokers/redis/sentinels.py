"""Sentinels, asked who is the primary.

While a failover goes on they do not agree: the one that leads it knows the new primary first. All are asked at once, and an
address that has just refused to be the primary is the last to be believed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.exceptions import ResponseError

Address = tuple[str, int]
"""Host and port."""


class Sentinels(Sentinel):
    """The Sentinels of one set-up.

    Arguments:
        hosts: where they are.
        asking: how they are connected to.
    """

    def __init__(self, hosts: Sequence[Address], asking: dict[str, Any]) -> None:
        super().__init__(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        self._refused: Address | None = None

    def avoid(self, address: Address) -> None:
        """Believe in another primary than this one, if any Sentinel does."""
        self._refused = address

    async def renew(self) -> None:
        """Connect anew, with what the files hold now."""
        for one in self.sentinels:
            await one.connection_pool.disconnect(inuse_connections=False)
            one.connection_pool._available_connections.clear()

    async def discover_master(self, service_name: str) -> Address:
        """Address of the primary that most Sentinels name. One that does not answer is not waited for when most do.

        Raises:
            MasterNotFoundError: none of them names one that is up.
            ResponseError: what was asked is no Sentinel.
        """
        votes: Counter[Address] = Counter()
        errors: list[BaseException] = []
        asked = {asyncio.ensure_future(_primary(one, service_name)) for one in self.sentinels}
        try:
            while asked and not self._agreed(votes):
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if (error := one.exception()) is not None:
                        errors.append(error)
                    elif (answer := one.result()) is not None:
                        votes[answer] += 1
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if votes:
            return max(votes, key=lambda address: (address != self._refused, votes[address]))
        for error in errors:
            if isinstance(error, ResponseError):
                raise error
        reasons = ", ".join(f"{type(error).__name__}: {error}" for error in errors)
        raise MasterNotFoundError(f"No master found for {service_name!r}{f' : {reasons}' if reasons else ''}")

    def _agreed(self, votes: Counter[Address]) -> bool:
        most = 2 * max((count for address, count in votes.items() if address != self._refused), default=0)
        return most > len(self.sentinels)


async def _primary(sentinel: Redis, name: str) -> Address | None:
    """The primary in the eyes of one Sentinel; None when it knows of none that is up."""
    found = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)  # type: ignore[no-untyped-call]
    if found is None:
        return None
    host, port = found[0].decode() if isinstance(found[0], bytes) else found[0], int(found[1])
    masters: Any = await sentinel.sentinel_masters()
    state = masters.get(name, {})
    down = state.get("is_sdown") or state.get("is_odown")
    return None if down and (state["ip"], state["port"]) == (host, port) else (host, port)
