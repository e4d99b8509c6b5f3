"""Ends of all that is stored in the server, so that nothing of a fleet whose last process is gone stays for ever."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from headway.brokers.redis import function_library
from headway.model import (
    Capacity,
    Cause,
    DedupKey,
    DedupKind,
    ItemResult,
    Lease,
    Limit,
    ProcessInfo,
    Role,
    WorkerInfo,
    WorkerStatus,
)
from tests.contracts.brokers import AT_ONCE, ask, failed, slot, story
from tests.contracts.dedup_keys import key, same, sharing, task
from tests.redis.stand import Stand
from tests.servers.redis import RedisServer

NUMBERS = function_library._NUMBERS


def longest(key: str) -> float:
    """Seconds after which a key has to be gone when nobody has come since."""
    name = re.sub(r"^headway:\{[^}]*\}:", "", key)
    if name.startswith("k:"):
        return 600.0
    if name.startswith("r:"):
        return NUMBERS["STREAM_SECONDS"]
    if name == "q":
        return NUMBERS["FIGURES_SECONDS"]
    if name.partition(":")[0] in {"z", "zl", "o", "on", "oc", "ou", "ql"}:
        return NUMBERS["LETTER_SECONDS"]
    if re.fullmatch(r"k[bund]|ko:.*|qs", name):
        return NUMBERS["ACCOUNT_SECONDS"]
    if name == "w" and "{limits}" in key:
        return NUMBERS["LIFE_SECONDS"] + 3700.0
    return NUMBERS["LIFE_SECONDS"]


async def everything(harness: Stand) -> None:
    """Use all that there is, and leave it as it is: waiting, running, failed, joined, unread, kept, dead, owed."""
    limit = Limit("key:k", "key", 1.0, 60.0)
    await harness.healthy("gpu-0", "gpu-1")
    for worker in ("gpu-0", "gpu-1"):
        await harness.broker.claim(slot(worker), AT_ONCE)
    await harness.broker.enqueue([ask("dies", id="dies", tenant="poison", gateway="gone")])
    while await harness.broker.state("poison", "dies") is not None:
        await harness.broker.release(await harness.claim(), failed())
        await harness.advance(1.0)
    await harness.broker.enqueue(
        [sharing("kept", task("kept", 600.0), key("kept", keep=600.0), same("kept", 600.0), limits=(limit,) * 1)]
    )
    lease = await harness.claim()
    await harness.broker.complete(lease, [ItemResult("an output") for _ in lease.entries])
    await harness.broker.enqueue([ask(gateway="unread", limits=(limit,)) for _ in range(50)])
    await harness.broker.enqueue([sharing(id, task(id), key("k"), gateway="joins") for id in ("leads", "follows")])
    await harness.broker.withdraw([("t", "leads", 0)], "joins")
    await harness.broker.enqueue([ask(gateway="unread") for _ in range(10)])  # So full that tenants are counted.
    await harness.broker.release(await harness.claim(), failed(Cause.CRASHED))
    await harness.claim("gpu-1")
    await harness.broker.enqueue([ask(queue_timeout=1.0, tier=tier, tenant="in time") for tier in (0, 1, 2)])
    await harness.broker.enqueue([ask(tenant="poison")])
    await harness.fleet.heartbeat(ProcessInfo(id="a", role=Role.GATEWAY, host="h", pid=1))
    await harness.fleet.acquire_leadership("a", 1.0)
    await harness.fleet.publish(Capacity(model="m", healthy=1, degraded=0, items_per_second=1, usable_per_second=1))
    await harness.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="other", status=WorkerStatus.HEALTHY))


@story
async def test_all_keys_end_when_all_processes_are_gone(harness: Stand) -> None:
    names: set[str] = set()
    for how in (everything, lambda harness: harness.reaping(11.0)):
        await how(harness)
        ends = harness.server.ends()
        assert {key: left for key, left in ends.items() if not 0 <= left <= longest(key)} == {}
        names |= {key.partition("}:")[2].partition(":")[0] for key in ends}
    assert names >= {"q", "e", "p", "l1", "a1", "t1", "tw", "d", "x", "y", "s", "n", "h", "r", "g", "m", "v"}
    assert names >= {
        "vs",
        "vd",
        "k",
        "kb",
        "kd",
        "kn",
        "ko",
        "z",
        "o",
        "on",
        "oc",
        "ou",
        "w",
        "j",
        "capacity",
    }


@story
async def test_whoever_is_there_keeps_what_is_stored(harness: Stand) -> None:
    await everything(harness)
    for name in harness.server.ends():
        if longest(name) != 600.0:
            harness.server.command("EXPIRE", name, 30)
    await harness.reaping(21.0)
    await harness.fleet.heartbeat(ProcessInfo(id="a", role=Role.GATEWAY, host="h", pid=1))
    left = {name.partition("}:")[2].partition(":")[0] for name, left in harness.server.ends().items() if left <= 30}
    renewed_by_others = {"b", "z", "zl", "o", "on", "oc", "ou", "ql", "ko", "kc", "w", "j", "capacity"}
    # Followers of a flight are at their end long before their list. Queues are listed while they are used.
    assert left <= renewed_by_others | {"v", "qs"}


@story
async def test_a_queue_whose_figures_have_ended_begins_anew(harness: Stand) -> None:
    """Leftovers, which end later, are not taken for what waits now."""
    await harness.broker.enqueue([ask(id=f"old {number}") for number in range(3)])
    await harness.claim(limit=1)
    harness.server.command("DEL", harness.key("q"))
    assert await harness.broker.enqueue([ask(id="new", dedup_keys=(DedupKey(DedupKind.KEY, "k", b"", 1.0),))]) == [None]
    assert [entry.id for entry in (await harness.claim()).entries] == ["new"]
    assert [one.depth for one in await harness.broker.depths() if one.model == "m"] == [0, 0, 0]


ENDS = ("LIFE_SECONDS", "FIGURES_SECONDS", "STREAM_SECONDS", "ACCOUNT_SECONDS", "LETTER_SECONDS", "BELL_SECONDS")


@pytest.fixture
def short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that is stored end after two seconds."""
    for name in ENDS:
        monkeypatch.setitem(function_library._NUMBERS, name, 2)
    monkeypatch.setattr(function_library, "_BODY", function_library._body())
    monkeypatch.setattr(function_library, "VERSION", "short_lived")


@pytest.mark.usefixtures("short_lived")
def test_when_the_last_process_has_been_gone_for_a_while_nothing_is_left(
    kind: str, own: Callable[[str], RedisServer]
) -> None:
    server = own(kind)
    harness = Stand(server)

    async def used() -> None:
        await harness.healthy("gpu-0")
        await harness.broker.claim(slot(), AT_ONCE)
        await harness.broker.enqueue([sharing(id, task(id, 1.0), key(keep=1.0)) for id in ("kept", "joined")])
        claimed = await harness.broker.claim(slot(), AT_ONCE)
        if isinstance(claimed, Lease):
            await harness.broker.complete(claimed, [ItemResult(None, "no") for _ in claimed.entries])
        await harness.broker.enqueue([ask(limits=(Limit("key:k", "key", 600.0, 60.0),)) for _ in range(2)])
        await harness.broker.claim(slot(limit=1), AT_ONCE)
        await harness.fleet.heartbeat(ProcessInfo(id="a", role=Role.GATEWAY, host="h", pid=1))

    harness.run(used())
    harness.close()
    for _ in range(100):
        if not server.ends():
            break
        server.command("BLPOP", "nothing", "0.1")  # Nothing comes: it is the server's own time that has to pass.
    assert server.ends() == {}


@story
async def test_the_account_of_what_is_kept_ends_with_the_last_outcome(harness: Stand) -> None:
    for id in ("a", "b"):
        await harness.broker.enqueue([sharing(id, key(id, keep=2.0))])
        await harness.answer(await harness.claim())
    account = {"kb", "kd", "kn", "ko"}
    assert account <= {name.partition("}:")[2].partition(":")[0] for name in harness.server.ends()}
    await harness.reaping(5.0)
    assert not account & {name.partition("}:")[2].partition(":")[0] for name in harness.server.ends()}
