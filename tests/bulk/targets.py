"""Targets of services whose bulk jobs are looked at."""

from __future__ import annotations

import time


def slow_upper(inputs: list[str]) -> list[str]:
    """Answer a batch in a while."""
    time.sleep(0.02)
    return [text.upper() for text in inputs]


def harmless(texts: list[str]) -> list[bool]:
    """Function of an input policy."""
    return ["evil" not in text for text in texts]
