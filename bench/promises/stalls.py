"""Stalls of Redis that nobody has staged: on a busy machine its disk may keep it for seconds, as each write waits for that."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import redis

from bench.stand.fleet import Redis
from tests.promises.faults import Fault

LOOK_EVERY = 0.2
"""Seconds between two questions."""
STALLED = 1.0
"""Seconds after which a question without an answer is a stall."""


@contextlib.contextmanager
def stalls_noted(store: Redis | None, faults: list[Fault]) -> Iterator[None]:
    """Note as a pause each time that Redis does not answer a write of another connection, while the context lasts."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(store, faults, over))
    if store is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if store is not None:
            thread.join()


def _watch(store: Redis, faults: list[Fault], over: threading.Event) -> None:
    began = time.monotonic()
    while not over.wait(LOOK_EVERY):
        answered = _answers(store)
        now = time.monotonic()
        if answered:
            staged = any(fault.what.startswith("redis") and (fault.ended or now) >= began for fault in faults)
            if now - began > STALLED and not staged:
                faults.append(Fault("redis paused", began, now, "redis"))
            began = now


def _answers(store: Redis) -> bool:
    try:
        with store.client() as client:
            return bool(client.set("stalls", "", px=1000))
    except redis.RedisError:
        return False
