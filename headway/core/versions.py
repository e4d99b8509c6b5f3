"""Choice of the model version that answers a request: the one that the client names, or one drawn by weight.

A version is there if it has a worker, live if one of its workers is healthy, and cold if its model isn't loaded. Live and cold
versions are drawn by their weights, and cold ones are loaded when drawn. Without any weights, each live version is drawn in
proportion to its healthy slots. A version with weight 0 drains, and gets no new requests. If only some versions have a weight,
the others get only requests that name them. If all weights are 0, the versions without a weight are drawn by their slots. If
there are none, the versions with weight 0 serve."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from headway.model import WorkerInfo, WorkerStatus

Weights = Mapping[str, float]  # Weights by version. Empty if none are set.

_WEIGHT = re.compile(r"(?P<version>[A-Za-z0-9_.:/-]{1,128})=(?P<weight>[0-9]{1,9}(?:\.[0-9]{1,6})?)")


class NoWeights(Exception):
    """The text isn't a list of weights; the message says why."""


def read_weights(text: str) -> Weights:
    """Parse weights such as `3=95,4=5`. An empty text has none. Raises NoWeights if the text isn't a list of weights."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _WEIGHT.fullmatch(part)
        if match is None:
            raise NoWeights(f"{part!r} is not VERSION=WEIGHT")
        if match["version"] in weights:
            raise NoWeights(f"names the version {match['version']!r} twice")
        weights[match["version"]] = float(match["weight"])
    if weights and not any(weights.values()):
        raise NoWeights("gives no version a weight above 0")
    return weights


class Versions:
    """Versions of one model, as a gateway sees them. `slots` has the number of healthy slots of each live or cold version.
    `there` has all versions with workers."""

    __slots__ = ("_bounds", "_drawn", "_there", "_weights", "only")

    def __init__(self, slots: Mapping[str, int], there: Iterable[str], weights: Weights) -> None:
        self._there, self._weights = frozenset(there), weights
        shares = {version: float(count) for version, count in slots.items() if count}
        if not any(weights.values()):
            shares = {version: count for version, count in shares.items() if version not in weights} or shares
        else:
            wanted = {version: weight for version, weight in weights.items() if weight}
            shares = (
                {version: weight for version, weight in wanted.items() if version in slots}
                or {version: weight for version, weight in wanted.items() if version in self._there}
                or wanted
            )
        self._drawn: Sequence[str] = sorted(shares)
        self._bounds = list(accumulate(shares[version] for version in self._drawn))
        self.only = self._drawn[0] if len(self._drawn) == 1 else None  # Version if there is only one.

    @property
    def open(self) -> Sequence[str]:
        return sorted(version for version in self._there if self._weights.get(version) != 0.0)

    @property
    def absent(self) -> Sequence[str]:
        return sorted(version for version, weight in self._weights.items() if weight and version not in self._there)

    def takes(self, version: str) -> bool:
        return version in self._there and self._weights.get(version) != 0.0

    def drawn(self, position: float) -> str:
        """Return the version for a request that names none. `position` is drawn uniformly from [0, 1)."""
        if not self._drawn:
            return ""
        return self._drawn[min(bisect_right(self._bounds, position * self._bounds[-1]), len(self._drawn) - 1)]


def position_of(*names: str) -> float:
    """Return the position in [0, 1) for a request that must get the same version each time it is sent."""
    hashed = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).digest()
    return math.ldexp(int.from_bytes(hashed[:6]), -48)


def versions_of(workers: Iterable[WorkerInfo], weights: Weights) -> Versions | None:
    """Return the versions of the model that these workers serve, or None if no worker claims for a particular version."""
    slots: dict[str, int] = {}
    there: set[str] = set()
    for worker in workers:
        if worker.status is WorkerStatus.HEALTHY:  # Workers that claim for any version get their part, too.
            slots[worker.version] = slots.get(worker.version, 0) + 1
        if worker.version and worker.status is WorkerStatus.COLD:
            slots.setdefault(worker.version, 0)
        if worker.version and worker.status is not WorkerStatus.OFFLINE:
            there.add(worker.version)
    return Versions(slots if any(slots.values()) else dict.fromkeys(there, 1), there, weights) if there else None
