"""A function of an input policy that goes wrong on demand: a text with `bad` in it is refused.

hang     it never returns
crash    its process ends
raise    it raises
odd      it returns what is no list
"""

from __future__ import annotations

import os
import threading


def check(texts: list[str]) -> list[bool]:
    for text in texts:
        if text == "hang":
            threading.Event().wait()
        elif text == "crash":
            os._exit(3)
        elif text == "raise":
            raise ValueError("on demand")
        elif text == "odd":
            return {}  # type: ignore[return-value]
    return ["bad" not in text for text in texts]


def unannotated(texts):  # type: ignore[no-untyped-def]
    return [True] * len(texts)
