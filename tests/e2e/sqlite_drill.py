"""A drill: services share an SQLite file with commands that open and close it, and are killed.

Each round makes keys and revokes one by `headway keys`, asks every service, and kills one with SIGKILL, which is started anew.
Whatever was acknowledged must be there: a row for every request, every key known, every revocation seen.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import Server, launched
from tests.storage.test_sqlite import descriptors, locks

SERVICES = 2
CONNECTIONS = 4
"""Connections of a service: its ledger and its keys each read and write."""
WHO = ("--user", "alice", "--tenant", "acme", "--tier", "paid")
_COUNT = "SELECT count(*) FROM headway_requests"
_FLAGS = ("--keys", "ledger", "--user-rate", "0")


@dataclass
class Seen:
    """Observations of a drill so far.

    Attributes:
        requests: requests that were answered.
        kills: services that were killed.
        commands: commands that opened and closed the file.
        lost: rows that were there before a service was killed, and were not afterwards.
        damaged: whether SQLite found fault with the file at some time.
        unlocked: times when a service that had the file open was found without SQLite's locks on it, or with a
            descriptor of it beyond those of its connections.
        unknown: live keys that a service refused for longer than PATIENCE.
        slowest: seconds until the last service refused a revoked key, at most.
    """

    requests: int = 0
    kills: int = 0
    commands: int = 0
    lost: int = 0
    damaged: bool = False
    unlocked: int = 0
    unknown: int = 0
    slowest: float = 0.0
    revoked: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)


class Drill:
    """Services on one file; use it as a context manager.

    Arguments:
        folder: to work in.
        command: runs `headway keys …`, and returns what it prints.
    """

    def __init__(self, folder: Path, command: Callable[..., str]) -> None:
        self.seen = Seen()
        self._folder = folder
        self._path = folder / "shared.db"
        self._url = f"sqlite:///{self._path}"
        self._command = command
        self._stack = contextlib.ExitStack()
        self._turn = itertools.count()
        self._services: list[Server] = []

    def __enter__(self) -> Drill:
        self.seen.live.append(self._keys("create", *WHO))
        self._services = [self._launched() for _ in range(SERVICES)]
        for service in self._services:
            service.ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, requests: int = 10) -> None:
        """Make, ask, revoke, kill, and look whether all is there."""
        self.seen.live += [self._keys("create", *WHO) for _ in range(2)]
        self._keys("list")
        self._check_keys()
        self._check_locks()
        for service in self._services:
            for _ in range(requests):
                assert self._good(service, self.seen.live[-1])
        self._revoke(self.seen.live.pop(0))
        self._check_locks()
        rows = wait_until(lambda: found if (found := self._rows()) >= self.seen.requests else None)
        victim = next(self._turn) % SERVICES
        killed = self._services[victim]
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.kill()
        self.seen.kills += 1
        self._keys("list")
        self.seen.lost += max(0, rows - self._rows())
        self._services[victim] = self._launched()
        self._services[victim].ready()
        self._check_keys()
        self.seen.damaged |= self._query("PRAGMA integrity_check") != "ok"

    def _launched(self) -> Server:
        return self._stack.enter_context(launched(self._folder, *_FLAGS, "--ledger", self._url))

    def _keys(self, *arguments: str) -> str:
        self.seen.commands += 1
        return self._command(*arguments, "--ledger", self._url)

    def _revoke(self, key: str) -> None:
        self._keys("revoke", key.split("_")[2])
        self.seen.revoked.append(key)
        began = time.monotonic()
        for service in self._services:
            wait_until(lambda service=service: not self._good(service, key))  # type: ignore[misc]
        self.seen.slowest = max(self.seen.slowest, time.monotonic() - began)

    def _check_locks(self) -> None:
        for service in self._services:
            pid = service.process.pid
            self.seen.unlocked += not locks(self._path, pid) or descriptors(self._path, pid) > CONNECTIONS

    def _check_keys(self) -> None:
        """Every live key is good at every service, and no revoked one."""
        for service in self._services:
            for key in self.seen.live:
                until = time.monotonic() + PATIENCE
                while not (good := self._good(service, key)) and time.monotonic() < until:
                    time.sleep(0.05)
                self.seen.unknown += not good
            for key in self.seen.revoked:
                assert not self._good(service, key)

    def _good(self, service: Server, key: str) -> bool:
        answered = good(service, key)
        self.seen.requests += answered
        return answered

    def _rows(self) -> int:
        return int(str(self._query(_COUNT)))

    def _query(self, query: str) -> object:
        self.seen.commands += 1
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=PATIENCE)) as connection:
                return connection.execute(query).fetchone()[0]
        except sqlite3.DatabaseError as exc:
            self.seen.damaged = True
            return f"-1 {exc}" if query != _COUNT else -1


def good(service: Server, key: str) -> bool:
    """Whether a service answers a request with this key; else it must say that the key is no good."""
    line = service.asked[-1].connection if service.asked else None
    asked = service.ask("hello", f"Authorization: Bearer {key}", on=line)
    answer = asked.answer()
    assert answer.status == 200 or asked.outcome == "UNAUTHENTICATED", answer.body
    return answer.status == 200
