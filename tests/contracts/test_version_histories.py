"""Histories of random rollouts on every broker. The checker of promises must notice when a feature is switched off.
HEADWAY_TEST_ROLLOUT_SECONDS is how long each rollout runs on the broker's clock, HEADWAY_TEST_ROLLOUT_SEED the seed."""

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from headway.core import dedup
from headway.gateway.served_model import VersionChoice
from headway.model import BatchRun
from headway.worker import helping
from tests.contracts.brokers import Harness, MemoryHarness
from tests.contracts.rollout import rollout
from tests.promises.checker import check
from tests.promises.operation import mark_of

SECONDS = float(os.environ.get("HEADWAY_TEST_ROLLOUT_SECONDS", "0"))
SEED = int(os.environ.get("HEADWAY_TEST_ROLLOUT_SEED", "1"))
TELLING = 3
"""Seed of a history in which each switched-off promise is noticed."""
LONG, SHORT = 20.0, 10.0
"""Seconds in memory, and on a server, where they take longer."""


def test_a_rollout_keeps_its_promises_whatever_the_weights_and_whoever_leaves(harness: Harness) -> None:
    seconds = SECONDS or (LONG if isinstance(harness, MemoryHarness) else SHORT)
    history = rollout(harness, SEED, seconds)
    violations = check(history)
    assert not violations, "\n".join(map(str, violations[:5]))
    runs = {mark: run for run in history.runs for mark in run.marks()}
    ran = Counter((one.wanted, runs[mark_of(output)].version) for one in history.operations for output in one.answers)
    assert min(ran["", "3"], ran["", "4"]) > seconds / 2
    assert min(ran["3", "3"], ran["4", "4"]) > 0


Patch = Callable[[pytest.MonkeyPatch], None]


def _weights_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    patch.setattr(
        VersionChoice, "version", lambda choice, tenant, id, options, several: options.version or dice.choice("34")
    )


def _helpers_run_what_names_another_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(helping, "run_batch", lambda backend, lease, timeout: backend.run(lease.entries, timeout))


def _answers_tell_what_waited_and_not_what_ran(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "headway.brokers.memory.broker.run_of",
        lambda lease, departure, worker, now: BatchRun(worker, 1, 0.1, now, lease.slot.version),
    )


def _a_key_is_of_its_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dedup.Dedup, "_key", lambda _, entry, one: (entry.tenant, one.kind, f"{entry.queue} {one.key}"))


@pytest.mark.parametrize(
    ("switched_off", "promises"),
    [
        (_weights_are_not_looked_at, {"a version that drains runs a new request"}),
        (_helpers_run_what_names_another_version, {"a request that names a version is answered by another"}),
        (
            _answers_tell_what_waited_and_not_what_ran,
            {"an answer tells another version than ran it", "the ledger tells another version"},
        ),
        (_a_key_is_of_its_version, {"two outcomes", "second run under a key"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_switched_off_is_missed(
    switched_off: Patch, promises: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    harness = MemoryHarness()
    try:
        assert promises <= {violation.promise for violation in check(rollout(harness, TELLING, LONG))}
    finally:
        harness.close()
