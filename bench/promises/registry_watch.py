"""Looks at the registry of a fleet again and again, and notes which slots are healthy."""

from __future__ import annotations

import asyncio
import time
import urllib.error
from typing import Any

import msgspec

from bench.stand.fleet import MODEL, Fleet
from bench.stand.stand import Server
from tests.promises.evidence import Sighting, Slot

LOOK_EVERY = 0.5
"""Seconds between two looks."""


class RegistryWatch:
    """Watch of the registry of a fleet, or of a service.

    Arguments:
        made: the fleet; any of its gateways is asked.
        sightings: where looks are noted.
    """

    def __init__(self, made: Fleet, sightings: list[Sighting]) -> None:
        self._made, self._sightings = made, sightings

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for door in self._made.doors:
                at = time.monotonic()
                listed = await asyncio.to_thread(_listed, door)
                if listed:
                    self._sightings.append(Sighting(at, [slot for one in listed if (slot := self._slot(one))]))
                    break

    def _slot(self, told: dict[str, Any]) -> Slot | None:
        """Slot of a line of the registry; None if it is not healthy, or its host is gone."""
        name = told["worker_id"]
        pid = name.partition("/")[0].rpartition("-")[2]  # Of a fleet's workers; a service's have no such name.
        host = next((one for one in self._made.hosts if str(one.pid) == pid or self._made.services), None)
        if told["status"] != "healthy" or host is None:
            return None
        place = f"{host.name}/{told['gpu']}" if told.get("gpu") else name
        model = "" if told["model"] == MODEL else told["model"]
        return Slot(place, host.name, told["pid"], model, host.version, host.zone)


def _listed(door: Server) -> list[dict[str, Any]]:
    """Workers as a gateway lists them; none where it does not answer."""
    try:
        found: list[dict[str, Any]] = door.ask("/internal/workers", LOOK_EVERY)["workers"]
    except (OSError, urllib.error.HTTPError, msgspec.DecodeError):
        return []
    return found
