"""Targets of services whose bulk jobs are looked at."""

import time


def slow_upper(inputs: list[str]) -> list[str]:
    time.sleep(0.02)
    return [text.upper() for text in inputs]


def harmless(texts: list[str]) -> list[bool]:
    return ["evil" not in text for text in texts]
