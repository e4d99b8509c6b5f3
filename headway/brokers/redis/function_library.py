"""The library of functions that runs inside the server, made of `lua/`.

It takes its numbers from `headway.core`, so each is defined once. Its name contains a hash of its text, so that processes of two
releases can load theirs side by side and work on the same keys.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from headway.brokers.redis import entry_wire, figures, wire
from headway.brokers.redis.codes import PackedDedupKey, QueueSettings, RefusalCode, Standing, Worth
from headway.core import (
    admission,
    batch,
    batch_cost,
    budget,
    bulk,
    culprits,
    departure,
    departure_board,
    failures,
    fair_queue,
    health,
    memory_room,
    packing,
    queue,
    retention,
    retry,
    service_model,
    slot_factors,
    suspects,
)
from headway.errors import REJECTED_BY_MODEL
from headway.model import MOST_OUTPUT, BatchFailure, Cause, DedupKind

T = TypeVar("T")

LAYOUT = "headway14"
"""Version of the data in the server. It changes if the releases before and after a change can't share data."""

RULE_AGE = 0.1
"""Seconds for which a rule and its load can be used."""
OUTPUT_SECONDS = 240
"""Seconds after which an unread stored-apart output expires. The stream that names it expires sooner."""
REAP_EVERY = 0.05
"""Maximum seconds between two reaps while something waits, and thus the maximum delay of an expiry."""
REST_SECONDS = 1.0
"""Maximum seconds between two reaps of an idle queue. A lease lasts longer, because the reaper isn't told of claims."""
STIRS_SECONDS = 1.0
"""Seconds after its last entry until an empty queue is at rest."""
CLAIM_SECONDS = 10.0
"""Seconds for which a claimed task id is held, because its task may still be on the way to the queue."""

_SHARED: Mapping[ModuleType, str] = {
    admission: "MIN_MARGIN MARGIN_SHARE WAIT_DEVIATIONS LEAST_SHARE MIN_WAIT",
    batch: "BUSY_TIME",
    batch_cost: "LEAST_SAVED",
    budget: "GREED",
    bulk: "STRETCH WITHIN QUIET FIRST_CREDIT SETTLED SPACING LOOK BATCHES_WAITING MOST_PAGES APART_AHEAD",
    culprits: "APART_SECONDS MOST_APART LONE_ROOM KNOWN_SECONDS ALL_GENERATIONS GENERATION_STEP SAME_INSTANT ERROR_BYTES PRIOR MEMORY",
    departure: "LEEWAY HELPED_FROM LONE_FROM LONE_ARRIVALS LONE_FACTOR OVER_UNLIKE MEASURE_AFTER",
    departure_board: "RECENT_BYTES RECENT_SECONDS HISTORY_SECONDS WATCH_SECONDS RECORD_SECONDS",
    fair_queue: "FORGET_ABOVE PAGE BATCH_PAGES LOOKED_AT LOOK_AHEAD MEAN_WEIGHT",
    health: "DEGRADED_AFTER OFFLINE_AFTER DEPARTED_SECONDS MOST_DEPARTED",
    memory_room: "ROOM_WAIT",
    packing: "ALIKE",
    queue: (
        "NEAR_BATCHES MIXED_SECONDS WAIT_WEIGHT MIN_AVOIDANCE GATE_AGE UNKNOWN_WAIT QUARANTINE_BATCHES QUARANTINE_ALONE SEARCH_LOAD"
    ),
    retention: "FAILURE_BYTES",
    retry: (
        "MAX_ATTEMPTS RAISES DEATHS_ALONE BACKOFF_BASE BACKOFF_CAP BUDGET_RATIO BUDGET_RESERVE BUDGET_TRICKLE "
        "BUDGET_RUNS BUDGET_TRICKLE_RUNS"
    ),
    service_model: "DECAY RATE_TIME LEAST_SEEN REACH NORMAL SPREAD STRAY STRAY_DEVIATIONS FASTER FORGETTING",
    slot_factors: "LEAST_DEVIATION PADDED_DOUBT",
    suspects: "LEAST_COST QUARANTINED_ATTEMPTS APART_PRICE SEARCH_PRICE MOST_CREDIT",
}
"""Numbers of core that the functions use under the same names, by module."""

_NUMBERS: dict[str, float] = {
    "RULE_AGE": RULE_AGE,
    "COMING_SECONDS": 0.1,  # For a woken slot to claim before another is woken.
    "WATCH_GRACE": 0.03,  # After it, the slot on watch counts as gone.
    "REAP_EVERY": REAP_EVERY,
    "REAPER_SECONDS": 0.25,  # Beyond its next reap, for which a process remains the reaper.
    "REST_SECONDS": REST_SECONDS,
    "STIRS_SECONDS": STIRS_SECONDS,
    "CLAIM_SECONDS": CLAIM_SECONDS,
    "STANDBY_SECONDS": 0.1,  # For each process, over which all attempts to become the reaper are spread at random.
    "SWEEP_SECONDS": 10.0,
    "GATEWAY_SECONDS": 60.0,
    "WORKER_SECONDS": 120.0,
    "HEARD_SECONDS": 1.0,  # Age up to which a gateway's stored heartbeat isn't renewed.
    "MOST_SETTINGS": 1000,
    "MOST_REMEMBERED": 1000,
    "COUNTED_FROM": 0.25,  # Share of the longest queue below which each tenant's entries aren't counted.
    "CLOCK_STEP": 0.5,
    "WAKEUP_SECONDS": 60,
    # Lifetime of stored data once nobody comes any more. Figures expire first, because a queue without them starts afresh.
    "LIFE_SECONDS": 3600,
    "FIGURES_SECONDS": 3000,
    "STREAM_SECONDS": 120,
    "OUTPUT_SECONDS": OUTPUT_SECONDS,
    "RENEW_SECONDS": 20,  # Age after which an expiry is renewed.
    "ACCOUNT_SECONDS": 90_000,  # Longer than any outcome is kept.
    "LETTER_SECONDS": 7 * 86_400,
    "TIMER_GRAIN": 0.001,
    "SCARCE_WAIT": 1.0,
    "LETTERS": 10_000,
    "MOST_OUTPUT": MOST_OUTPUT,
    "LETTER_BYTES": 64 << 20,
    "SCHEMA": wire.SCHEMA,
    "RATE_ROUNDING": 1e-5,  # The server's instants count from 1970, so they are less exact than the instants of ratelimit.py.
    "STRAY_KNOWN": service_model.KNOWN,
    "USUAL_PACE": slot_factors.USUAL + 1,
    "MOST_PACE": len(slot_factors.FACTORS),
    "OVER_ALIKE": departure.OVER,
    "HISTORY_STEP": departure_board.STEP,
    "ENTRY_KIND_BYTES": entry_wire.ENTRY_KIND.size,
    "RULE_BYTES": 8 * (2 + len(wire.RULE)),
    **{f"{member.upper()}_POSITION": entry_wire.position_of(member) for member in ("input", "parameters", "caller")},
    "TOKEN_BYTES": entry_wire.TOKEN_BYTES,
}
"""Numbers that only the functions use, or that have other names there."""

_FACTOR_NUMBERS = "STEP ERROR MOST_WEIGHT PRIOR UNSURE UNSURE_FOR STRAY"
_CODES: tuple[Mapping[str, float], ...] = (
    *({name: getattr(module, name) for name in names.split()} for module, names in _SHARED.items()),
    *({member.name: member.value for member in kind} for kind in (RefusalCode, Worth, Standing)),
    {f"FACTOR_{name}": getattr(slot_factors, name) for name in _FACTOR_NUMBERS.split()},
    {name.upper(): position for position, name in enumerate(PackedDedupKey._fields, 1)},
    figures.numbers(),
)


_OF_LOAD = {"rate": "rate", "max_batch": "q.limit", "depth": "q.fresh", "entry_size": "entry_size"}
"""Sources of the load's figures that the queue has under other names."""

_TEXTS = {
    "SETTING_NAMES": f"{{{', '.join(map(repr, QueueSettings._fields))}}}",
    "SETTINGS_PATTERN": repr("(%S+) " * (len(QueueSettings._fields) - 1) + "(.*)"),
    "ENTRY_KIND": repr(entry_wire.ENTRY_KIND.format),
    "NONCE": repr(wire.NONCE.format),
    "LETTER_HEAD": repr(entry_wire.LETTER.format),
    "LOAD_FORMAT": repr(wire.LOAD_FORMAT),
    "EACH_OF_LOAD": ", ".join(
        [
            "now",
            "q.born",
            *(_OF_LOAD.get(name, f"q.{name}") for name in wire.LOAD),
            *(f"q.{name}" for name in figures.PACES),
        ]
    ),
    "RULE_FORMAT": repr("<" + "d" * (2 + len(wire.RULE))),
    "EACH_OF_RULE": ", ".join(f"q.{name}" for name in wire.RULE),
    "GROUP_KINDS": f"{{{', '.join(f'{name} = {getattr(suspects, name)}' for name in ('FIRST', 'HALF', 'QUARANTINE', 'REST'))}}}",
    "TASK": repr(DedupKind.TASK.value),
    "BY_KEY": repr(DedupKind.KEY.value),
    "SAME": repr(DedupKind.SAME.value),
    "LEASE_LOST": repr(Cause.LEASE_LOST.value),
    **{reason.upper() + "_REASON": repr(reason) for reason in departure.REASONS},
}
"""Lua expressions other than numbers that are written into the functions."""


def named_once(*parts: Mapping[str, T]) -> dict[str, T]:
    """Merge mappings. Raises ValueError for a name in two of them, because the functions would get a wrong value."""
    merged: dict[str, T] = {}
    for part in parts:
        if twice := merged.keys() & part.keys():
            raise ValueError(
                f"Two values are written into the functions as {', '.join(sorted(twice))}. Rename one of each."
            )
        merged |= part
    return merged


def _blamed(cause: Cause) -> bool:
    return failures.death(BatchFailure(cause, "", "")).code == REJECTED_BY_MODEL


def _body() -> str:
    folder = Path(__file__).with_name("lua")
    files = [file for file in folder.iterdir() if file.name.endswith(".lua")]
    files.sort(key=lambda file: (int(file.name.partition("_")[0]), file.name))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # Constants are written in place, because Lua allows only 200 local names.
    numbers = named_once(_NUMBERS, *_CODES)
    # A number costs the server one more command than its text.
    texts = {f"{name}_TEXT": repr(str(number)) for name, number in numbers.items()}
    written = named_once({name: repr(number) for name, number in numbers.items()}, texts, _TEXTS)
    text = re.sub(rf"\b({'|'.join(written)})\b", lambda name: written[name[1]], text)
    generated = [
        _causes("BLAMELESS", (cause for cause in Cause if not _blamed(cause))),
        _causes("NEVER_SPLIT", (cause for cause in Cause if cause in retry.NEVER_SPLIT)),
        _causes("SEARCHED", (cause for cause in Cause if cause in retry.SEARCHED)),
        figures.source(),
    ]
    return "\n".join([*generated, text])


def _causes(name: str, causes: Iterable[Cause]) -> str:
    return f"local {name} = {{{', '.join(f'{cause.value} = true' for cause in causes)}}}"


_BODY = _body()

VERSION = f"{LAYOUT}_{hashlib.sha256(_BODY.encode()).hexdigest()[:8]}"
"""Name of the library, with which the names of its functions begin."""


def source() -> str:
    """Return the library's text for FUNCTION LOAD."""
    return f"#!lua name={VERSION}\nlocal VERSION = '{VERSION}'\n{_BODY}"
