"""A primary with a replica, and Sentinels that put the replica in its place when it is gone."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import redis

from tests.e2e.client import wait_until
from tests.servers.ports import LOOPBACK
from tests.servers.redis import RedisServer

SERVICE = "headway"
DOWN_AFTER = 1_000
"""Milliseconds after which a server that does not answer is taken for gone, while somebody waits for that."""
NEVER = 3_600_000
"""Milliseconds of silence at all other times: a server may be as late as it likes on a busy machine."""


class SentinelSetup:
    """`with` starts it, and it is whole: every Sentinel knows the others and the replica, which is in step. They put the
    replica in the primary's place from `fail_over` on, or when it is asked who is the primary and that has been ended.

    Of the two `servers` either may be the primary. Where it is `usual`, Sentinels look and speak as often as they usually do.
    """

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
        """The server that all Sentinels hold for the primary, and that is one. From now on it stays that."""
        found = wait_until(self._found)
        self._take_for_gone_after(NEVER)
        return found

    def fail_over(self) -> None:
        """Take a primary that does not answer for gone, until Sentinels are asked for the primary."""
        self._take_for_gone_after(DOWN_AFTER)

    def hand_over(self) -> None:
        """Have the replica put in the primary's place, though that is well. The Sentinel that leads knows of it."""
        replica = self.replica
        wait_until(lambda: self._handed_over_to(replica))

    @property
    def replica(self) -> RedisServer:
        primary = self.primary
        return next(server for server in self.servers if server is not primary)

    def in_step(self) -> bool:
        """Whether the replica has all that the primary has, and every Sentinel knows all of them."""
        with suppress(redis.ConnectionError):  # Sentinels cut those of a server whose part they change.
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
            # One that is too late to see the promotion gives up, and makes the server a replica again.
            if replica.command("ROLE")[0] != b"master":
                with suppress(redis.ResponseError):  # It is under way, or no replica has been heard of lately.
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
    # A replica is only chosen when it was heard of five ping periods ago at most, which must be more than a second.
    *("INFO-PERIOD", 100, "PING-PERIOD", 250, "ASK-PERIOD", 100),
    # Who has not been told of a promotion within four of these takes it back. The Sentinel that leads sees it after a second.
    *("PUBLISH-PERIOD", 500),
    *("ELECTION-TIMEOUT", 2000, "MIN-LINK-RECONNECT-PERIOD", 100),
    # Who stood still for so long trusts nothing that it has seen, but usually does so for half a minute.
    *("TILT-TRIGGER", 900, "TILT-PERIOD", 1000),
)
"""Milliseconds between the Sentinels' looks and words, which are usually seconds."""
