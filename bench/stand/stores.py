"""Redis as the drills need it: alone, under Sentinels, as a cluster, each as docs/fleet.md sets it up.

The distribution's `redis-server`, on 127.0.0.1, in folders of its own that go with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.stand import stand
from bench.stand.stand import Broken, Server

SERVICE = "headway"
PATIENCE = 30.0
"""Seconds until a set-up must be whole."""
USUAL = ("appendonly yes", "appendfsync everysec", 'save ""', "maxmemory 2gb", "maxmemory-policy noeviction")
REPLICATED = ("min-replicas-to-write 1", "min-replicas-max-lag 10", "repl-diskless-sync-delay 0")
CLUSTERED = ("cluster-enabled yes", "cluster-node-timeout 3000", "repl-diskless-sync-delay 0")
WATCHING = ("down-after-milliseconds {} 3000", "failover-timeout {} 10000")
SLOTS = 16384


class Node:
    """One server, or Sentinel, that can be ended and started again at the same port.

    Arguments:
        name: for messages and the file that its output goes to.
        lines: of its configuration.
        sentinel: it is a Sentinel.
        place: folder in which its own is made; None for the system's.
    """

    def __init__(self, name: str, *lines: str, sentinel: bool = False, place: Path | None = None) -> None:
        if shutil.which("redis-server") is None:
            raise Broken("redis-server is not installed. On Debian and Ubuntu: apt-get install redis-server")
        self.name = name
        self.port = stand.free_port()
        self._folder = tempfile.TemporaryDirectory(prefix=f"headway-{name}-", dir=place)
        self._sentinel = sentinel
        self._server: Server | None = None
        self._settings = Path(self._folder.name) / "redis.conf"
        usual = () if sentinel else USUAL
        text = (f"port {self.port}", "bind 127.0.0.1", f"dir {self._folder.name}", *usual, *lines)
        self._settings.write_text("\n".join(text) + "\n", encoding="utf-8")

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._server is not None
        return self._server.pid

    def start(self) -> None:
        """Start it, with what it kept; returns when it answers."""
        command = ["redis-server", str(self._settings), *(["--sentinel"] if self._sentinel else [])]
        self._server = Server(self.name, command, lambda _: "redis")
        self._server.wait_for(self._answers)

    def kill(self) -> None:
        """End it at once."""
        assert self._server is not None
        self._server.kill()

    def empty(self) -> None:
        """Remove what it kept; it must have ended."""
        for found in Path(self._folder.name).iterdir():
            if found != self._settings:
                shutil.rmtree(found) if found.is_dir() else found.unlink()

    def pause(self) -> None:
        """Have it do nothing until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it for good."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
            self._server.stop()
        self._folder.cleanup()

    def ask(self, *command: str | int) -> Any:
        """The answer to a command."""
        with redis.Redis(port=self.port, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)) as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.ask("PING"))
        return False


class Store:
    """What a fleet's processes share; use it as a context manager.

    Arguments:
        name: for messages and files.
        place: folder for the files of its servers; None for the system's.

    Attributes:
        url: by which Headway finds it.
        nodes: its servers; the first is the primary to begin with.
    """

    def __init__(self, name: str, place: Path | None = None) -> None:
        self.nodes = [Node(f"{name}-redis", place=place)]
        self.url = f"redis://127.0.0.1:{self.nodes[0].port}/0"
        self._running = ExitStack()

    def __enter__(self) -> Self:
        for node in self._everybody():
            self._running.callback(node.close)
        try:
            for node in self._everybody():
                node.start()
            self._join()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _everybody(self) -> Sequence[Node]:
        return self.nodes

    def _join(self) -> None:
        """Make one of all servers."""


class Watched(Store):
    """A primary with two replicas, and three Sentinels."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        first = Node(f"{name}-redis-0", *REPLICATED)
        follows = f"replicaof 127.0.0.1 {first.port}"
        self.nodes = [first, *(Node(f"{name}-redis-{number}", *REPLICATED, follows) for number in (1, 2))]
        watch = [f"sentinel monitor {SERVICE} 127.0.0.1 {first.port} 2"]
        watch += [f"sentinel {line.format(SERVICE)}" for line in WATCHING]
        self.sentinels = [Node(f"{name}-sentinel-{number}", *watch, sentinel=True) for number in range(3)]
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{SERVICE}"

    def primary(self) -> Node:
        """The server that the first Sentinel holds for the primary."""
        port = int(self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        return next(node for node in self.nodes if node.port == port)

    def fail_over(self) -> None:
        """Have a replica take the primary's place."""
        self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)

    def _everybody(self) -> Sequence[Node]:
        return [*self.nodes, *self.sentinels]

    def _join(self) -> None:
        until(lambda: self.nodes[0].ask("INFO", "replication").get("connected_slaves") == 2, "its replicas follow")
        until(lambda: all(self._sees_all(one) for one in self.sentinels), "its Sentinels know all")

    def _sees_all(self, sentinel: Node) -> bool:
        replicas = sentinel.ask("SENTINEL", "REPLICAS", SERVICE)
        linked = [dict(zip(one[::2], one[1::2], strict=True)) if isinstance(one, list) else one for one in replicas]
        in_step = [one[b"master-link-status"] == b"ok" for one in linked]
        return in_step == [True, True] and len(sentinel.ask("SENTINEL", "SENTINELS", SERVICE)) == 2


class Shared(Store):
    """A cluster of three primaries, each with a replica."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._buses = [stand.free_port() for _ in range(6)]
        self.nodes = [
            Node(f"{name}-node-{number}", *CLUSTERED, f"cluster-port {bus}") for number, bus in enumerate(self._buses)
        ]
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{one.port}' for one in self.nodes[:3])}"

    def replica_of(self, primary: Node) -> Node:
        """The replica of one of the first three."""
        return self.nodes[self.nodes.index(primary) + 3]

    def _join(self) -> None:
        first, primaries = self.nodes[0], self.nodes[:3]
        for number, node in enumerate(primaries):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1)
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(b"cluster_known_nodes:6" in _info(node) for node in self.nodes), "its nodes know each other")
        for node in primaries:
            self.replica_of(node).ask("CLUSTER", "REPLICATE", _text(node.ask("CLUSTER", "MYID")))
        until(lambda: all(b"cluster_state:ok" in _info(node) for node in self.nodes), "its slots are served")
        until(
            lambda: all(one.ask("INFO", "replication").get("master_link_status") == "up" for one in self.nodes[3:]),
            "its replicas follow",
        )


def until(reached: Callable[[], bool], what: str) -> None:
    """Return as soon as `reached()`.

    Raises:
        Broken: that takes too long.
    """
    patience = time.monotonic() + PATIENCE
    while not _tried(reached):
        if time.monotonic() > patience:
            raise Broken(f"the store does not come up: {what} is not so after {PATIENCE:g} s")
        time.sleep(0.1)


def _tried(reached: Callable[[], bool]) -> bool:
    with contextlib.suppress(redis.RedisError):
        return reached()
    return False


def _info(node: Node) -> bytes:
    told = node.ask("CLUSTER", "INFO")
    return told if isinstance(told, bytes) else repr(told).encode()


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told
