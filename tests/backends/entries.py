"""Builds entries for tests of backends, where only inputs and parameters matter."""

from __future__ import annotations

from collections.abc import Sequence

from headway.model import Entry, Value


def batch(*inputs: Value, parameters: Sequence[bytes] = ()) -> list[Entry]:
    return [
        Entry(
            id=str(place),
            model="m",
            input=text,
            tier=0,
            tenant="t",
            gateway="g",
            queue_timeout=1.0,
            timeout=1.0,
            parameters=parameters[place] if parameters else b"",
        )
        for place, text in enumerate(inputs)
    ]
