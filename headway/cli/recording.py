"""Batches that `headway check --record` times: of all sizes, with short, middling and long inputs and all of them mixed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headway.cli.trial_inputs import read_inputs, up_to
from headway.core.tensors import rows_of
from headway.errors import SettingError
from headway.model import Signature, Value
from headway.simulator.batch_times import BatchTimes, RecordedBatch

ROUND = 72
"""Batches for each repeat: a multiple of 24, so that each mixture gets each size equally often."""
FULL_EVERY = 4
"""One batch in so many has the largest size, which is the most frequent under load."""
MIXTURES = (None, 0, None, 1, None, 2)
"""Inputs of a batch, in turn: all, or one third of them by weight. Together they are as mixed as the inputs."""
POOR = 0.1
"""Relative error from which a recording is called a poor guide."""


def weight(value: Value) -> int:
    """Return the weight of an input, or of each row in it: its characters, or octets if it isn't a text."""
    return max(1, len(value) // rows_of(value))


def weights_of(batch: Sequence[Value]) -> list[int]:
    """Return the weights of all rows in a batch. An input without rows counts as one."""
    return [weight(value) for value in batch for _ in range(rows_of(value))]


def batches_to_record(
    given: Sequence[str], largest: int, repeats: int, signature: Signature
) -> Iterator[Sequence[Value]]:
    """Yield `repeats` rounds of ROUND batches of up to `largest` rows, made from the inputs given on the command line.

    Their order is random, so that a machine that slows down affects all kinds alike.
    """
    rng = random.Random(0)  # noqa: S311 - the same batches each time
    inputs = sorted(read_inputs(given, largest, signature), key=weight)
    thirds = [inputs[len(inputs) * third // 3 : len(inputs) * (third + 1) // 3] or inputs for third in range(3)]
    count, spread = ROUND * repeats, math.log(largest + 0.5)
    plan = []
    for number in range(count):
        size = largest if number % FULL_EVERY == FULL_EVERY - 1 else round(math.exp((number + 0.5) / count * spread))
        third = MIXTURES[(number + number // FULL_EVERY) % len(MIXTURES)]
        plan.append((min(size, largest), inputs if third is None else thirds[third]))
    rng.shuffle(plan)
    for size, pool in plan:
        yield up_to(size, rng.choices(pool, k=size))


def notes_on(batches: Sequence[RecordedBatch], given: bool) -> list[str]:
    """Return notes on what a recording lacks."""
    notes = []
    times = BatchTimes(batches)
    if not given:
        notes.append("what was recorded are not your inputs: give some as they come with --inputs FILE")
    elif len(set(times.weights)) == 1:
        notes.append("all recorded inputs are of one length: what others take is not in the record")
    if (error := times.error()) > POOR:
        notes.append(
            f"the time of a recorded batch follows from the others to {error:.0%} only; more --repeats make it better, "
            "unless times vary by chance"
        )
    return notes


@contextmanager
def writing(path: Path | None) -> Iterator[list[RecordedBatch]]:
    """Collect batches, and write them to a file at the end if there are any. Raises SettingError at once if it cannot be written."""
    batches: list[RecordedBatch] = []
    if path is None:
        yield batches
        return
    try:
        file = path.open("ab")
    except OSError as exc:
        reason = f"cannot be written: {exc.strerror}"
        raise SettingError("--record", str(path), reason, "Name a file in a directory that is there.") from None
    with file:
        yield batches
        if batches:
            file.truncate(0)
            file.write(b"".join(msgspec.json.encode(batch) + b"\n" for batch in batches))
