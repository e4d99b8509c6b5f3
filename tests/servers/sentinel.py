"""A primary with a replica, and Sentinels that promote the replica when the primary is gone."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import redis

from tests.e2e.client import wait_until
from tests.servers.ports import LOOPBACK
from tests.servers.redis import RedisServer

SERVICE = "headway"
DOWN_AFTER = 1_000
"""Milliseconds after which a silent server counts as gone, while somebody waits for that."""
NEVER = 3_600_000
"""The same at all other times, as a server may be very late on a busy machine."""


class SentinelSetup:
    """`with` starts it and waits until every Sentinel knows the others and the replica, which is in step. Sentinels
    promote the replica after `fail_over`, or when asked for the primary after that was stopped. Either of the two
    `servers` may be the primary. If it is `usual`, Sentinels check and talk as often as by default."""

    def __init__(self, kind: str, folder: Path, usual: bool = False) -> None:
        first = RedisServer(kind, folder / "server-0", *_REPLICATION)
        follows = f"replicaof {LOOPBACK} {first.port}"
        second = RedisServer(kind, folder / "server-1", *_REPLICATION, follows)
        self.servers = [first, second]
        watch = [
            f"sentinel monitor {SERVICE} {LOOPBACK} {first.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {NEVER}",
            f"sentinel failover-timeout {SERVICE} 2000",
        ]
        self.sentinels = [
            RedisServer(kind, folder / f"sentinel-{number}", *watch, sentinel=True) for number in range(3)
        ]
        self._usual = usual
        self._running = ExitStack()
        self._gone_after = NEVER

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{LOOPBACK}:{one.port}' for one in self.sentinels)}/{SERVICE}"

    @property
    def primary(self) -> RedisServer:
        """The server that all Sentinels consider the primary, and that is one. It stays the primary from now on."""
        found = wait_until(self._found)
        self._take_for_gone_after(NEVER)
        return found

    def fail_over(self) -> None:
        """Treat a primary that doesn't answer as gone, until Sentinels are asked for the primary."""
        self._take_for_gone_after(DOWN_AFTER)

    def hand_over(self) -> None:
        """Have the replica promoted although the primary is well. The leading Sentinel knows about it."""
        replica = self.replica
        wait_until(lambda: self._handed_over_to(replica))

    @property
    def replica(self) -> RedisServer:
        primary = self.primary
        return next(server for server in self.servers if server is not primary)

    def in_step(self) -> bool:
        """Whether the replica has everything that the primary has, and every Sentinel knows all of them."""
        with suppress(redis.ConnectionError):  # Sentinels cut the connections of a server whose role they change.
            return self._in_step()
        return False

    def __enter__(self) -> Self:
        everybody = [*self.servers, *self.sentinels]
        for server in everybody:
            self._running.callback(server.close)
        try:
            for server in everybody:
                server.start()
            for one in self.sentinels if not self._usual else ():
                one.command("SENTINEL", "DEBUG", *_IMPATIENT)
            wait_until(self.in_step)
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def _in_step(self) -> bool:
        primary = self._agreed()
        if primary is None or not all(server.runs for server in self.servers):
            return False
        [replica] = (server for server in self.servers if server is not primary)
        written = primary.command("INFO", "replication")["master_repl_offset"]
        seen = replica.command("INFO", "replication")
        followed = seen.get("master_link_status") == "up" and seen["slave_repl_offset"] >= written
        return followed and all(self._sees_all(one) for one in self.sentinels)

    def _take_for_gone_after(self, milliseconds: int) -> None:
        if self._gone_after != milliseconds:
            for one in self.sentinels:
                if one.runs and not one.paused:
                    one.command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", milliseconds)
        self._gone_after = milliseconds

    def _handed_over_to(self, replica: RedisServer) -> bool:
        leader = self.sentinels[0]
        with suppress(redis.ConnectionError):
            if int(leader.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) == replica.port:
                return True
            # A Sentinel that sees the promotion too late gives up, and makes the server a replica again.
            if replica.command("ROLE")[0] != b"master":
                with suppress(redis.ResponseError):  # It is under way, or no replica has been heard of recently.
                    leader.command("SENTINEL", "FAILOVER", SERVICE)
        return False

    def _found(self) -> RedisServer | None:
        with suppress(redis.ConnectionError):
            return self._agreed()
        return None

    def _agreed(self) -> RedisServer | None:
        told = {one.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1] for one in self.sentinels if one.runs}
        if len(told) != 1:
            return None
        port = int(told.pop())
        found = next(server for server in self.servers if server.port == port)
        if not found.runs:
            self.fail_over()
            return None
        return found if found.command("ROLE")[0] == b"master" else None

    def _sees_all(self, sentinel: RedisServer) -> bool:
        replicas = sentinel.command("SENTINEL", "REPLICAS", SERVICE)
        others = sentinel.command("SENTINEL", "SENTINELS", SERVICE)
        linked = [one[b"master-link-status"] == b"ok" and one[b"flags"] == b"slave" for one in replicas]
        return linked == [True] and len(others) == len(self.sentinels) - 1


_REPLICATION = ("repl-diskless-sync-delay 0", "repl-ping-replica-period 1", "min-replicas-to-write 0")
_IMPATIENT = (
    # A replica is only chosen if it was heard of within five ping periods, which must be more than a second.
    *("INFO-PERIOD", 100, "PING-PERIOD", 250, "ASK-PERIOD", 100),
    # A Sentinel that isn't told of a promotion within four of these undoes it. The leader sees it after a second.
    *("PUBLISH-PERIOD", 500),
    *("ELECTION-TIMEOUT", 2000, "MIN-LINK-RECONNECT-PERIOD", 100),
    # After standing still this long, a Sentinel distrusts what it has seen, by default for half a minute.
    *("TILT-TRIGGER", 900, "TILT-PERIOD", 1000),
)
"""Milliseconds between the Sentinels' checks and messages; usually it is seconds."""
