"""A zone of three is lost under load, and stays away: what it costs those who go elsewhere, and every promise checked.

    python bench/promises/lost_zone.py                    a minute
    python bench/promises/lost_zone.py --rate 40          on a busy machine
    python bench/promises/lost_zone.py --calm 20 --after 40

Three zones over one Redis, with a gateway and two worker hosts in each, whose GPUs are made of sleep. Clients of three tenants come
open-loop through all gateways, with all that clients do (`tests/promises/crowd.py`). Then all processes of one zone are killed at once (SIGKILL), and none comes back:
clients that waited at its gateway see a reset, and from then on all ask elsewhere. What waited in its queue, tasks among it, is run by the others.

In the end every task and key is asked for once more, and the whole history is judged. Told besides: batches that slots of other zones took,
before the loss and after it.

Then the same with plain clients, whose latencies are told by when they first asked: each has an idempotency key, and asks again elsewhere when
its gateway is gone. GPUs of 100 ms a batch of at most 32 inputs, about half loaded before.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import secrets
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from bench.promises.chaos import CAPPED, MAX_BATCH, TARGET, TENANTS, _environment, _flags, _outcome
from bench.promises.crowd import loop_factory
from bench.stand import fleet, stand
from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from headway.simulator.report import percentile
from tests.identity.writing import entry, key_of
from tests.promises.checker import check
from tests.promises.client import Door, Standing
from tests.promises.crowd import Crowd
from tests.promises.faults import Fault
from tests.promises.journal import runs_in
from tests.promises.operation import History, Kind

ZONES = ("zone-0", "zone-1", "zone-2")
HOSTS = 2
SPANS = ((-8.0, 0.0), *((at / 2, at / 2 + 0.5) for at in range(8)), (4.0, 6.0), (6.0, 10.0), (10.0, 20.0))
"""Seconds after the loss, of which latencies are told."""
BATCH_MS, MAX_PLAIN, WITHIN = 100.0, 32, 3.0
"""Batches of the plain load: milliseconds of each, most entries; seconds within which P95 ought to be back."""
SETTLE = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description="A zone of three is killed under load, and the history checked.")
    parser.add_argument("--calm", type=float, default=15.0, help="seconds of load before (default %(default)g)")
    parser.add_argument("--after", type=float, default=25.0, help="and after (default %(default)g)")
    parser.add_argument("--rate", type=float, default=120.0, help="operations a second (default %(default)g)")
    parser.add_argument("--plain", type=float, default=300.0, help="plain requests a second (default %(default)g)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    options = parser.parse_args()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "lost_zone", rate=options.rate, seed=options.seed, zones=len(ZONES), worker_hosts=HOSTS * len(ZONES),
        max_batch=MAX_BATCH, pinning=stand.PINNING,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="headway-bench-zones-") as name:
        folder = Path(name)
        limit = f"rate = {CAPPED[0] * 60}\nburst = {CAPPED[1]}\n"
        keys = (entry(tenant, tenant, tenant, more=limit if tenant == TENANTS[-1] else "") for tenant in TENANTS)
        (folder / "keys.toml").write_text("".join(keys))
        with (
            fleet.fleet(
                TARGET, "--max-batch-size", str(MAX_BATCH), name="lost-zone", gateways=len(ZONES), workers=HOSTS * len(ZONES),
                controllers=1, keep="always", gateway_flags=_flags(folder), worker_flags=("--workers", "1"),
                environment=_environment(folder), grpc=True, zones=ZONES,
            ) as made,
            asyncio.Runner(loop_factory=loop_factory) as runner,
        ):  # fmt: skip
            crowd, lost_at, crossed = runner.run(_drive(made, options))
            left = runner.run(_settled(made))
            crowd.history.runs = runs_in(folder / "journal")
            _tell(findings, crowd.history, lost_at, crossed, left)
            made.stop()
    _plain(findings, options)
    return findings.close()


def _plain(findings: Findings, options: argparse.Namespace) -> None:
    """The loss under a plain load."""
    with fleet.emulated(
        BATCH_MS, MAX_PLAIN, hosts=HOSTS * len(ZONES), gpus=1,
        name="lost-zone-plain", gateway_flags=("--request-timeout-ms", "10000", "--queue-timeout-ms", "8000"), gateways=len(ZONES), controllers=1, zones=ZONES,
    ) as made:  # fmt: skip
        load = asyncio.run(Plain(made).run(options.plain, options.calm, options.after))
    rows: list[dict[str, object]] = []
    p95: dict[tuple[float, float], float] = {}
    for since, until in SPANS:
        took = sorted(1000 * seconds for at, seconds, status, _ in load if status == 200 and since <= at < until)
        rows.append({"asked, s": f"{since:g} to {until:g}", "answers": len(took), **_shares(took)})
        p95[since, until] = percentile(took, 0.95)
    findings.table(f"Plain load of {options.plain:g}/s, by when it was asked after the loss; latency in ms", rows)
    late = [until for (since, until), seconds in p95.items() if since >= 0 and seconds > 1.5 * p95[SPANS[0]]]
    findings.at_most("seconds until P95 is within 1.5 times that before", max(late, default=0.0), WITHIN, "s")
    statuses = Counter(status for _, _, status, _ in load)
    findings.say(
        f"{len(load):,} plain requests: {dict(statuses)}; {sum(again for *_, again in load)} asked again elsewhere."
    )
    findings.none("plain requests with neither an answer nor a refusal", statuses[0])


def _shares(took: Sequence[float]) -> dict[str, float]:
    return {f"p{share * 100:g}": percentile(took, share) for share in (0.5, 0.95, 0.99)}


class Plain:
    """Plain clients, open-loop and Poisson, dealt out to the gateways.

    Arguments:
        made: the fleet.
    """

    def __init__(self, made: Fleet) -> None:
        self._made, self._rng = made, random.Random(1)
        self._doors = [(server.zone, server.url) for server in made.gateways]
        self._found: list[tuple[float, float, int, int]] = []
        self._lost_at = math.inf

    async def run(self, rate: float, calm: float, after: float) -> list[tuple[float, float, int, int]]:
        """Ask for `calm` seconds, lose a zone, and ask on for `after` seconds.

        Returns of each request the instant after the loss, the seconds, the status (0: none), and how often it was asked again.
        """
        loop = asyncio.get_running_loop()
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            due, lose_at = loop.time(), loop.time() + calm
            while (due := due + self._rng.expovariate(rate)) < lose_at + after:
                await asyncio.sleep(max(due - loop.time(), 0.0))
                if due > lose_at and self._lost_at == math.inf:
                    self._lost_at = loop.time()
                    tasks.create_task(self._lose())
                tasks.create_task(self._ask(session, loop.time()))
        return [(at - self._lost_at, seconds, status, again) for at, seconds, status, again in self._found]

    async def _lose(self) -> None:
        """Kill a zone. From then on nobody asks there anew, as a balancer sees to."""
        gone = [server for server in self._made.every() if server.zone == ZONES[-1]]
        self._doors = [(zone, url) for zone, url in self._doors if zone != ZONES[-1]]
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in gone))
        for roster in (self._made.gateways, self._made.workers):
            roster[:] = [server for server in roster if server not in gone]

    async def _ask(self, session: aiohttp.ClientSession, at: float) -> None:
        header, body = {"Idempotency-Key": uuid.uuid4().hex}, {"input": f"text {at}"}
        status = again = 0
        while not status and again < 5:
            _, url = self._rng.choice(self._doors)
            try:
                async with session.post(f"{url}/v1/inference", json=body, headers=header) as answer:
                    status = answer.status
                    await answer.read()
            except aiohttp.ClientError:
                again += 1
        self._found.append((at, asyncio.get_running_loop().time() - at, status, again))


async def _drive(made: Fleet, options: argparse.Namespace) -> tuple[Crowd, float, tuple[float, float]]:
    """The load, and the loss; then all is asked for once more. Returns the instant of the loss, and batches that crossed."""
    tenants = {tenant: f"Bearer {key_of(tenant)}" for tenant in TENANTS}
    doors = [Door(one.name, urlsplit(one.url).port or 80, grpc=one.grpc_port) for one in made.gateways]
    crowd = Crowd(doors, tenants, options.rate, options.seed)
    crowd.history.limits[TENANTS[-1], None] = CAPPED
    load = asyncio.create_task(crowd.run(options.calm + options.after))
    try:
        await asyncio.sleep(options.calm)
        before = await asyncio.to_thread(_crossed, made)
        zone = ZONES[-1]
        for server, door in zip(made.gateways, doors, strict=True):
            if server.zone == zone:
                door.standing = Standing.KILLED
        gone = [one for one in made.every() if one.zone == zone]
        for role in ("worker", "gateway"):
            whom = next(one.name for one in gone if f"-{role}-" in one.name)
            crowd.history.faults.append(Fault(f"{role} killed", time.monotonic(), whom=whom))
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in gone))
        lost_at = time.monotonic()
        for server in gone:
            for roster in (made.gateways, made.workers):
                if server in roster:
                    roster.remove(server)
        await load
        await crowd.audit()
        after = await asyncio.to_thread(_crossed, made)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return crowd, lost_at, (before, after)


def _crossed(made: Fleet) -> float:
    """Batches that slots of other zones took, of the hosts that will be left."""
    return sum(one.total("headway_zone_help_batches_total") for one in made.workers if one.zone != ZONES[-1])


async def _settled(made: Fleet) -> dict[str, int]:
    """What Redis holds of entries when it has had time to hold nothing."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + SETTLE
    while True:
        left = {kind: count for kind, count in (await asyncio.to_thread(made.redis.remains)).items() if count}
        if not left or loop.time() > patience:
            return left
        await asyncio.sleep(0.2)


def _tell(
    findings: Findings, history: History, lost_at: float, crossed: tuple[float, float], left: dict[str, int]
) -> None:
    findings.table("Batches that slots of other zones took", [{"before": crossed[0], "after": crossed[1] - crossed[0]}])
    got: dict[tuple[str, str], int] = {}
    for one in history.operations:
        key = one.kind.value, _outcome(one.status, one.code, one.lost)
        got[key] = got.get(key, 0) + 1
    findings.table(
        "Outcomes", [{"client": kind, "got": what, "times": times} for (kind, what), times in sorted(got.items())]
    )
    violations = check(history)
    for violation in violations[:5]:
        findings.say(f"  {violation}")
    findings.none("violations of promises in all", len(violations))
    findings.none("answers that never came", sum(one.lost in ("cut", "silent") for one in history.operations))
    tasks = [one for one in history.operations if one.kind is Kind.TASK and one.status == 202]
    findings.say(f"{len(history.operations):,} operations, {len(tasks):,} tasks accepted; {len(history.runs):,} runs.")
    findings.none("left in Redis in the end", sum(left.values()))


if __name__ == "__main__":
    sys.exit(main())
