"""Targets that tell runs apart."""

from __future__ import annotations

import os
import uuid


class Numbered:
    """Answers each input with itself and a mark that no other answer of any run has."""

    def __call__(self, inputs: list[str]) -> list[str]:
        return [f"{text}|{uuid.uuid4().hex}" for text in inputs]


class Picky:
    """Fails on `poison`, dies of `killer`, and answers all else in capitals."""

    def __call__(self, inputs: list[str]) -> list[str]:
        for text in inputs:
            if "poison" in text:
                raise ValueError("not this one")
            if "killer" in text:
                os._exit(3)
        return [text.upper() for text in inputs]
