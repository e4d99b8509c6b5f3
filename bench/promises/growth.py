"""Workers that an autoscaler adds and takes away while requests run: the flags that have it do so all the time, and what it did.

Its rules want a worker more whenever a request waits as they look, and one less when none does. So the number of workers goes up and down
for as long as there is load, and ends at the least.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.stand.fleet import Fleet

RULES = [{"queue_above": 0, "for_s": 0.0, "add": 1}, {"utilisation_below": 9.0, "for_s": 0.0, "remove": 1}]
COOLDOWN = 0.5
LOOK_EVERY = 0.25
"""Seconds between two looks at what the autoscaler wants."""


def flags_of_scaler(least: int, most: int) -> Sequence[str]:
    """Flags of the process that decides how many workers there are."""
    bounds = "--min-workers", str(least), "--max-workers", str(most)
    return "--autoscale", "local", *bounds, "--scale-cooldown-s", f"{COOLDOWN:g}", "--scale-rules", json.dumps(RULES)


def flags_of_host(most: int) -> Sequence[str]:
    """Flags of a worker host that has so many workers at most."""
    return "--autoscale", "local", "--max-workers", str(most)


class Growth:
    """Notes of what the autoscaler wanted.

    Arguments:
        made: the fleet, or the service.

    Attributes:
        changes: number of times that it wanted more, and fewer, as far as was seen.
        most: most workers that it wanted.
    """

    def __init__(self, made: Fleet) -> None:
        self.changes = Counter[str]()
        self.most = 0
        self._made = made

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        before = 0
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for server in (self._made.controllers or self._made.services)[:1]:
                try:
                    wanted = (await asyncio.to_thread(server.ask, "/internal/scaling"))["desired"]
                except (OSError, urllib.error.HTTPError, msgspec.DecodeError, KeyError):
                    continue
                if before and wanted != before:
                    self.changes["more" if wanted > before else "fewer"] += 1
                before, self.most = wanted, max(self.most, wanted)
