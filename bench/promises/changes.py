"""Changes that must do no harm: weights of a model's versions, and the number of workers.

The autoscaler's rules ask for one worker more whenever a request is waiting when they look, and one less if none is. So the number goes up and
down while there is load, and ends at the minimum.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import urllib.error
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from tests.promises.operation import History, Weighing, mark_of

LASTS = (8.0, 14.0)
"""Minimum and maximum seconds between changes of the weights."""
TELL_EVERY = 1.0
"""Seconds between repeated reload requests: a gateway that has just started may have read the old file."""


class Rollout:
    """Weights of versions in a file that gateways are told to reload."""

    def __init__(self, folder: Path, versions: Sequence[str], seed: int) -> None:
        self.file = folder / "weights.toml"
        first, second, *_ = versions
        self._all: list[Mapping[str, float]] = [
            {first: 1.0, second: 1.0}, {first: 95.0, second: 5.0}, {first: 0.0, second: 1.0}, {first: 1.0, second: 0.0},
            {first: 1.0}, {second: 1.0},
        ]  # fmt: skip
        self._rng = random.Random(f"rollout {seed}")
        self._weights = self._all[0]
        self._write()

    async def run(self, made: Fleet, history: History) -> None:
        loop = asyncio.get_running_loop()
        history.weighings.append(Weighing(self._weights, time.monotonic()))
        while True:
            until = loop.time() + self._rng.uniform(*LASTS)
            while loop.time() < until:
                await asyncio.sleep(TELL_EVERY)
                self._tell(made)
            self._weights = self._rng.choice([weights for weights in self._all if weights != self._weights])
            history.weighings.append(Weighing(self._weights, time.monotonic()))
            self._write()
            self._tell(made)

    def _write(self) -> None:
        text = ",".join(f"{version}={weight:g}" for version, weight in self._weights.items())
        new = self.file.with_suffix(".new")
        new.write_text(f'version_weights = "{text}"\n')
        new.replace(self.file)

    def _tell(self, made: Fleet) -> None:
        for gateway in made.gateways:
            with contextlib.suppress(ProcessLookupError):
                if gateway.is_running:
                    os.kill(gateway.pid, signal.SIGHUP)


def report(findings: Findings, history: History) -> None:
    """Print how many requests of each version were judged."""
    runs = {mark: run for run in history.runs for mark in run.marks()}
    rows = Counter[tuple[str, str]]()
    for operation in history.operations:
        ran = {run.version for output in operation.answers if (run := runs.get(mark_of(output))) is not None}
        refusal = operation.code or str(operation.status)
        for version in ran or ({refusal} if operation.wanted and operation.status else ()):
            rows[operation.wanted or "any", version] += 1
    findings.table(
        "Versions",
        [{"named": named, "ran, or refused": got, "times": times} for (named, got), times in sorted(rows.items())],
    )
    sources = Counter(telling.source for telling in history.tellings)
    findings.say(
        f"{len(history.weighings)} weighings; versions told by "
        + ", ".join(f"{who}: {n:,}" for who, n in sources.items())
    )


# Workers.

RULES = [{"queue_above": 0, "for_s": 0.0, "add": 1}, {"utilisation_below": 9.0, "for_s": 0.5, "remove": 1}]
SCALER_LOOKED_AT_EVERY = 0.25


def flags_of_scaler(least: int, most: int) -> Sequence[str]:
    bounds = "--min-workers", str(least), "--max-workers", str(most)
    return "--autoscale", "local", *bounds, "--scale-rules", json.dumps(RULES)


def flags_of_host(most: int) -> Sequence[str]:
    return "--autoscale", "local", "--max-workers", str(most)


class Growth:
    """Records what the autoscaler wanted: how often more and fewer workers, and the maximum."""

    def __init__(self, made: Fleet) -> None:
        self.changes = Counter[str]()
        self.most = 0
        self._made = made

    async def run(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(SCALER_LOOKED_AT_EVERY)
            for server in (self._made.controllers or self._made.services)[:1]:
                try:
                    wanted = (await asyncio.to_thread(server.ask, "/internal/scaling"))["desired"]
                except (OSError, urllib.error.HTTPError, msgspec.DecodeError, KeyError):
                    continue
                if before and wanted != before:
                    self.changes["more" if wanted > before else "fewer"] += 1
                before, self.most = wanted, max(self.most, wanted)
