"""Faults for a fleet under load from `tests.promises`, one after the other. Each is recorded with what it may cost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e.fleet import Fleet, pause, resume
from tests.e2e.server import Server
from tests.promises.client import Door, Standing
from tests.promises.faults import Fault
from tests.promises.operation import History
from tests.servers.ports import Port
from tests.servers.proxy import ChaosProxy
from tests.servers.redis import RedisServer

STALL = 1.2
"""How long the server is paused each time, in seconds; less than a lease."""
CHILD = b"backends/child.py"

_rest = threading.Event()


class Troubles:
    """Faults for a fleet. Its server writes to disk before answering, and allows DEBUG."""

    def __init__(
        self, it: Fleet, redis: RedisServer, proxy: ChaosProxy, doors: list[Door], history: History, seed: int
    ) -> None:
        self._it = it
        self._redis = redis
        self._proxy = proxy
        self._doors = doors
        self._history = history
        self._rng = random.Random(f"troubles {seed}")

    def make(self, names: Sequence[str], seconds: float) -> None:
        """Cause these faults in turn, over and over, for `seconds`. Each is over before the next begins."""
        end = time.monotonic() + seconds
        while True:
            for name in names:
                _rest.wait(self._rng.uniform(0.3, 0.9))
                if time.monotonic() > end:
                    return
                fault = Fault(name, time.monotonic())
                self._history.faults.append(fault)
                self._act(name)
                fault.ended = time.monotonic()

    def _act(self, name: str) -> None:
        role, _, what = name.partition(" ")
        match role:
            case "redis":
                self._trouble_redis(what)
            case "connections":
                self._trouble_connections(what)
            case "gpu":
                _signal_child(self._rng.choice(self._it.workers))
            case _:
                self._trouble_process(role, what)

    def _trouble_redis(self, what: str) -> None:
        redis = self._redis
        match what:
            case "stalled":
                redis.command("DEBUG", "SLEEP", str(STALL))
            case "emptied":
                redis.command("FLUSHALL")
            case "paused":
                redis.pause()
                _rest.wait(STALL)
                redis.resume()
            case _:
                redis.kill()
                _rest.wait(self._rng.uniform(0.1, 1.0))
                redis.start()

    def _trouble_connections(self, what: str) -> None:
        if what == "cut":
            self._proxy.cut()
            return
        self._proxy.delay(0.1)
        _rest.wait(STALL)
        self._proxy.normal()

    def _trouble_process(self, role: str, what: str) -> None:
        it = self._it
        servers = {"gateway": it.gateways, "worker": it.workers, "controller": it.controllers}[role]
        server = self._rng.choice(servers)
        acts: dict[str, Callable[[Server], None]] = {"killed": it.kill, "ended": it.end}
        if what == "paused":
            pause(server)
            _rest.wait(STALL)
            resume(server)
            return
        door = next((door for door in self._doors if door.port == server.port), None)
        if door is not None:
            door.standing = Standing.KILLED if what == "killed" else Standing.ENDING
        acts[what](server)
        with contextlib.closing(Port()) as port:
            made = it.start(role, *(("--grpc-port", str(port.number)) if door is not None and door.grpc else ()))
        if door is not None:
            self._doors.append(Door(f"gateway-{made.port}", made.port, grpc=made.grpc_port))


def _signal_child(server: Server) -> None:
    """Kill the process that runs a worker's function."""
    for pid in server.processes():
        try:
            if CHILD in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return
        except (FileNotFoundError, ProcessLookupError):
            continue
