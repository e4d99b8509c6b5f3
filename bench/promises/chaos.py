"""Everything is killed at random, Redis too, and every promise is checked: no request lost, mixed up or run twice.

    python bench/promises/chaos.py                           ten minutes
    python bench/promises/chaos.py --seconds 60 --seed 7     a first impression; the same random choices as before
    python bench/promises/chaos.py --rate 100 --poison 0.002 some inputs make their batch raise, too
    python bench/promises/chaos.py --keep no                 Redis keeps nothing on disk, so what it forgets isn't held against it
    python bench/promises/chaos.py --large 0.1               more strings are large, and are stored apart from the queue
    python bench/promises/chaos.py --memory                  one service with three GPUs and its broker in memory, instead of the fleet
    python bench/promises/chaos.py --versions 3,4            two versions of the model, whose weights change meanwhile
    python bench/promises/chaos.py --sharing 2               two more worker hosts have three models on a GPU that holds two of them
    python bench/promises/chaos.py --rows                    the model takes tensors of strings, and several inputs are rows of one
    python bench/promises/chaos.py --numbers 2               it takes two tensors of numbers, or 1
    python bench/promises/chaos.py --autoscale               an autoscaler adds and removes workers all the time
    python bench/promises/chaos.py --fitted                  the model pads, and a call has one value of a parameter
    python bench/promises/chaos.py --bulk                    bulk jobs run at the same time

They combine, except for tensors (--rows, --numbers) with --sharing, --fitted or --bulk, and --autoscale with --sharing.

Three gateways, three worker hosts with one emulated GPU each, two controllers, and Redis with its append-only file synced at every write: with
less, a killed Redis may forget what it has acknowledged. Clients of three tenants, one of them limited, send open-loop through all gateways and do
everything that clients do (`tests/promises/crowd.py`). Meanwhile processes of every role, Redis and the ledger's PostgreSQL are killed, terminated
and paused, and an operator drains workers, processes and the machine (`bench/promises/trouble.py`).

At the end every task and key is fetched again, and the whole history is judged (`tests/promises/checker.py`) by what each fault may cost
(`tests/promises/faults.py`). The ledger, counts, dead letters, warnings and what is left in Redis are compared with what clients were told, what ran
and what was done. A drain, or a worker that the autoscaler removes, excuses only a lack of workers. Every bulk job must have ended, and each line of
a completed one must have its own answer or error. With --fitted, no call mixes inputs with different values. The queue must be empty, no lease may
be left, and the registry of every gateway must list exactly the existing GPU processes.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.promises.bulk_clients import BulkClients
from bench.promises.callers import loop_factory
from bench.promises.changes import Growth, Rollout, flags_of_host, flags_of_scaler, report
from bench.promises.collecting import LEDGERS, Ledger, collect, ledger_of, lines_of
from bench.promises.trouble import Trouble
from bench.promises.watches import LATE_SECONDS, RegistryWatch, Witness, stalls_noted
from bench.stand import fleet, lone, stand
from bench.stand.findings import OUT, Findings
from bench.stand.fleet import Fleet
from headway.oip.tensors import INPUT
from tests.identity.writing import entry, key_of
from tests.promises.checker import check
from tests.promises.crowd import Crowd
from tests.promises.journal import runs_in
from tests.promises.numbers_in import CODES_IN, NUMBERS_IN
from tests.promises.operation import History, Kind, Operation, Violation, Weighing
from tests.promises.parameters import figures
from tests.promises.ways_in import MODEL, TENSORS_IN, WAYS_IN

GATEWAYS, HOSTS, CONTROLLERS = 3, 3, 2
MOST_WORKERS = 3
"""Maximum workers of a host with an autoscaler."""
LEAST_CHANGES = 1
"""The autoscaler must want more, and fewer, at least this often."""
RATE = 300.0
BATCH_MS, MAX_BATCH = 50.0, 64
TIMEOUT_MS = 30_000
QUIET_SECONDS = 12.0
"""Seconds of load without trouble at the end, in which workers that are gone leave the registry."""
LAST = 1.0
"""Seconds before its deadline from which a request may be refused as late, because no run would end in time."""
SETTLE_SECONDS = 15.0
THREADS = 32
"""More than there are processes and servers to wait for."""
SHOWN = 5
"""Number of violations of a promise printed verbatim."""
TARGET = f"{stand.ROOT / 'tests' / 'targets' / 'marked.py'}:Marked"
ROWS, *NUMBERS = (TARGET.replace("Marked", name) for name in ("Rows", "Codes", "Numbers"))
BODY_BYTES = 4_000_000
"""A large string as JSON numbers takes several times its own size."""
FITTED = TARGET.replace("Marked", "Fitted")
VALUES = tuple(json.dumps({"t": value}) for value in (1, 1.0, 2, "1", None))
"""Parameters that calls use; 1 and 1.0 may share a call."""
SPREAD = 1_000
"""Maximum extra characters of strings for a model that pads."""
OTHERS = {name: TARGET.replace("Marked", name.title()) for name in ("second", "third")}
"""Targets of the other models."""
TENANTS = "acme", "globex", "capped"
CAPPED = 4.0, 40.0
"""The last tenant's limit for the default model: requests per second and burst. For all models together it is double."""


def main() -> int:
    options = _options()
    stand.end_in_order()
    stand.pin_to_load_core()
    findings = Findings(
        "chaos", seconds=options.seconds, seed=options.seed, rate=options.rate, poison=options.poison,
        gateways=GATEWAYS, worker_hosts=HOSTS, controllers=CONTROLLERS, batch_ms=BATCH_MS, max_batch=MAX_BATCH,
        request_timeout_ms=TIMEOUT_MS, large=options.large, versions=options.versions, autoscale=options.autoscale, bulk=options.bulk, redis="none" if options.memory else options.keep, mean_pause_s=options.every,
        pinning=stand.PINNING,
    )  # fmt: skip
    findings.say(f"{options.seconds:g} s at {options.rate:g}/s, seed {options.seed}; {stand.PINNING}.")
    with tempfile.TemporaryDirectory(prefix="headway-bench-chaos-") as name:
        folder = Path(name)
        rate, burst = CAPPED[0] * 60, CAPPED[1]
        model = f"{{default = {{rate = {rate}, burst = {burst}}}}}"
        limit = f"rate = {2 * rate}\nburst = {2 * burst}\nmodel_limits = {model}\n"
        keys = (entry(tenant, tenant, tenant, more=limit if tenant == TENANTS[-1] else "") for tenant in TENANTS)
        (folder / "keys.toml").write_text("".join(keys))
        versions = options.versions.split(",") if options.versions else []
        rollout = Rollout(folder, versions, options.seed) if len(versions) > 1 else None
        with (
            ledger_of(options.ledger, folder) as ledger,
            _service(folder, options, versions, ledger)
            if options.memory
            else _fleet(folder, options, versions, ledger) as made,
        ):
            history = History()
            if options.rows or options.numbers:
                _await_tensors(made)
            with stalls_noted(made.store, history.faults):
                with asyncio.Runner(loop_factory=loop_factory) as runner:
                    crowd, trouble, witness, growth = runner.run(
                        _drive(made, options, versions, rollout, ledger, history)
                    )
                    rest = runner.run(_settled(made))
                collect(made, history.evidence)
            findings.keep("keys", history.evidence.keys)
            made.stop()
            history.evidence.lines = lines_of(made)
            history.evidence.rows = ledger.rows()
            history.runs = runs_in(folder / "journal")
            if versions:
                report(findings, history)
            _audit(findings, crowd, trouble)
            for path in witness.files:
                findings.say(f"  a request that waited for more than {LATE_SECONDS:g} s: {path}")
            if options.fitted:
                # The model reads only the beginning of a large string, so no line predicts its time.
                if not options.large:
                    findings.at_least("GPU processes that know in the end that the model pads", rest.padding, 1)
                _tell_parameters(findings, history)
            if options.autoscale:
                findings.at_least(
                    "times that the autoscaler wanted more workers", growth.changes["more"], LEAST_CHANGES
                )
                findings.at_least("times that it wanted fewer", growth.changes["fewer"], LEAST_CHANGES)
                findings.say(f"The autoscaler wanted {growth.most} workers at most.")
            _at_rest(findings, made, rest, trouble)
    return findings.close()


def _await_tensors(made: Fleet) -> None:
    """Wait until all gateways know that the model takes tensors. Before that, they take a tensor of strings for several inputs."""
    fields = {"Authorization": f"Bearer {key_of(TENANTS[0])}"}
    for door in made.doors:
        asked = urllib.request.Request(f"{door.url}/v2/models/{MODEL}", headers=fields)
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            with urllib.request.urlopen(asked, timeout=SETTLE_SECONDS) as answer:
                if json.load(answer)["inputs"][0]["name"] != INPUT:
                    break
            time.sleep(0.1)


def _fleet(
    folder: Path, options: argparse.Namespace, versions: Sequence[str], ledger: Ledger
) -> contextlib.AbstractContextManager[Fleet]:
    flags = [*_flags(folder, options), *ledger.flags]
    flags += ["--config", str(folder / "weights.toml")] if versions else []
    hosts = 2 * len(versions) or HOSTS
    scaler = flags_of_scaler(hosts, MOST_WORKERS * hosts) if options.autoscale else ()
    host = flags_of_host(MOST_WORKERS) if options.autoscale else ()
    return fleet.fleet(
        _target(options), "--max-batch-size", str(MAX_BATCH), name="chaos", gateways=GATEWAYS, workers=hosts,
        controllers=CONTROLLERS, keep=options.keep, gateway_flags=flags, worker_flags=("--workers", "1", *host), controller_flags=scaler,
        environment=_environment(folder), grpc=True,
        versions=versions, others=OTHERS if options.sharing else {}, sharing=options.sharing,
    )  # fmt: skip


def _service(
    folder: Path, options: argparse.Namespace, versions: Sequence[str], ledger: Ledger
) -> contextlib.AbstractContextManager[Fleet]:
    flags = ["--max-batch-size", str(MAX_BATCH), "--workers", str(HOSTS), *_flags(folder, options), *ledger.flags]
    flags += flags_of_scaler(1, MOST_WORKERS * HOSTS) if options.autoscale else ()
    version, *_ = versions or [""]
    return fleet.lone_service(
        _target(options), *flags, name="chaos", environment=_environment(folder), grpc=True, version=version,
        others=OTHERS if options.sharing else {},
    )  # fmt: skip


def _target(options: argparse.Namespace) -> str:
    texts = FITTED if options.fitted else TARGET
    return NUMBERS[options.numbers - 1] if options.numbers else ROWS if options.rows else texts


def _flags(folder: Path, options: argparse.Namespace) -> list[str]:
    timeouts = ("--request-timeout-ms", "--queue-timeout-ms", "--task-timeout-ms")
    patience = [word for flag in timeouts for word in (flag, str(TIMEOUT_MS))]
    keys = str(folder / "keys.toml")
    patience += ["--max-body-bytes", str(BODY_BYTES)]
    patience += ["--bulk-dir", str(folder / "jobs")] if options.bulk else []
    return [*patience, "--cache", "--collapse", "--keys", keys, "--user-rate", "0", "--result-ttl-s", "3600"]


def _environment(folder: Path) -> dict[str, str]:
    return {"PROMISES_MS": f"{BATCH_MS:g}", "PROMISES_JOURNAL": str(folder / "journal")}


async def _drive(
    made: Fleet,
    options: argparse.Namespace,
    versions: Sequence[str],
    rollout: Rollout | None,
    ledger: Ledger,
    history: History,
) -> tuple[Crowd, Trouble, Witness, Growth]:
    """Run the load, with trouble until shortly before its end. Then fetch everything again."""
    # Processes waiting for Redis each hold a thread. A small machine has so few that none would be left to restart Redis.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    tenants = {tenant: f"Bearer {key_of(tenant)}" for tenant in TENANTS}
    crowd = Crowd(
        [],
        tenants,
        options.rate,
        options.seed,
        poison=options.poison,
        large=options.large,
        ways=(TENSORS_IN if options.rows else WAYS_IN, CODES_IN, NUMBERS_IN)[options.numbers],
        versions=versions,
        models=list(OTHERS) if options.sharing else [], parameters=VALUES if options.fitted else (),
        spread=SPREAD if options.fitted else 0, history=history,
    )  # fmt: skip
    history.limits |= {(TENANTS[-1], ""): CAPPED, (TENANTS[-1], None): (2 * CAPPED[0], 2 * CAPPED[1])}
    trouble = Trouble(made, crowd.doors, history.faults, history.processes, options.every, options.seed, ledger.server)
    if versions and rollout is None:
        history.weighings.append(Weighing(dict.fromkeys(versions, 1.0), 0.0))
    weighing = asyncio.create_task(rollout.run(made, history) if rollout is not None else asyncio.sleep(0))
    witness = Witness(made, history, OUT)
    growth = Growth(made)
    watch = RegistryWatch(made, history.evidence.sightings)
    beside = [weighing, asyncio.create_task(witness.run()), asyncio.create_task(watch.run())]
    if options.autoscale:
        beside.append(asyncio.create_task(growth.run()))
    load = asyncio.create_task(crowd.run(options.seconds))
    clients = (
        BulkClients(crowd.doors, tenants, history.jobs, options.seed, options.poison, VALUES if options.fitted else ())
        if options.bulk
        else None
    )
    if clients is not None:
        beside.append(asyncio.create_task(clients.run(options.seconds - QUIET_SECONDS)))
    try:
        await trouble.make(max(options.seconds - QUIET_SECONDS, options.seconds / 2))
        await load
        await crowd.audit()
        if clients is not None:
            await clients.audit()
    finally:
        for task in (load, *beside):
            task.cancel()
        ended = await asyncio.gather(load, *beside, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, Exception):
            raise failure
    return crowd, trouble, witness, growth


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left when the clients have gone, and should be nothing.

    Attributes:
        queued: entries in the queue, by the gateway that reports most.
        kept: entries in Redis, by kind.
        endless: large values in Redis that would never expire.
        wrong: descriptions of gateways whose registry differs from reality.
        padding: GPU processes that have learnt that their model pads.
    """

    held: int
    queued: int
    kept: dict[str, int]
    endless: int
    wrong: list[str]
    padding: int = 0

    @property
    def is_nothing(self) -> bool:
        return not (self.held or self.queued or any(self.kept.values()) or self.endless or self.wrong)


async def _settled(made: Fleet) -> Rest:
    """Return what is left, once it is nothing or waiting took too long."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + SETTLE_SECONDS
    while True:
        rest = await asyncio.to_thread(_look, made)
        if rest.is_nothing or loop.time() > patience:
            return rest
        await asyncio.sleep(0.2)


def _look(made: Fleet) -> Rest:
    gpus = sorted(pid for host in made.hosts for pid in fleet.gpu_pids(host))
    held = queued = padding = 0
    wrong: list[str] = []
    for gateway in made.doors:
        health = gateway.ask("/internal/health")
        held += health["pending"]
        queued = max(queued, health["queue_depth"])
        workers = gateway.ask("/internal/workers")["workers"]
        listed = [worker for worker in workers if worker["status"] not in ("offline", "cold")]
        padding = sum((worker.get("cost") or {}).get("shape") == "padded" for worker in listed)
        well = all(worker["status"] == "healthy" for worker in listed)
        if not well or sorted(worker["pid"] for worker in listed) != gpus:
            wrong.append(f"{gateway.name} lists {listed}, there are {gpus}")
    kept, endless = ({}, 0) if made.store is None else (made.redis.remains(), made.redis.endless_values())
    return Rest(held, queued, kept, endless, wrong, padding)


def _audit(findings: Findings, crowd: Crowd, trouble: Trouble) -> None:
    """Print tables of what happened, and check the promises."""
    history = crowd.history
    troubles = Counter(fault.what for fault in history.faults)
    findings.table("Trouble", [{"fault": what, "times": times} for what, times in sorted(troubles.items())])
    outcomes = Counter((operation.kind.value, _outcome(operation)) for operation in history.operations)
    findings.table(
        "Outcomes", [{"client": kind, "got": got, "times": times} for (kind, got), times in sorted(outcomes.items())]
    )
    findings.table("Outputs of requests, ms from the call", [lone.row("", [1000 * s for s in crowd.latencies])])
    if history.jobs:
        _tell_jobs(findings, history)
    findings.keep("faults", history.faults)
    violations = check(history)
    by_promise: dict[str, list[Violation]] = {}
    for violation in violations:
        by_promise.setdefault(violation.promise, []).append(violation)
    for group in by_promise.values():
        for violation in group[:SHOWN]:
            findings.say(f"  {violation}")
    findings.keep("violations", [str(violation) for violation in violations])
    for promise, group in sorted(by_promise.items()):
        findings.none(promise, len(group))
    findings.none("violations of promises in all", len(violations))
    late = _late(history)
    findings.none(f"accepted and not answered within {TIMEOUT_MS / 1000:g} s (504)", len(late))
    for operation in late[:SHOWN]:
        findings.say(f"  too late: {operation}")
    findings.none("processes that ended by themselves, or not in order", trouble.unruly)
    for example in trouble.examples:
        findings.say(f"  {example}")
    refused = sum(operation.status in (429, 503) for operation in history.operations)
    findings.say(
        f"{len(history.operations):,} operations, {len(crowd.latencies):,} outputs at once, {refused:,} refused; "
        f"{len(history.runs):,} runs; {len(history.faults)} troubles, {trouble.refused} drains refused, {trouble.false_starts} starts failed and were "
        "tried again."
    )


def _tell_jobs(findings: Findings, history: History) -> None:
    ended = Counter(job.status for job in history.jobs)
    codes = Counter(code for job in history.jobs for _, code in job.errors)
    findings.table("Bulk jobs", [{"status": status, "jobs": times} for status, times in sorted(ended.items())])
    findings.table("Errors of bulk lines", [{"code": code, "lines": times} for code, times in sorted(codes.items())])
    texts = {text for job in history.jobs for texts in job.lines.values() for text in texts}
    runs = Counter(text for run in history.runs for text in run.inputs if text in texts)
    answers = sum(len(job.answers) for job in history.jobs)
    lines = sum(len(job.lines) for job in history.jobs)
    findings.say(
        f"{lines:,} lines of {len(texts):,} texts, {answers:,} answers, {sum(runs.values()) - len(runs):,} runs again."
    )


def _tell_parameters(findings: Findings, history: History) -> None:
    """Print how many calls there were, and their inputs by parameters."""
    calls, inputs, mixed = figures(history)
    findings.table(
        "Inputs by parameters of their call",
        [{"parameters": values or "none", "inputs": number} for values, number in sorted(inputs.items())],
    )
    findings.none(f"calls with inputs of other parameters, of {calls:,} calls with {inputs.total():,} inputs", mixed)


def _outcome(operation: Operation) -> str:
    return operation.lost or f"{operation.status} {operation.code.lower()}".strip()


def _late(history: History) -> list[Operation]:
    """Return requests that missed their deadline, except those that set a short one themselves."""
    asked = [operation for operation in history.operations if operation.kind is Kind.ASK and operation.status == 504]
    return [late for late in asked if (late.returned or late.called) - late.called >= TIMEOUT_MS / 1000 - LAST]


def _at_rest(findings: Findings, made: Fleet, rest: Rest, trouble: Trouble) -> None:
    findings.keep("rest", rest)
    findings.none("requests held in the end", rest.held)
    findings.none("entries queued in the end", rest.queued)
    for kind in ("leased", "waiting", "suspect", "payloads", "bulk") if made.store is not None else ():
        findings.none(f"{kind}: left in Redis in the end", rest.kept.get(kind, 0))
    findings.none("large values in Redis without an end", rest.endless)
    findings.none("gateways whose registry is wrong", len(rest.wrong))
    findings.none("GPU processes that outlived their killed host", len(trouble.orphans()))
    for line in rest.wrong:
        findings.say(f"  {line}")
    findings.none("exit codes other than 0 in the end", sum(bool(server.exit_code) for server in made.every()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random kills of every role and of Redis, and the history checked.")
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="of load (default %(default)g)")
    add("--seed", type=int, default=secrets.randbelow(1 << 31), help="of all dice (default: a new one)")
    add("--rate", type=float, default=RATE, help="operations a second (default %(default)g)")
    add("--keep", choices=("always", "everysec", "no"), default="always", help="when Redis syncs its append-only file")
    add("--ledger", choices=LEDGERS, default=LEDGERS[0], help="of all requests (default %(default)s)")
    add("--sharing", type=int, default=0, help="more hosts, with several models; with --memory, 1 for the service")
    add("--memory", action="store_true", help="one service with its broker in memory")
    poison = "share of the inputs that make their batch raise; 0.002 goes with --rate 100, as the search takes GPU time"
    add("--poison", type=float, default=0.0, help=poison)
    add("--versions", default="", help="versions of the model, such as 3,4; one with --memory")
    add("--rows", action="store_true", help="the model takes tensors, and several inputs are its rows")
    add("--numbers", type=int, default=0, choices=(1, 2), help="tensors of numbers that the model takes")
    add("--autoscale", action="store_true", help="workers come and go by an autoscaler")
    add("--fitted", action="store_true", help="the model pads, and its calls have parameters")
    add("--bulk", action="store_true", help="bulk jobs run beside")
    add("--large", type=float, default=0.02, help="share of large texts (default %(default)g)")
    add("--every", type=float, default=2.5, help="mean seconds between troubles (default %(default)g)")
    options = parser.parse_args()
    if (options.bulk or options.fitted) and (options.rows or options.numbers):
        parser.error("--bulk and --fitted are of texts; leave out --rows and --numbers")
    return options


if __name__ == "__main__":
    sys.exit(main())
