from __future__ import annotations

import os
import uuid


class Numbered:
    """Answers with the input and a mark that is unique across all runs."""

    def __call__(self, inputs: list[str]) -> list[str]:
        return [f"{text}|{uuid.uuid4().hex}" for text in inputs]


class Picky:
    """Fails on `poison`, dies on `killer`, and returns all other inputs in upper case."""

    def __call__(self, inputs: list[str]) -> list[str]:
        for text in inputs:
            if "poison" in text:
                raise ValueError("not this one")
            if "killer" in text:
                os._exit(3)
        return [text.upper() for text in inputs]
