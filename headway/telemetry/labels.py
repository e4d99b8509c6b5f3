"""Label values that are known before anything is counted under them.

A series that begins with its first event hides that event from `rate` and `increase`, so every series that a process can
be expected to have is there from the start, with 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from headway import errors
from headway.core.departure import APART, DEADLINE, EARLY, FULL, HEADWAY, RETRY, WINDOW
from headway.core.locality.placement import BUSY, COLD, MIN_WARM
from headway.core.scaling.scaler import DIRECTIONS
from headway.model import MODEL_XIDS, Cause, DedupKind, GpuFigures
from headway.runtime.counters import ITEM, OK
from headway.runtime.tls_transport import REASONS
from headway.telemetry.figures import ProcessFigures

NO_TIER = "none"
"""Tier of what is refused before anybody knows who asks."""
NO_MODEL = ""
"""Model of what is refused before a model that is served is known."""

_BEFORE_A_MODEL = frozenset((
    errors.HEADERS_TOO_LARGE, errors.METHOD_NOT_ALLOWED, errors.NOT_IMPLEMENTED, errors.REQUEST_TIMEOUT, errors.UNAUTHENTICATED,
))  # fmt: skip
"""Codes of what is refused before it is a request for a model."""
OUTCOMES = (
    "ok",
    "cancelled",
    *(code.lower() for code in errors.CODES if code not in _BEFORE_A_MODEL and code not in errors.SHOWN),
)
"""Outcomes of requests for a model that is served."""
REFUSED = (
    "answer", "bodies", "broker", "burst", "capacity", "conflict", "culprit", "draining", "list", "memory", "no_workers",
    "overloaded", "policy", "rate", "shed",
)  # fmt: skip
"""Reasons for which a request for a model that is served is refused."""
REFUSED_UNREAD = (
    "bad_request", "bodies", "calls", "forbidden", "headers_too_large", "internal", "method_not_allowed", "not_found",
    "payload_too_large", "polls", "rate", "request_timeout",
)  # fmt: skip
"""Reasons for which a request is refused before its model is known."""
REFUSED_STRANGERS = ("connections", "unauthenticated")
"""Reasons for which a request is refused before anybody knows who asks, and never afterwards."""
DEPARTURES = (FULL, DEADLINE, WINDOW, HEADWAY, EARLY, RETRY, APART)
CAUSES = tuple(cause.value for cause in Cause)
WASTES = ("departed", *CAUSES)
EVICTIONS = (COLD, BUSY, MIN_WARM)
WAYS = tuple(product(("in", "out"), ("arena", "frame")))
EFFECTS = ("changed", "refused", "shadow", "failed")
SHARED = tuple(product((kind.value for kind in DedupKind), ("joined", "kept")))


def requests(own: ProcessFigures) -> Iterable[tuple[str, str, str]]:
    """Model, tier and outcome of requests."""
    return product(_served(own), own.tiers, OUTCOMES)


def latencies(own: ProcessFigures) -> Iterable[tuple[str, str]]:
    """Model and tier of requests."""
    return product(_served(own), own.tiers)


def refusals(own: ProcessFigures) -> Iterator[tuple[str, str, str]]:
    """Reason, tier and model of refusals."""
    if own.pending is None:
        return
    yield from product(REFUSED, own.tiers, own.models)
    yield from product(REFUSED_UNREAD, (NO_TIER, *own.tiers), (NO_MODEL,))
    yield from product(REFUSED_STRANGERS, (NO_TIER,), (NO_MODEL,))


def shared(own: ProcessFigures) -> Iterator[tuple[str, str, str]]:
    """Model, kind of the dedup key, and how a request came to another's outcome."""
    return ((model, kind, how) for model in _served(own) for kind, how in SHARED)


def rules(own: ProcessFigures) -> Iterable[tuple[str, str]]:
    """Rule of the input policy, and what it does."""
    return product(own.rules, EFFECTS)


def direct(own: ProcessFigures) -> Iterable[tuple[str]]:
    """Model that a fallback answers for."""
    return ((model,) for model in own.fallbacks)


def runs(own: ProcessFigures) -> Iterator[tuple[str]]:
    """Model that is run here."""
    return ((model,) for model in sorted({model for model, _ in own.slots or ()}))


def departures(own: ProcessFigures) -> Iterator[tuple[str, str]]:
    """Model that is run here, and reason of a departure."""
    return ((model, reason) for (model,) in runs(own) for reason in DEPARTURES)


def inputs(own: ProcessFigures) -> Iterator[tuple[str, str, str]]:
    """Model and version that run here, and how a run of an input goes."""
    return ((*run, outcome) for run in own.versions for outcome in (OK, ITEM, *CAUSES))


def slots(own: ProcessFigures) -> Iterator[tuple[str, str]]:
    """Model and worker of each slot."""
    return iter(own.slots or ())


def workers(own: ProcessFigures) -> Iterator[tuple[str]]:
    """Worker of each slot."""
    return ((worker,) for _, worker in own.slots or ())


def of_batchers(own: ProcessFigures, values: Iterable[str]) -> Iterator[tuple[str]]:
    """Values of the one label of what only batchers count."""
    return ((value,) for value in (values if own.slots is not None else ()))


def xid_causes(gpu: GpuFigures) -> Iterator[tuple[str, int]]:
    """Causes of a GPU's Xid errors, and their number."""
    of_model = sum(count for xid, count in gpu.xids.items() if xid in MODEL_XIDS)
    yield "model", of_model
    yield "gpu", sum(gpu.xids.values()) - of_model


def causes() -> Iterator[tuple[str]]:
    """Cause of a retry, which any process may see."""
    return ((cause,) for cause in CAUSES)


def payloads(own: ProcessFigures) -> Iterable[tuple[str, str]]:
    """Direction and way of large values."""
    return WAYS if own.slots is not None else ()


def handshakes(own: ProcessFigures) -> Iterable[tuple[str, str]]:
    """Port and reason of handshakes that fail."""
    return product(own.secure, REASONS)


def scalings(own: ProcessFigures) -> Iterable[tuple[str, str]]:
    """Model and direction of the autoscaler's decisions, which only a controller makes."""
    return product(own.models if own.leader is not None else (), DIRECTIONS)


def scaled(own: ProcessFigures) -> Iterable[tuple[str]]:
    """Model whose number of workers the process may set."""
    return ((model,) for model in (own.models if own.leader is not None else ()))


def _served(own: ProcessFigures) -> Iterable[str]:
    """Models that requests come for."""
    return own.models if own.pending is not None else ()
