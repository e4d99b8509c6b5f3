"""A cluster of three primaries that share the slots."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from tests.e2e.client import wait_until
from tests.servers.ports import LOOPBACK, Port
from tests.servers.redis import RedisServer, program

SLOTS, SIZE = 16384, 3


class ClusterSetup:
    """`with` starts it and waits until it is whole: primaries, lowest slots first, and replicas in that order."""

    def __init__(self, kind: str, folder: Path, replicas: bool = False) -> None:
        program(kind)
        self._buses = [Port() for _ in range(SIZE * (1 + replicas))]
        made = [
            RedisServer(kind, folder / f"node-{number}", *_CLUSTER, f"cluster-port {bus.number}")
            for number, bus in enumerate(self._buses)
        ]
        self.servers, self.replicas = made[:SIZE], made[SIZE:]
        self._running = ExitStack()

    @property
    def url(self) -> str:
        return f"redis+cluster://{LOOPBACK}:{self.servers[0].port}"

    def of(self, key: str) -> RedisServer:
        slot = self.servers[0].command("CLUSTER", "KEYSLOT", key)
        return next(one for number, one in enumerate(self.servers) if slot in self._slots(number))

    def whole(self) -> bool:
        """Whether every node knows the others, and all slots are served."""
        everybody = [*self.servers, *self.replicas]
        known = f"cluster_known_nodes:{len(everybody)}\r\n".encode()
        found = [one.command("CLUSTER", "INFO") for one in everybody]
        return all(b"cluster_state:ok\r\n" in info and known in info for info in found)

    def give(self, slot: int, owner: RedisServer) -> None:
        """Give a slot to a server, and wait until all nodes that aren't paused know that. Nodes may still be spreading
        the earlier owner, which would undo this. The greatest epoch wins such conflicts, so the owner must have that
        epoch, and all nodes must know it."""
        awake = [server for server in self.servers if not server.paused]
        name = owner.command("CLUSTER", "MYID")

        def settled() -> bool:
            known = [_epochs(server) for server in awake]
            if any(epochs[name] <= epoch for epochs in known for other, epoch in epochs.items() if other != name):
                owner.command("CLUSTER", "BUMPEPOCH")
                return False
            astray = [server for server in awake if _owner(server, slot) != name]
            for server in astray:
                server.command("CLUSTER", "SETSLOT", slot, "NODE", name)
            return not astray

        wait_until(settled)

    def __enter__(self) -> Self:
        for bus in self._buses:
            self._running.enter_context(closing(bus))
        everybody = [*self.servers, *self.replicas]
        for server in everybody:
            self._running.callback(server.close)
        try:
            for server in everybody:
                server.start()
            for number, server in enumerate(self.servers):
                slots = self._slots(number)
                server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                server.command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
            for server, bus in zip(everybody[1:], self._buses[1:], strict=True):
                self.servers[0].command("CLUSTER", "MEET", LOOPBACK, server.port, bus.number)
            wait_until(self.whole)
            for primary, replica in zip(self.servers, self.replicas, strict=False):
                replica.command("CLUSTER", "REPLICATE", primary.command("CLUSTER", "MYID"))
            wait_until(lambda: all(_follows(one) for one in self.replicas))
            # A primary only votes for replicas that it knows as such, and a lost vote isn't repeated for minutes.
            wait_until(lambda: all(_replicas(one) == len(self.replicas) for one in everybody))
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def _slots(self, number: int) -> range:
        return range(SLOTS * number // SIZE, SLOTS * (number + 1) // SIZE)


def _follows(replica: RedisServer) -> bool:
    told = replica.command("INFO", "replication")
    return bool(told["role"] == "slave" and told["master_link_status"] == "up")


def _replicas(server: RedisServer) -> int:
    rows = (line.split() for line in server.command("CLUSTER", "NODES").splitlines())
    return sum(b"slave" in row[2].split(b",") for row in rows)


def _epochs(server: RedisServer) -> dict[bytes, int]:
    rows = (line.split() for line in server.command("CLUSTER", "NODES").splitlines())
    return {row[0]: int(row[6]) for row in rows}


def _owner(server: RedisServer, slot: int) -> bytes:
    """The name of the node that has a slot, according to a server; empty if none has."""
    rows = server.command("CLUSTER", "SLOTS")
    return next((node[2] for first, last, node, *_ in rows if first <= slot <= last), b"")


# A node that a test pauses is silent, but the others don't give it up, however long the test takes.
_CLUSTER = (
    "cluster-enabled yes",
    "cluster-node-timeout 60000",
    "cluster-require-full-coverage yes",
    "repl-diskless-sync-delay 0",
)
