"""Inputs of a trial, from the command line, the target's example, or numbered texts; and the batches that --record times."""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import msgspec

from headway.core import tensor_json, values
from headway.core.tensors import rows_of
from headway.errors import SettingError
from headway.model import KIND, Signature, Value, ValueKind
from headway.simulator.batch_times import BatchTimes, RecordedBatch

ROUND = 72
"""Recorded batches for each repeat: a multiple of 24, so that each mixture gets each size equally often."""
FULL_EVERY = 4
"""Every fourth recorded batch has the largest size, which is the most frequent under load."""
MIXTURES = (None, 0, None, 1, None, 2)
"""Thirds of the inputs by weight that recorded batches take, in turn; None for all inputs."""
POOR = 0.1
"""Relative error above which a recording is called a poor guide."""
_MOST_CHARS, _MOST_MEMBERS = 60, 4
_HINTS = {
    ValueKind.JSON: "For example --input '{\"a\": 1}'.",
    ValueKind.BYTES: "Write them in base64, for example --input aGVhZHdheQ==.",
    ValueKind.TENSORS: "Write the numbers of a row, or of several, as JSON, for example --input '[1, 2, 3]'.",
}


def choose_inputs(given: Sequence[str], largest: int, signature: Signature) -> list[Value]:
    """Return the inputs of the largest batch, made from the given texts or else from the target's example. `largest` counts rows if
    an input can have several. Raises SettingError if an input is of the wrong kind, or there is none."""
    chosen = read_inputs(given, largest, signature)
    return up_to(largest, [chosen[n % len(chosen)] for n in range(largest)])


def up_to(largest: int, inputs: Sequence[Value]) -> list[Value]:
    """Return the first inputs that together have at most `largest` rows, but at least one input."""
    ends = accumulate(map(rows_of, inputs))
    return [value for place, (value, end) in enumerate(zip(inputs, ends, strict=True)) if not place or end <= largest]


def read_inputs(given: Sequence[str], largest: int, signature: Signature) -> list[Value]:
    """Return all inputs to choose from; see `choose_inputs`."""
    chosen = [_read(text, signature) for text in given]
    for text, value in zip(given, chosen, strict=True):
        if (rows := rows_of(value)) > largest:
            hint = "Give fewer rows, or set --max-batch-size higher."
            raise SettingError("--input", text, f"has {rows} rows, and a batch has at most {largest}", hint)
    if not chosen and signature.example is not None:
        chosen = [signature.example]
    if not chosen and signature.takes is not ValueKind.TEXT:
        what, hint = KIND[signature.takes].noun, _HINTS[signature.takes]
        raise SettingError("--input", "", f"is needed: the target takes {what} and has no example", hint)
    return chosen or [f"headway check {n}" for n in range(largest)]


def read_lines(path: Path | None) -> list[str]:
    """Return the lines of a file, without empty ones. Raises SettingError if it cannot be read, or has none."""
    if path is None:
        return []
    hint = "Name a text file with one input a line."
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as exc:
        raise SettingError("--inputs", str(path), f"cannot be read: {exc.strerror}", hint) from None
    except UnicodeDecodeError:
        raise SettingError("--inputs", str(path), "is not UTF-8 text", "Save it as UTF-8.") from None
    if not lines:
        raise SettingError("--inputs", str(path), "has no input", hint)
    return [line.removesuffix("\r") for line in lines]


def brief(value: Value) -> str:
    """Format a value for one line. Cut a long value, and show only the first members of a long array."""
    text = value if isinstance(value, str) else _brief(values.build(value))
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_brief(name)}: {_brief(member)}' for name, member in value.items())}}}"
    if isinstance(value, list):
        shown = ", ".join(map(_brief, value[:_MOST_MEMBERS]))
        return f"[{shown}]" if len(value) <= _MOST_MEMBERS else f"[{shown}, … {len(value):,} in all]"
    return f"{value:.6g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


def _read(text: str, signature: Signature) -> Value:
    if signature.takes is ValueKind.TEXT:
        return text
    what, hint = KIND[signature.takes].noun, _HINTS[signature.takes]
    if signature.takes is ValueKind.TENSORS:
        hint = "Write such numbers of a row, or of several, as JSON."  # The example in _HINTS may be what was refused.
    try:
        if signature.takes is ValueKind.JSON:
            return values.read(text.encode())
        if signature.takes is ValueKind.TENSORS:
            return tensor_json.tensors_of(values.read(text.encode()), signature.inputs)
        base64.b64decode(text, validate=True)
    except (ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise SettingError("--input", text, f"is not good for a target that takes {what}: {exc}", hint) from None
    return text


def weight(value: Value) -> int:
    """Return the weight of an input or of each of its rows, in characters, or in octets if it isn't a text."""
    return max(1, len(value) // rows_of(value))


def weights_of(batch: Sequence[Value]) -> list[int]:
    """Return the weights of all rows in a batch. An input without rows counts as one."""
    return [weight(value) for value in batch for _ in range(rows_of(value))]


def batches_to_record(given: Sequence[str], largest: int, repeats: int, signature: Signature) -> Iterator[list[Value]]:
    """Yield `repeats` rounds of ROUND batches of up to `largest` rows, made from the given texts. Batches of all sizes, with short,
    middling and long inputs, come in random order, so that a machine that slows down affects all kinds alike."""
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
        hint = "more --repeats make it better, unless times vary by chance"
        notes.append(f"the time of a recorded batch follows from the others to {error:.0%} only; {hint}")
    return notes


@contextmanager
def writing(path: Path | None) -> Iterator[list[RecordedBatch]]:
    """Collect batches, and write them to a file at the end, if there are any. Raises SettingError at once for an unusable file."""
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
