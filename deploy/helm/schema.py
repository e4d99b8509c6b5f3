"""Bounds of the settings in the chart's values.schema.json, made from the fields of headway/config/settings.py.

python deploy/helm/schema.py        # writes them anew
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.config import FIELDS, kind
from headway.config.settings import MODEL_FIELDS
from headway.config.target import SHORT

SCHEMA = Path(__file__).with_name("headway") / "values.schema.json"
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
OTHERWISE: dict[str, dict[str, Any]] = {"scale_rules": {"type": ["string", "array"]}}
"""Values that a file may have in another form than a flag."""
MANY = frozenset(("admin_names", "admin_token", "remote_token"))
"""Settings whose pattern repeats more than the 1000 times that Helm's regular expressions can."""
PLACES = {
    ("gateway", "lameDuckSeconds"): ("lame_duck_ms", 1000, 0),
    ("worker", "slots"): ("workers", 1, 1),
    ("worker", "scaling", "min"): ("min_workers", 1, 0),
    ("worker", "scaling", "max"): ("max_workers", 1, 0),
    ("worker", "scaling", "zeroAfterSeconds"): ("scale_to_zero_after_s", 1, 0),
}
"""Whole values that become settings: how many of its units each is, and the least that the chart takes."""


def of_setting(name: str) -> dict[str, Any]:
    """Schema of one setting."""
    field = FIELDS[name]
    made: dict[str, Any] = {"type": TYPES[kind(name)]}
    if field.within is not None:
        made["minimum"], made["maximum"] = (int(bound) if bound == int(bound) else bound for bound in field.within)
    if field.among:
        made["enum"] = list(field.among)
    if field.form is not None and name not in MANY:
        made["pattern"] = f"^(?:{field.form.pattern})$"
    return made


def renewed(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with the bounds as they are now."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    made["properties"]["settings"]["properties"] = _all(FIELDS)
    made["definitions"]["model"]["properties"]["settings"]["properties"] = _all((*MODEL_FIELDS, *SHORT))
    for place, (name, units, least) in PLACES.items():
        found = made
        for part in place:
            found = found["properties"][part]
            found = made["definitions"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
        low, high = FIELDS[name].within or (-math.inf, math.inf)
        found |= {"type": "integer", "minimum": max(least, math.ceil(low / units)), "maximum": math.floor(high / units)}
    return made


def _all(names: Iterable[str]) -> dict[str, Any]:
    return {name: OTHERWISE.get(name) or of_setting(SHORT.get(name, name)) for name in sorted(names)}


if __name__ == "__main__":
    old = json.loads(SCHEMA.read_text(encoding="utf-8"))
    SCHEMA.write_text(json.dumps(renewed(old), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
