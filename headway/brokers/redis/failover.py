"""Planned failover: a replica that has all writes takes over from a healthy primary.

    guards ──▶ pause of writes ──▶ replicas catch up ──▶ failover ──▶ old primary is a replica ──▶ pause lifted
       │                                   │                │ not done in time, and the old one is still the primary
       └── refused                         └────────────────┴──▶ pause lifted, failover abandoned

The pause lasts PAUSE seconds and is renewed, so it expires if this program dies. It isn't lifted before the old primary is a
replica, because writes that the old primary accepts in between would be lost. But the pause ends MARGIN seconds after `within`
at the latest. A cluster does all this on its own (CLUSTER FAILOVER), so for a cluster this program only adds guards.

The first termination signal takes effect immediately, and lifts the pause. But once the takeover has been requested, the signal takes
effect only after the pause. A second signal always takes effect immediately."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from headway.brokers.redis.clients import Nodes
from headway.brokers.redis.link import Address, shown
from headway.errors import FailoverAborted, SettingError
from headway.runtime.race import end, heed_cancellation

PAUSE = 3.0
RENEW_EVERY = 0.5
MARGIN = 4.0  # Writes continue at most this many seconds after `within`. This is 1 s less than promised, for latency.
LOOK_EVERY = 0.02  # Seconds between two checks while waiting for a state.
SEEN_AGO, SEEN_WITHIN = 0.6, 11.0  # Best age in seconds of a Sentinel's last look at a replica, and maximum wait.
CLUSTER_TRIES = 5.0  # Seconds after which a cluster abandons a failover and ends the pause of writes.
MOST_LAG = 10  # Maximum seconds since a replica in sync last reported. Replicas report every second.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

NOTHING = "nothing was started"
LIFTED = f"the pause is lifted, or expires after {PAUSE:g} s, and the primary continues"
ASKED = "a takeover was requested: check the ROLE of the servers before you continue"
_LOGIN = "pass a URL with an administrator's credentials in HEADWAY_BROKER or as --broker"
_REPLICA = "check the replica, and try again"
_REACH = "check HEADWAY_BROKER or --broker, and that this host can reach it"

_OF_PRIMARY = ("CLIENT", "PAUSE", "?", "WRITE"), ("REPLICAOF", "?", "?")  # Tried on the primary; see `_check_right`.


async def fail_over(nodes: Nodes, within: float, say: Callable[[str], None], to: str = "", only: str = "") -> None:
    """Make replicas take over.

    Arguments:
        nodes: the servers.
        within: maximum seconds for each primary's replicas to catch up and take over. Writes are paused for at most 5 s more.
        say: called with a description of each step.
        to: HOST:PORT of the replica that takes over from a single server. The default is the most advanced replica.
        only: HOST or HOST:PORT of the primaries in a cluster that hand over. The default is all of them.

    Raises:
        FailoverAborted: a guard failed, or the failover was abandoned. The message says why, and that writes continue.
        SettingError: an option is invalid, or doesn't apply to such servers.
    """
    _check(nodes.kind, within, to, only)
    servers = _Servers(nodes)
    try:
        async with aclosing(servers):
            with _ended_by_signals(servers, say):
                if nodes.kind == "cluster":
                    await _of_cluster(servers, within, say, only)
                elif nodes.kind == "sentinel":
                    await _of_sentinels(servers, within, say)
                else:
                    await _of_one(servers, within, say, to)
    except AuthenticationError as exc:
        at = servers.asked
        raise FailoverAborted(f"{at} refuses the user or password: {exc}; {servers.so_far}; {_LOGIN}") from None
    except NoPermissionError as exc:
        raise FailoverAborted(
            f"the user in the URL is not allowed to do this on {servers.asked}: {exc}; {servers.so_far}; {_LOGIN}"
        ) from None
    except ResponseError as exc:
        raise FailoverAborted(f"{servers.asked} refuses: {exc}; {servers.so_far}") from None
    except (RedisError, OSError) as exc:
        hint = _REPLICA if servers.last in servers.replicas else _REACH
        raise FailoverAborted(f"{servers.asked} does not answer as expected: {exc}; {servers.so_far}; {hint}") from exc


def _check(kind: str, within: float, to: str, only: str) -> None:
    if not (0 < within < math.inf):
        raise SettingError("--within", within, "must be a number of seconds greater than 0", "Try 10, for example.")
    if to and kind == "sentinel":
        hint = "Leave it out. `replica-priority 0` keeps a replica from being chosen."
        raise SettingError("--to", to, "is only for a single server; Sentinels choose the replica themselves", hint)
    if to and kind == "cluster":
        hint = "Leave it out. Use --only HOST to say which primaries hand over."
        raise SettingError("--to", to, "is only for a single server; a cluster has several primaries", hint)
    if only and kind != "cluster":
        raise SettingError("--only", only, "is only for a cluster, but this URL is not for a cluster", "Leave it out.")


@contextmanager
def _ended_by_signals(servers: _Servers, say: Callable[[str], None]) -> Iterator[None]:
    """Raise FailoverAborted on a termination signal, except on the first one during a takeover."""
    loop, task, cancelled = asyncio.get_running_loop(), asyncio.current_task(), 0

    def heard(number: signal.Signals) -> None:
        nonlocal cancelled
        first, servers.signal = not servers.signal, number.name
        if first and servers.so_far == ASKED:
            with contextlib.suppress(OSError):  # The terminal may be gone.
                say(
                    f"{number.name}: the takeover was requested, and is finished first; a second signal ends this immediately"
                )
        elif task is not None:
            task.cancel()  # If redis-py swallows this, `heed` raises later.
            cancelled += 1

    for number in ENDING:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    except asyncio.CancelledError:
        servers.heed()
        raise
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
        while task is not None and cancelled:
            task.uncancel()  # Otherwise Python 3.11 doesn't turn later timeouts into a TimeoutError.
            cancelled -= 1


class _Servers:
    """Clients of the servers, created on demand, and facts for error messages.

    Attributes:
        so_far: description of what was done.
        signal: name of the last termination signal, or empty.
        last: address of the server that was asked last.
        replicas: addresses of replicas in sync.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.so_far, self.signal = nodes, NOTHING, ""
        self.last, self.replicas = shown(nodes.hosts[0]), set[str]()
        self._made: dict[tuple[Address, bool], Redis] = {}

    async def aclose(self) -> None:
        for client in self._made.values():
            await client.aclose()

    async def ask(self, address: Address, *command: Any, sentinel: bool = False) -> Any:
        self.last = shown(address)
        return await self.ask_beside(address, *command, sentinel=sentinel)

    async def ask_beside(self, address: Address, *command: Any, sentinel: bool = False) -> Any:
        """Ask a server, but don't mention it in later errors."""
        make = self.nodes.sentinel if sentinel else self.nodes.server
        if (address, sentinel) not in self._made:
            self._made[address, sentinel] = make(address)
        return await self._made[address, sentinel].execute_command(*command)  # type: ignore[no-untyped-call]

    @property
    def asked(self) -> str:
        return f"the replica {self.last}" if self.last in self.replicas else self.last

    def heed(self) -> None:
        """Raise FailoverAborted if there was a termination signal."""
        if self.signal:
            raise FailoverAborted(f"interrupted by {self.signal}; {self.so_far}")

    async def replication(self, address: Address) -> Mapping[str, Any]:
        section: Mapping[str, Any] = await self.ask(address, "INFO", "replication")
        return section


async def _of_one(servers: _Servers, within: float, say: Callable[[str], None], to: str) -> None:
    """Fail over a single server with the steps of the FAILOVER command. FAILOVER itself would pause for ever if the replica froze."""
    primary = servers.nodes.hosts[0]
    replicas = await _in_sync(servers, primary)
    chosen = _chosen(replicas, to)
    say(f"{shown(primary)} is the primary, with {_counted(replicas)} in sync; {shown(chosen)} will take over")

    async def take_over(begun: float) -> Address:
        await servers.ask(chosen, "REPLICAOF", "NO", "ONE")
        return chosen

    await _check_right(servers, chosen, "REPLICAOF", "?", "?")
    for command in _OF_PRIMARY:
        await _check_right(servers, primary, *command)
    await _hand_over(servers, primary, {chosen: replicas[chosen]}, within, say, take_over)
    say(f"now make the name or address in --broker lead to {shown(chosen)}")


async def _of_sentinels(servers: _Servers, within: float, say: Callable[[str], None]) -> None:
    sentinel = await _a_sentinel(servers)
    primary = await _primary_of(servers, sentinel)
    # This raises if too few Sentinels answer.
    await servers.ask(sentinel, "SENTINEL", "CKQUORUM", servers.nodes.service, sentinel=True)
    replicas = await _in_sync(servers, primary)
    say(f"{shown(primary)} is the primary, with {_counted(replicas)} in sync; Sentinel {shown(sentinel)} leads")
    await _check_right(servers, sentinel, "SENTINEL", "FAILOVER", f"{servers.nodes.service}?", sentinel=True)
    for command in _OF_PRIMARY:
        await _check_right(servers, primary, *command)
    await _until_seen(servers, sentinel, say)
    take_over = partial(_taken_over, servers, sentinel, primary, within)
    await _hand_over(servers, primary, replicas, within, say, take_over)


async def _check_right(servers: _Servers, address: Address, *command: Any, sentinel: bool = False) -> None:
    """Raise NoPermissionError if the user isn't allowed to run this command. Pass invalid arguments, so that it has no effect."""
    try:
        await servers.ask(address, *command, sentinel=sentinel)
    except NoPermissionError:
        raise
    except ResponseError:  # Permissions are checked before arguments.
        pass


async def _until_seen(servers: _Servers, sentinel: Address, say: Callable[[str], None]) -> None:
    """Wait for the best moment for a failover, so that writes are paused for half a second instead of a full one. The takeover
    takes about 0.25 s, but the leading Sentinel only learns of it when it looks at the replicas. It does so every 10 s, and
    during a failover as soon as its last look is a second old."""
    until = monotonic() + SEEN_WITHIN
    say(f"waiting at most {SEEN_WITHIN:g} s for its next look at the replicas, because that keeps the pause short")
    while (ago := await _seen_ago(servers, sentinel)) > SEEN_AGO and monotonic() < until:
        servers.heed()
        await asyncio.sleep(LOOK_EVERY)
    await asyncio.sleep(max(0.0, SEEN_AGO - ago))


async def _seen_ago(servers: _Servers, sentinel: Address) -> float:
    """Return how many seconds ago a Sentinel last looked at the replicas that are up. If it varies, return the longest time."""
    rows = await servers.ask(sentinel, "SENTINEL", "REPLICAS", servers.nodes.service, sentinel=True)
    ages = [int(replica["info-refresh"]) / 1000 for replica in map(_named, rows) if replica["flags"] == "slave"]
    return max(ages, default=0.0)


async def _hand_over(
    servers: _Servers,
    primary: Address,
    replicas: Mapping[Address, int],
    within: float,
    say: Callable[[str], None],
    take_over: Callable[[float], Awaitable[Address]],
) -> None:
    """Pause writes until the replicas have caught up and one of them has taken over. `take_over` is called with the time at which the
    pause began. It returns the replica that took over, or raises FailoverAborted if none has and none will."""
    servers.heed()
    servers.so_far = LIFTED
    begun = monotonic()
    async with _paused(servers, primary, begun + within + MARGIN) as pause:
        say("writes are paused")
        await _caught_up(servers, primary, replicas, within)
        say(f"the replicas have caught up after {monotonic() - begun:.2f} s")
        servers.heed()
        pause.lifts, servers.so_far = False, ASKED
        try:
            taken = await take_over(begun)
        except (FailoverAborted, ResponseError):
            pause.lifts, servers.so_far = True, LIFTED
            raise
        took = monotonic() - begun
        # Until it is a replica, the old primary would accept writes that are lost. Sentinels only demote it after the pause.
        await servers.ask(primary, "REPLICAOF", *taken)
        pause.lifts = True
    say(f"{shown(taken)} became the primary {took:.2f} s after the pause began, and has everything that was written")
    say(f"{shown(primary)} is its replica, and accepts no writes")


async def _taken_over(servers: _Servers, sentinel: Address, primary: Address, within: float, begun: float) -> Address:
    """Make the Sentinels replace the primary, and return the replica that took over. If they give up, they are asked again,
    because their leader may have noticed the promotion too late. A failover in progress is awaited even after the end of
    the pause."""
    requested = False
    while True:
        under_way = requested and await _under_way(servers, sentinel)
        now = await _primary_of(servers, sentinel)
        if now != primary and (await _role(servers, now)) == "master":
            return now
        took = monotonic() - begun
        if took >= within + MARGIN:
            servers.heed()
        if not under_way:
            if requested and took >= within:
                raise FailoverAborted(
                    f"no replica has taken over within {within:g} s; writes continue at {shown(primary)}"
                )
            try:
                await servers.ask(sentinel, "SENTINEL", "FAILOVER", servers.nodes.service, sentinel=True)
            except ResponseError:
                if not requested:
                    raise
            requested = True
        await asyncio.sleep(LOOK_EVERY)


async def _of_cluster(servers: _Servers, within: float, say: Callable[[str], None], only: str) -> None:
    seed = servers.nodes.hosts[0]
    state = await servers.ask(seed, "CLUSTER", "INFO")
    if "cluster_state:ok" not in _text(state):
        raise FailoverAborted(f"{shown(seed)} says that the cluster is incomplete; {NOTHING}")
    known = await _primaries(servers, seed)
    primaries = [address for address in known if not only or only in (address[0], shown(address))]
    if not primaries:
        raise FailoverAborted(f"the cluster has no primary {only!r}; {NOTHING}")
    plan = [(primary, _chosen(await _in_sync(servers, primary), "")) for primary in primaries]
    for _, replica in plan:
        await _check_right(servers, replica, "CLUSTER", "FAILOVER", "?")
    for number, (primary, replica) in enumerate(plan):
        servers.heed()
        begun, servers.so_far = monotonic(), ASKED
        await _taken_over_part(servers, primary, replica, within, begun)
        took = f"{monotonic() - begun:.2f} s"
        say(f"{shown(replica)} has replaced the primary {shown(primary)}, {took} after it was asked")
        servers.so_far = f"{number + 1} of {len(plan)} primaries have handed over, and the others continue"


async def _taken_over_part(servers: _Servers, primary: Address, replica: Address, within: float, begun: float) -> None:
    """Make a replica in a cluster take over. If the cluster gives up, for example for lack of votes, the replica is asked again."""
    asked_at = -math.inf
    while (await _role(servers, replica)) != "master" or (await _role(servers, primary)) != "slave":
        if (now := monotonic()) >= begun + within:
            raise FailoverAborted(
                f"{shown(replica)} has not taken over from {shown(primary)} within {within:g} s; the cluster itself "
                "ends the pause of writes there. Check CLUSTER NODES before you continue"
            )
        if now > asked_at + CLUSTER_TRIES:
            try:
                await servers.ask(replica, "CLUSTER", "FAILOVER")
            except ResponseError:
                if asked_at < begun:
                    raise  # On a later try, the replica may just have taken over.
            asked_at = now
        await asyncio.sleep(LOOK_EVERY)


async def _primaries(servers: _Servers, seed: Address) -> list[Address]:
    rows = await servers.ask(seed, "CLUSTER", "SLOTS")
    if isinstance(rows, Mapping):  # Parsed by redis-py.
        addresses = [(_text(row["primary"][0]), int(row["primary"][1])) for row in rows.values()]
    else:
        addresses = [(_text(row[2][0]), int(row[2][1])) for row in rows]
    return sorted({(host or seed[0], port) for host, port in addresses})


async def _in_sync(servers: _Servers, primary: Address) -> dict[Address, int]:
    """Return the offset of each replica in sync. Raises FailoverAborted if there is none, or if `primary` isn't a primary."""
    section = await servers.replication(primary)
    if section["role"] != "master":
        raise FailoverAborted(
            f"{shown(primary)} is a replica of {section.get('master_host')}:{section.get('master_port')}; {NOTHING}"
        )
    lines = [line for name, line in section.items() if name.startswith("slave") and isinstance(line, Mapping)]
    in_sync = {
        (str(line["ip"]), int(line["port"])): int(line["offset"])
        for line in lines
        if line["state"] == "online" and int(line.get("lag", 0)) <= MOST_LAG
    }
    if not in_sync:
        behind = ", ".join(f"{line['ip']}:{line['port']} is {line['state']}" for line in lines) or "it has none"
        raise FailoverAborted(f"{shown(primary)} has no replica that is connected and in sync ({behind}); {NOTHING}")
    servers.replicas.update(map(shown, in_sync))
    for replica in in_sync:
        link = (await servers.replication(replica)).get("master_link_status")
        if link != "up":
            raise FailoverAborted(f"the replica {shown(replica)} says that its link is {link}; {NOTHING}")
    return in_sync


def _chosen(replicas: Mapping[Address, int], to: str) -> Address:
    if not to:
        return max(replicas, key=lambda address: replicas[address])
    for address in replicas:
        if to in (shown(address), address[0]):
            return address
    raise FailoverAborted(f"{to} is not a replica in sync; {', '.join(map(shown, replicas))} are; {NOTHING}")


class _Pause(msgspec.Struct):
    """Pause of writes. When its block ends, it is lifted if `lifts` is set, and otherwise left to expire."""

    lifts: bool = True


@asynccontextmanager
async def _paused(servers: _Servers, primary: Address, until: float) -> AsyncIterator[_Pause]:

    async def pause() -> None:
        seconds = max(0.0, min(PAUSE, until - monotonic()))
        await servers.ask_beside(primary, "CLIENT", "PAUSE", round(seconds * 1000), "WRITE")

    async def renew() -> None:
        while monotonic() + RENEW_EVERY < until:
            heed_cancellation()
            await asyncio.sleep(RENEW_EVERY)
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(1.0):  # A slower command would extend the pause.
                    await pause()

    servers.last, made = shown(primary), _Pause()
    await pause()
    renewing = asyncio.create_task(renew(), name="write pause renewal")
    try:
        yield made
    finally:
        await end(renewing)
        if made.lifts:
            with contextlib.suppress(RedisError, OSError):  # If this fails, the pause expires.
                await servers.ask_beside(primary, "CLIENT", "UNPAUSE")


async def _caught_up(servers: _Servers, primary: Address, replicas: Mapping[Address, int], within: float) -> None:
    written, until = int((await servers.replication(primary))["master_repl_offset"]), monotonic() + within
    while True:
        servers.heed()
        if min([int((await servers.replication(replica))["slave_repl_offset"]) for replica in replicas]) >= written:
            return
        if monotonic() >= until:
            raise FailoverAborted(
                f"a replica has not caught up within {within:g} s; writes continue at {shown(primary)}"
            )
        await asyncio.sleep(LOOK_EVERY)


async def _a_sentinel(servers: _Servers) -> Address:
    error: Exception | None = None
    for address in servers.nodes.hosts:
        try:
            await servers.ask(address, "PING", sentinel=True)
            return address
        except (RedisError, OSError) as exc:
            error = exc
    at = ", ".join(map(shown, servers.nodes.hosts))
    hint = _LOGIN if isinstance(error, AuthenticationError) else _REACH
    raise FailoverAborted(f"no Sentinel answers at {at}: {error}; {NOTHING}; {hint}")


async def _primary_of(servers: _Servers, sentinel: Address) -> Address:
    address = await servers.ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", servers.nodes.service, sentinel=True)
    if not address:
        raise FailoverAborted(f"Sentinel {shown(sentinel)} knows no primary named {servers.nodes.service!r}; {NOTHING}")
    return _text(address[0]), int(address[1])


async def _under_way(servers: _Servers, sentinel: Address) -> bool:
    flat = await servers.ask(sentinel, "SENTINEL", "MASTER", servers.nodes.service, sentinel=True)
    return "failover_in_progress" in str(_named(flat).get("flags", ""))


def _named(flat: Any) -> Mapping[str, Any]:
    """Return a server's fields from a Sentinel's list."""
    if isinstance(flat, Mapping):  # Parsed by redis-py.
        return flat
    return dict(zip(map(_text, flat[::2]), map(_text, flat[1::2]), strict=True))


async def _role(servers: _Servers, address: Address) -> str:
    """Return `master` or `slave`, or an empty string if the server doesn't answer."""
    with contextlib.suppress(RedisError, OSError):
        return str((await servers.replication(address))["role"])
    return ""


def _counted(replicas: Sequence[Address] | Mapping[Address, int]) -> str:
    return f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
