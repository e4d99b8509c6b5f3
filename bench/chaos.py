"""Everything is killed at random, Redis too, and the history is checked: none lost, none mixed up, none answered twice.

    python bench/chaos.py                           ten minutes
    python bench/chaos.py --seconds 60 --seed 7     a first impression; the same dice as before

Three gateways, three worker hosts with a GPU made of sleep each, two controllers, and Redis with its append-only file
brought to disk at every write (`appendfsync always`): with less, a killed Redis may forget what it has acknowledged.
500 requests/s come open-loop through all gateways, as through a load balancer that asks no gateway which is gone.
Meanwhile processes of every role are killed (SIGKILL), told to end (SIGTERM) and paused (SIGSTOP, SIGCONT), GPU
processes and Redis are killed and paused; each is replaced after a random pause. One gateway and one worker host are
always left in peace.

Whose gateway was killed sees its connection reset, and is owed nothing. Every other request that was sent has exactly
one outcome, and a right answer is the one to its own text. Refusals while Redis is away are outcomes, and counted. In
the end the queue is empty, no lease is left, and the registry of every gateway names the GPU processes there are.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import fleet
import lone
import stand
from callers import Callers, History
from crowd import loop_factory
from findings import Findings
from fleet import Fleet
from trouble import Trouble

GATEWAYS, HOSTS, CONTROLLERS = 3, 3, 2
RATE = 500.0
BATCH_MS, MAX_BATCH = 50.0, 64
TIMEOUT_MS = 30_000
QUIET_SECONDS = 12.0
"""Load without trouble at the end; a worker that is gone leaves the registry within it."""
SETTLE_SECONDS = 15.0


def main() -> int:
    options = _options()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "chaos", seconds=options.seconds, seed=options.seed, rate=RATE, gateways=GATEWAYS, worker_hosts=HOSTS,
        controllers=CONTROLLERS, batch_ms=BATCH_MS, max_batch=MAX_BATCH, request_timeout_ms=TIMEOUT_MS,
        redis="appendonly yes, appendfsync always", mean_pause_s=options.every, pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.seconds:g} s at {RATE:g}/s, seed {options.seed}; {stand.PINNING}.")
    patience = ("--request-timeout-ms", str(TIMEOUT_MS), "--queue-timeout-ms", str(TIMEOUT_MS))
    with fleet.emulated(
        BATCH_MS, MAX_BATCH, hosts=HOSTS, gpus=1, name="chaos", gateways=GATEWAYS, controllers=CONTROLLERS,
        keep="always", gateway_flags=patience,
    ) as made:  # fmt: skip
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            history, trouble = runner.run(_drive(made, options.seconds, options.every, options.seed))
            rest = runner.run(_settled(made))
        _audit(findings, history, trouble)
        _at_rest(findings, made, rest, trouble)
    return findings.close()


async def _drive(made: Fleet, seconds: float, every: float, seed: int) -> tuple[History, Trouble]:
    """The load, with trouble until shortly before its end."""
    callers = Callers(RATE, seed)
    trouble = Trouble(made, callers, every, seed)
    load = asyncio.create_task(callers.run(seconds))
    try:
        await trouble.make(max(seconds - QUIET_SECONDS, seconds / 2))
        return await load, trouble
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left when the clients have gone, and should be nothing.

    Attributes:
        held: requests that gateways hold.
        queued: entries in the queue, as the gateway says that says most.
        kept: what Redis holds of entries, by kind.
        wrong: gateways whose registry differs from what there is, in words.
    """

    held: int
    queued: int
    kept: dict[str, int]
    wrong: list[str]

    @property
    def is_nothing(self) -> bool:
        """Whether all is as it should be."""
        return not (self.held or self.queued or any(self.kept.values()) or self.wrong)


async def _settled(made: Fleet) -> Rest:
    """What is left: waits until it is nothing, or too long."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + SETTLE_SECONDS
    while True:
        rest = await asyncio.to_thread(_look, made)
        if rest.is_nothing or loop.time() > patience:
            return rest
        await asyncio.sleep(0.2)


def _look(made: Fleet) -> Rest:
    gpus = sorted(pid for worker in made.workers for pid in fleet.gpu_pids(worker))
    held = queued = 0
    wrong: list[str] = []
    for gateway in made.gateways:
        health = gateway.ask("/internal/health")
        held += health["pending"]
        queued = max(queued, health["queue_depth"])
        listed = [one for one in gateway.ask("/internal/workers")["workers"] if one["status"] != "offline"]
        if sorted(one["pid"] for one in listed) != gpus or any(one["status"] != "healthy" for one in listed):
            wrong.append(f"{gateway.name} lists {listed}, there are {gpus}")
    return Rest(held, queued, made.redis.remains(), wrong)


def _audit(findings: Findings, history: History, trouble: Trouble) -> None:
    """Tables of what happened, and the laws."""
    events = sorted((event.role, event.what) for event in trouble.events)
    findings.table(
        "Trouble",
        [{"role": role, "what": what, "times": len(list(group))} for (role, what), group in groupby(events)],
    )
    outcomes = history.outcomes
    total = len(history.requests)
    findings.table(
        "Outcomes",
        [
            {"outcome": outcome or "none", "requests": count, "%": 100 * count / total}
            for outcome, count in outcomes.most_common()
        ],
    )
    findings.table("Right answers, ms from the due instant", [lone.row("", [1000 * s for s in history.latencies])])
    findings.keep("events", trouble.events)
    findings.keep("failures_by_second", _by_second(history))
    for example in [*history.examples, *trouble.examples]:
        findings.say(f"  {example}")
    findings.none("requests without an outcome", outcomes[""])
    findings.none("requests never answered", outcomes["silent"])
    findings.none("connections closed instead of an answer, by gateways that were not killed", outcomes["cut"])
    findings.none("gateways in peace that took no connection", outcomes["unreachable"] + outcomes["nowhere"])
    findings.none("answers that belong to another request", outcomes["wrong"])
    findings.none("requests with two outcomes, and answers nobody asked for", history.twice + history.unasked)
    late = sum(count for outcome, count in outcomes.items() if outcome.startswith("504"))
    findings.none(f"accepted and not answered within {TIMEOUT_MS / 1000:g} s (504)", late)
    findings.none("errors of the service itself (500)", sum(n for name, n in outcomes.items() if name[:3] == "500"))
    findings.none("processes that ended by themselves, or not in order", trouble.unruly)
    findings.say(
        f"{total:,} requests, {outcomes['ok']:,} answered; {len(trouble.events)} troubles, "
        f"{history.moved:,} requests taken to another gateway before they were sent, "
        f"{trouble.false_starts} starts failed and were tried again."
    )


def _at_rest(findings: Findings, made: Fleet, rest: Rest, trouble: Trouble) -> None:
    findings.keep("rest", rest)
    findings.none("requests held in the end", rest.held)
    findings.none("entries queued in the end", rest.queued)
    for kind in ("leased", "waiting", "suspect", "payloads"):
        findings.none(f"{kind}: left in Redis in the end", rest.kept.get(kind, 0))
    findings.none("gateways whose registry is wrong", len(rest.wrong))
    findings.none("GPU processes that outlived their killed host", len(trouble.orphans()))
    for line in rest.wrong:
        findings.say(f"  {line}")
    made.stop()
    findings.none("exit codes other than 0 in the end", sum(bool(server.exit_code) for server in made.every()))


def _by_second(history: History) -> dict[int, dict[str, int]]:
    """Outcomes other than `ok` by the second in which they fell due."""
    start = history.requests[0].due if history.requests else 0.0
    found: dict[int, Counter[str]] = {}
    for request in history.requests:
        if request.outcome != "ok":
            found.setdefault(int(request.due - start), Counter())[request.outcome] += 1
    return {second: dict(counts) for second, counts in found.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random kills of every role and of Redis, and the history checked.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of load (default %(default)g)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    parser.add_argument("--every", type=float, default=2.5, help="mean seconds between troubles (default %(default)g)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
