"""Collects the service's own evidence once everything is answered: ledger, counts, dead letters, keys, logs."""

import asyncio
import contextlib
import re
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis

from bench.stand.fleet import PREFIX, Fleet
from bench.stand.stand import Server
from tests.promises.evidence import Evidence, Key, Letter, Line, Row
from tests.promises.letters import MOST
from tests.promises.look_up import rows_in_file, rows_in_postgres
from tests.servers.postgres import PostgresServer

LINE = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\dT\S+) \[(?P<level>warning|error|critical) *\] (?P<event>.*?) \[[\w.]+\](?P<text>.*)"
)
"""A warning or error in a log. Lines of another form belong to the one above."""


def collect(made: Fleet, evidence: Evidence) -> None:
    """Collect what a running fleet reports: everything but its logs and the ledger's rows."""
    for door in made.doors:
        evidence.counted[door.name] = door.outcomes()
        evidence.dropped += int(door.total("headway_ledger_dropped_total"))
    evidence.letters = list(_letters(made.doors[0]))
    counted = [port for port in (*made.controllers, *made.services) if port.total("headway_leader") == 1]
    evidence.letters_counted = int(counted[0].total("headway_dlq_depth")) if counted else None
    if made.store is not None:
        with made.redis.client() as client:
            evidence.keys = list(keys_in(client))


def _letters(door: Server) -> Iterator[Letter]:
    for listed in door.ask(f"/internal/dlq?limit={MOST}")["letters"]:
        tenant = urllib.parse.quote(listed["tenant"])
        input, refused = None, ""
        try:
            input = door.ask(f"/internal/dlq/{listed['id']}?tenant={tenant}")["input"]
        except urllib.error.HTTPError as exc:
            refused = f"{exc.code} {exc.read().decode()}; listed as {listed}"
        id = listed["id"].removeprefix("req_")
        yield Letter(listed["tenant"], id, input, listed["cause"], listed["attempts"], refused)


def keys_in(client: redis.Redis) -> Iterator[Key]:
    sizes: dict[str, Callable[[bytes], Any]] = {
        "hash": lambda key: _fields(client, key), "zset": client.zcard, "list": client.llen, "stream": client.xlen, "set": client.scard,
        "none": lambda key: 0,
    }  # fmt: skip
    for key in sorted(client.scan_iter(match=f"{PREFIX}:*", count=1000)):
        kind = client.type(key)
        type_ = kind.decode() if isinstance(kind, bytes) else kind
        size, ttl = int(sizes.get(type_, client.strlen)(key)), client.pttl(key) / 1000.0
        if type_ != "none":  # Otherwise it has expired meanwhile.
            yield Key(key.decode(errors="backslashreplace"), type_, size, max(ttl, -1.0))


def _fields(client: Any, key: bytes) -> int:
    """Return the number of fields of a hash. For a hash of entries, count only those without an outcome."""
    if not key.endswith(b":e"):
        return int(client.hlen(key))
    return sum(not header.startswith(b"!") for header in client.hvals(key))


def lines_of(made: Fleet) -> list[Line]:
    """Return the warnings and errors in the logs of all processes ever started."""
    return [line for server in made.ever for line in lines_in(server.name, server.output)]


def lines_in(process: str, output: str) -> Iterator[Line]:
    """Yield the warnings and errors in a log, timed by the monotonic clock."""
    offset = time.time() - time.monotonic()
    for line in map(LINE.match, output.splitlines()):
        if line is not None:
            at = datetime.fromisoformat(line["at"]).timestamp() - offset
            yield Line(process, at, line["level"], line["event"], line["text"].strip())


# The ledger.

LEDGERS = ("postgres", "sqlite")
"""A server that can be killed and paused, or a file."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger. If it is a file, it has no server."""

    url: str
    server: PostgresServer | None = None
    file: Path | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of processes that write it, including inputs and outputs."""
        return ["--ledger", self.url, "--ledger-content"]

    def rows(self) -> list[Row]:
        return rows_in_file(self.file) if self.file is not None else asyncio.run(rows_in_postgres(self.url))


@contextlib.contextmanager
def ledger_of(kind: str, folder: Path) -> Iterator[Ledger]:
    if kind == "sqlite":
        file = folder / "ledger.db"
        yield Ledger(f"sqlite:///{file}", file=file)
        return
    with PostgresServer() as server:
        yield Ledger(server.fresh(), server)
