"""An input policy's function that refuses inputs containing `bad`, and fails on demand:
hang     never returns
crash    ends its process
raise    raises an error
odd      doesn't return a list
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
