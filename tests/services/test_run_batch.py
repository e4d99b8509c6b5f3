"""A batch of another version on a worker that helps: what does not run there is left out, and counted in no place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from headway.errors import BatchRaised
from headway.model import Entry, ItemResult, Lease, Slot
from headway.ports import Backend
from headway.worker.helping import run_batch
from tests.contracts.brokers import ask


class Raising:
    """Backend whose call of the last input alone raises."""

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        raise BatchRaised("no good", places=(len(entries) - 1,))


def test_the_places_of_a_call_that_raised_are_those_of_the_lease() -> None:
    pinned = msgspec.structs.replace(ask(id="elsewhere"), pinned=True)
    lease = Lease(
        1,
        Slot("gpu-0", "m", 8, version="2", helps=True),
        [pinned, ask(id="good"), pinned, ask(id="bad")],
        "full",
        0.0,
        1.0,
        1.0,
    )
    with pytest.raises(BatchRaised) as raised:
        asyncio.run(run_batch(cast("Backend", cast(Any, Raising())), lease, 1.0))
    assert raised.value.places == (3,)
