"""Target of the clients' services: texts in capitals, embeddings where the input asks for one, and inputs that fail."""

from __future__ import annotations

import json
import time


def answer(inputs: list[str]) -> list[str | Exception]:
    return [_one(text) for text in inputs]


def _one(text: str) -> str | Exception:
    if text == "bad":
        return ValueError("a bad input")
    if text == "slow":
        time.sleep(0.2)
    return json.dumps([len(text), 0.5, -1.0]) if text.startswith("e:") else text.upper()
