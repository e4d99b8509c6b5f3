"""The function library that runs inside the server, assembled from `lua/`, and the layout of a queue's numbers there.

Its constants come from `headway.core`, so each is defined only once. Its name contains a hash of its source, so that processes of two
releases can each load their library and work on the same keys.

A queue's numbers are doubles, stored as one string in several sections. The first section changes with every call. If it is
still as the library last read or wrote it, the others needn't be read. A call writes all sections up to the last one that it
changed, so numbers that change often come first."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from headway.brokers.redis import entry_wire, wire
from headway.brokers.redis.codes import PackedDedupKey, QueueSettings, RefusalCode, Standing, Worth
from headway.core import (
    admission,
    batch_cost,
    budget,
    bulk,
    departure,
    departure_board,
    failures,
    fair_queue,
    health,
    packing,
    queue,
    queue_limits,
    retention,
    retry,
    service_model,
    slot_factors,
    suspects,
)
from headway.core.slot_factors import FACTORS
from headway.errors import REJECTED_BY_MODEL
from headway.model import MOST_OUTPUT, BatchFailure, Cause, DedupKind

PACES = tuple(f"pace{position}" for position in range(1, len(FACTORS) + 1))  # Slots per factor, except the usual one.

SECTIONS: Mapping[str, Mapping[str, float]] = {
    "STEP": {
        "steps": 0.0, "latest": -math.inf, "fresh": 0.0, "oldest": math.inf, "due": math.inf, "odd": 0.0, "idle": 0.0,
        "armed": math.inf, "coming_until": -math.inf,
    },
    "INTAKE": {"seq": 0.0, "newest": -math.inf, "last_tenant": 0.0, "mixed_at": -math.inf},
    "DEPARTED": {
        "fence": 0.0, "busy": 0.0, "busy_at": 0.0, "utilisation": 0.0, "departures": 0.0, "wait": 0.0,
        "last_departure": -math.inf, "schedule": -math.inf, "owed": 0.0, "running": 0.0,
    },
    "RULE": {
        **dict.fromkeys(wire.RULE, 0.0),
        "headway": -1.0, "slowest": math.inf, "window": math.inf, "tolerance": math.inf, "rule_at": -math.inf, "limit": 0.0, "max_batch": 0.0,
    },
    "LEARNT": dict.fromkeys(("w", "n", "l", "nn", "nl", "off", "strays", "largest", "alpha", "beta", "deviation"), 0.0),
    "FLEET": {
        "slots": 0.0, "known_slots": 1.0, "generation": 0.0, "reaper_until": -math.inf, "swept_at": -math.inf, "differ": 0.0,
        "shared": 0.0,
        **dict.fromkeys(PACES, 0.0),
    },
    "SELDOM": {
        "tiers": 0.0, "born": 0.0, "group": 0.0, "groups": 0.0, "suspects": 0.0, "suspects_due": math.inf, "budgets": 0.0,
        "credit": 0.0, "lean": 0.0, "apart": 0.0, "known_until": -math.inf, "counted": 0.0,
    },
    "BULK": {
        "bulk": 0.0, "bulk_apart": 0.0, "bulk_used": 0.0, "bulk_next": 1.0, "bulk_back": 0.0, "bulk_busy": 0.0, "bulk_credit": 0.0, "bulk_delayed": 0.0, "bulk_left": -math.inf,
        "bulk_ended": -math.inf, "bulk_excused": -math.inf,
    },
}  # fmt: skip
"""Numbers in each section, and their values in a new queue. Every step changes STEP."""

BEFORE_TIERS = 2  # Number of sections that come before those of the tiers, because enqueuing changes them.

TIER: Mapping[str, float] = {
    "depth": 0.0, "weight": 0.0, "mean": 0.0, "next": 1.0, "rough": 0.0, "last_due": -math.inf, "rate_last": -math.inf, "rate_sum": 0.0, "rate_unseen": 1.0,
}  # fmt: skip
"""Numbers in each tier's section, and their values in a new queue."""

RELATIVE = (
    "oldest", "last_departure", "schedule", "newest", "busy_at", "rule_at", "coming_until", "armed", "reaper_until",
    "swept_at", "generation", "mixed_at", "bulk_left", "bulk_ended", "bulk_excused",
)  # fmt: skip
"""Times that only matter relative to the current time. They are adjusted if the server's clock is set back."""


def figure_numbers() -> dict[str, float]:
    """Return the numbers and sizes of the sections, by name. The number of a tier's section is TIERS plus the tier."""
    sections: dict[str, float] = {name: number for number, name in enumerate(SECTIONS, 1)}
    size = struct.calcsize(_format(SECTIONS["STEP"]))
    return {
        **sections,
        "TIERS": len(SECTIONS),
        "BEFORE_TIERS": BEFORE_TIERS,
        "LAST_OF_STEP": size - 1,
        "TIER_BYTES": struct.calcsize(_format(TIER)),
    }


def figures_source() -> str:
    """Return the Lua functions and tables for this layout."""
    plain = {name: start for section in SECTIONS.values() for name, start in section.items()}
    of_tier = [f"q.{name}[tier]" for name in TIER]
    return "\n".join([
        _table("START", (f"{name} = {_number(start)}" for name, start in plain.items())),
        _table("TIER_START", (f"{name} = {_number(start)}" for name, start in TIER.items())),
        _table("RELATIVE", map(repr, RELATIVE)),
        _table("FACTORS", map(repr, FACTORS)),
        _table("PACES", map(repr, PACES)),
        _table("SECTION_BYTES", (str(struct.calcsize(_format(section))) for section in SECTIONS.values())),
        _table("pack_section", (_packer("q", _format(section), _each(section)) for section in SECTIONS.values())),
        _table("unpack_section", (_unpacker("q", _format(section), _each(section)) for section in SECTIONS.values())),
        f"local pack_tier = {_packer('q, tier', _format(TIER), of_tier)}",
        f"local unpack_tier = {_unpacker('q, tier', _format(TIER), of_tier)}",
    ])  # fmt: skip


def _each(section: Iterable[str]) -> list[str]:
    return [f"q.{name}" for name in section]


def _format(section: Mapping[str, float]) -> str:
    return f"<{'d' * len(section)}"


def _packer(arguments: str, format: str, figures: list[str]) -> str:
    return f"function({arguments}) return struct.pack('{format}', {', '.join(figures)}) end"


def _unpacker(arguments: str, format: str, figures: list[str]) -> str:
    return f"function({arguments}, packed) {', '.join(figures)} = struct.unpack('{format}', packed) end"


def _table(name: str, values: Iterable[str]) -> str:
    return f"local {name} = {{{', '.join(values)}}}"


def _number(number: float) -> str:
    return f"{'-' if number < 0 else ''}1 / 0" if math.isinf(number) else repr(number)


T = TypeVar("T")

LAYOUT = "headway14"  # Version of the data layout. It changes if releases before and after can't share data.

RULE_AGE = 0.1  # Seconds for which a rule and its load can be used.
OUTPUT_SECONDS = 240  # Lifetime of an unread output stored separately. The stream that names it expires sooner.
REAP_EVERY = 0.05  # Maximum seconds between two reaps while entries wait, and maximum delay of an expiry.
REST_SECONDS = 1.0  # Maximum seconds between two reaps of an idle queue. Leases granted in between last longer.
STIRS_SECONDS = 1.0  # Seconds after the last entry until an empty queue is at rest.
CLAIM_SECONDS = 10.0  # Seconds for which a task id stays claimed. The task may be on its way to the queue.

_SHARED: Mapping[ModuleType, str] = {
    admission: "MIN_MARGIN MARGIN_SHARE WAIT_DEVIATIONS LEAST_SHARE MIN_WAIT",
    batch_cost: "LEAST_SAVED",
    budget: "GREED",
    bulk: "STRETCH WITHIN QUIET FIRST_CREDIT SETTLED SPACING LOOK BATCHES_WAITING MOST_PAGES APART_AHEAD",
    departure: "BUSY_TIME LEEWAY HELPED_FROM LONE_FROM LONE_ARRIVALS LONE_FACTOR OVER_UNLIKE MEASURE_AFTER",
    departure_board: "RECENT_BYTES RECENT_SECONDS HISTORY_SECONDS WATCH_SECONDS RECORD_SECONDS",
    fair_queue: "FORGET_ABOVE PAGE BATCH_PAGES LOOKED_AT LOOK_AHEAD MEAN_WEIGHT",
    health: "DEGRADED_AFTER OFFLINE_AFTER DEPARTED_SECONDS MOST_DEPARTED",
    packing: "ALIKE",
    queue: (
        "NEAR_BATCHES MIXED_SECONDS WAIT_WEIGHT MIN_AVOIDANCE GATE_AGE UNKNOWN_WAIT QUARANTINE_BATCHES QUARANTINE_ALONE SEARCH_LOAD"
    ),
    queue_limits: "ROOM_WAIT",
    retention: "FAILURE_BYTES",
    retry: (
        "MAX_ATTEMPTS RAISES DEATHS_ALONE BACKOFF_BASE BACKOFF_CAP BUDGET_RATIO BUDGET_RESERVE BUDGET_TRICKLE "
        "BUDGET_RUNS BUDGET_TRICKLE_RUNS"
    ),
    service_model: "DECAY RATE_TIME LEAST_SEEN REACH NORMAL SPREAD STRAY STRAY_DEVIATIONS FASTER FORGETTING",
    slot_factors: "LEAST_DEVIATION PADDED_DOUBT",
    suspects: (
        "APART_SECONDS MOST_APART LONE_ROOM KNOWN_SECONDS ALL_GENERATIONS GENERATION_STEP SAME_INSTANT ERROR_BYTES PRIOR MEMORY "
        "LEAST_COST QUARANTINED_ATTEMPTS APART_PRICE SEARCH_PRICE MOST_CREDIT"
    ),
}
"""Constants from `core` that the functions use under the same names, by module."""

_NUMBERS: dict[str, float] = {
    "RULE_AGE": RULE_AGE,
    "COMING_SECONDS": 0.1,  # Time within which a woken slot must claim. After that, another one is woken.
    "WATCH_GRACE": 0.03,  # Delay after which the slot on watch counts as gone.
    "REAP_EVERY": REAP_EVERY,
    "REAPER_SECONDS": 0.25,  # A process remains the reaper for this long after its next reap is due.
    "REST_SECONDS": REST_SECONDS,
    "STIRS_SECONDS": STIRS_SECONDS,
    "CLAIM_SECONDS": CLAIM_SECONDS,
    "STANDBY_SECONDS": 0.1,  # Attempts to become the reaper are spread randomly over this time per process.
    "SWEEP_SECONDS": 10.0,
    "GATEWAY_SECONDS": 60.0,
    "WORKER_SECONDS": 120.0,
    "HEARD_SECONDS": 1.0,  # A gateway's stored heartbeat is only updated if it is older than this.
    "MOST_SETTINGS": 1000,
    "MOST_REMEMBERED": 1000,
    "COUNTED_FROM": 0.25,  # Each tenant's entries are counted only from this share of the maximum queue length on.
    "CLOCK_STEP": 0.5,
    "WAKEUP_SECONDS": 60,
    # Lifetime of unused data. A queue's numbers expire first, because a queue without them starts over.
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
    "RATE_ROUNDING": 1e-5,  # The server's times count from 1970, so they are less precise than those in ratelimit.py.
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
"""Constants that only the functions use, or that have other names there."""

_FACTOR_NUMBERS = "STEP ERROR MOST_WEIGHT PRIOR UNSURE UNSURE_FOR STRAY"
_CODES: tuple[Mapping[str, float], ...] = (
    *({name: getattr(module, name) for name in names.split()} for module, names in _SHARED.items()),
    *({member.name: member.value for member in kind} for kind in (RefusalCode, Worth, Standing)),
    {f"FACTOR_{name}": getattr(slot_factors, name) for name in _FACTOR_NUMBERS.split()},
    {name.upper(): position for position, name in enumerate(PackedDedupKey._fields, 1)},
    figure_numbers(),
)


_OF_LOAD = {"rate": "rate", "max_batch": "q.limit", "depth": "q.fresh", "entry_size": "entry_size"}
"""Lua expressions for numbers of the load that have other names in the queue."""

_TEXTS = {
    "SETTING_NAMES": f"{{{', '.join(map(repr, QueueSettings._fields))}}}",
    "SETTINGS_PATTERN": repr("(%S+) " * (len(QueueSettings._fields) - 1) + "(.*)"),
    "ENTRY_KIND": repr(entry_wire.ENTRY_KIND.format),
    "NONCE": repr(wire.NONCE.format),
    "LETTER_HEAD": repr(entry_wire.LETTER.format),
    "LOAD_FORMAT": repr(wire.LOAD_FORMAT),
    "EACH_OF_LOAD": ", ".join(
        ["now", "q.born", *(_OF_LOAD.get(name, f"q.{name}") for name in wire.LOAD), *(f"q.{name}" for name in PACES)]
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
"""Lua expressions, other than numbers, that are inserted into the functions."""


def named_once(*parts: Mapping[str, T]) -> dict[str, T]:
    """Merge mappings. Raises ValueError if a name is in two of them, because the functions would get a wrong value."""
    merged: dict[str, T] = {}
    for part in parts:
        if twice := merged.keys() & part.keys():
            raise ValueError(
                f"Two values are inserted into the functions as {', '.join(sorted(twice))}. Rename one of each."
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
    # Constants are inserted where they are used, because Lua allows only 200 local names.
    numbers = named_once(_NUMBERS, *_CODES)
    # A number costs the server one more command than a string.
    texts = {f"{name}_TEXT": repr(str(number)) for name, number in numbers.items()}
    written = named_once({name: repr(number) for name, number in numbers.items()}, texts, _TEXTS)
    text = re.sub(rf"\b({'|'.join(written)})\b", lambda name: written[name[1]], text)
    generated = [
        _causes("BLAMELESS", (cause for cause in Cause if not _blamed(cause))),
        _causes("NEVER_SPLIT", (cause for cause in Cause if cause in retry.NEVER_SPLIT)),
        _causes("SEARCHED", (cause for cause in Cause if cause in retry.SEARCHED)),
        figures_source(),
    ]
    return "\n".join([*generated, text])


def _causes(name: str, causes: Iterable[Cause]) -> str:
    return f"local {name} = {{{', '.join(f'{cause.value} = true' for cause in causes)}}}"


_BODY = _body()

VERSION = f"{LAYOUT}_{hashlib.sha256(_BODY.encode()).hexdigest()[:8]}"  # Library name, and prefix of its functions.


def source() -> str:
    """Return the library's source for FUNCTION LOAD."""
    return f"#!lua name={VERSION}\nlocal VERSION = '{VERSION}'\n{_BODY}"
