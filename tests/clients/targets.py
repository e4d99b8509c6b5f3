"""Target of the clients' services: upper-cases strings, returns embeddings on request, and fails on some inputs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def answer(inputs: list[str]) -> list[str | Exception]:
    """Return upper-cased strings. `bad` is rejected, `fault` gets an invalid output, and `e:…` an embedding.

    `gate PATH` blocks until the FIFO at PATH has been opened for writing and closed.
    """
    return [_one(text) for text in inputs]


def shown(inputs: list[str]) -> list[str]:
    """Return upper-cased strings for the documents' snippets, one of which asks for the embedding of `a text`."""
    return ["[0.5, -1.0]" if text == "a text" else text.upper() for text in inputs]


def _one(text: str) -> Any:
    if text == "bad":
        return ValueError("a bad input")
    if text == "fault":
        return None
    if text == "slow":
        time.sleep(0.2)
    if text.startswith("gate "):
        Path(text[5:]).read_bytes()
    return json.dumps([len(text), 0.5, -1.0]) if text.startswith("e:") else text.upper()


def octets(inputs: list[bytes]) -> list[bytes]:
    return [one.upper() for one in inputs]


octets.example = b"ab"  # type: ignore[attr-defined]
