"""Drains as the workers of one process carry them out: what the process's heartbeat has brought back, each slot does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from headway.worker.pools import Workers


async def carry_out(names: Collection[str], process: str, pool: Workers) -> None:
    """Have the slots of a process claim nothing that are drained, and all others claim.

    Arguments:
        names: names of all drains of the fleet.
        process: id of the process.
        pool: its workers.
    """
    whole = process in names
    await asyncio.gather(*(one.hold(whole or one.slot.worker in names) for one in pool.batchers))
