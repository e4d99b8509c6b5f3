"""Weights of the versions of a model that change while a fleet is asked, and what came of each version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.stand.findings import Findings
from bench.stand.fleet import Fleet
from tests.promises.operation import History, Weighing, mark_of

LASTS = (8.0, 14.0)
"""Seconds for which weights last: least and most."""
TELL_EVERY = 1.0
"""Seconds after which gateways are told again: one that has just started may have read the file before."""


class Rollout:
    """Weights that are in a file of the gateways', who are told to read it again.

    Arguments:
        folder: where the file is.
        versions: versions of the model, at least two.
        seed: of the dice.

    Attributes:
        file: the file.
    """

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
        """Change the weights, again and again, until cancelled."""
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
    """Tell how much of each version there was to judge."""
    runs = {mark: run for run in history.runs for mark in run.marks()}
    rows = Counter[tuple[str, str]]()
    for one in history.operations:
        ran = {run.version for output in one.answers if (run := runs.get(mark_of(output))) is not None}
        for version in ran or ({one.code or str(one.status)} if one.wanted and one.status else ()):
            rows[one.wanted or "any", version] += 1
    findings.table(
        "Versions",
        [{"named": named, "ran, or refused": got, "times": times} for (named, got), times in sorted(rows.items())],
    )
    told = Counter(telling.source for telling in history.tellings)
    findings.say(
        f"{len(history.weighings)} weighings; versions told by " + ", ".join(f"{who}: {n:,}" for who, n in told.items())
    )
