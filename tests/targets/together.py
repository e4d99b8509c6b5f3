"""Targets whose calls have a temperature once. They note each call in a file of the working directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALLS = "calls.jsonl"


class Together:
    together = ("temperature",)

    def __call__(self, inputs: list[str], parameters: Mapping[str, object]) -> list[str]:
        with Path(CALLS).open("a") as notes:
            notes.write(json.dumps([parameters, inputs]) + "\n")
        if any("poison" in text for text in inputs):
            raise ValueError("no good")
        return [f"{text} at {parameters.get('temperature')}" for text in inputs]


def calls_in(folder: Path) -> list[tuple[dict[str, Any], list[str]]]:
    return [tuple(json.loads(line)) for line in (folder / CALLS).read_text().splitlines()]
