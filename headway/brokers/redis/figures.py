"""Layout of a queue's figures in the server.

Figures are doubles, in sections of one text. A step reads the other sections only if the first section, which differs after every
step, isn't as it remembers. It writes up to the last section that it changed, so figures that change often come first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping

from headway.brokers.redis import wire
from headway.core.slot_factors import FACTORS

PACES = tuple(f"pace{position}" for position in range(1, len(FACTORS) + 1))
"""Figures that count the slots at each position of the speed factors. Slots at the usual position aren't counted."""

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
"""Figures of each section, and their values in a new queue. Every step changes STEP."""

BEFORE_TIERS = 2
"""Number of sections that precede the sections of the tiers, because enqueuing changes them."""

TIER: Mapping[str, float] = {
    "depth": 0.0, "weight": 0.0, "mean": 0.0, "next": 1.0, "rough": 0.0, "last_due": -math.inf, "rate_last": -math.inf, "rate_sum": 0.0, "rate_unseen": 1.0,
}  # fmt: skip
"""Figures of each tier, and their values in a new queue."""

RELATIVE = (
    "oldest", "last_departure", "schedule", "newest", "busy_at", "rule_at", "coming_until", "armed", "reaper_until",
    "swept_at", "generation", "mixed_at", "bulk_left", "bulk_ended", "bulk_excused",
)  # fmt: skip
"""Instants that only matter relative to the present. They move when the server's clock is put back."""


def numbers() -> dict[str, float]:
    """Return the numbers of the sections and their sizes. A tier's section has the number TIERS plus the tier."""
    sections: dict[str, float] = {name: number for number, name in enumerate(SECTIONS, 1)}
    size = struct.calcsize(_format(SECTIONS["STEP"]))
    return {
        **sections,
        "TIERS": len(SECTIONS),
        "BEFORE_TIERS": BEFORE_TIERS,
        "LAST_OF_STEP": size - 1,
        "TIER_BYTES": struct.calcsize(_format(TIER)),
    }


def source() -> str:
    """Return Lua functions and tables for this layout."""
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
