"""Inputs of a trial: what the user gave, the target's example, or numbered lines of text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from headway.core import tensor_json, values
from headway.core.tensors import rows_of
from headway.errors import SettingError
from headway.model import KIND, Signature, Value, ValueKind

_MOST_CHARS, _MOST_MEMBERS = 60, 4
"""Most characters of a value that is shown, and members of an array in it."""
_HINTS = {
    ValueKind.JSON: "For example --input '{\"a\": 1}'.",
    ValueKind.BYTES: "Write them in base64, for example --input aGVhZHdheQ==.",
    ValueKind.TENSORS: "Write the numbers of a row, or of several, as JSON, for example --input '[1, 2, 3]'.",
}


def choose_inputs(given: Sequence[str], most: int, signature: Signature) -> list[Value]:
    """Inputs of the largest batch for a target with a signature. Where inputs have several rows, the rows fill it.

    Arguments:
        given: inputs of the command line.
        most: size of the largest batch, in rows.
        signature: signature of the target.

    Raises:
        SettingError: what was given is not of its kind, or nothing was given and it has no example.
    """
    chosen = read_inputs(given, most, signature)
    return up_to(most, [chosen[n % len(chosen)] for n in range(most)])


def up_to(most: int, inputs: Sequence[Value]) -> list[Value]:
    """First of some inputs that have no more rows than `most` together; at least one."""
    ends = accumulate(map(rows_of, inputs))
    return [value for place, (value, end) in enumerate(zip(inputs, ends, strict=True)) if not place or end <= most]


def read_inputs(given: Sequence[str], most: int, signature: Signature) -> list[Value]:
    """All inputs to choose from. Takes and raises what `choose_inputs` does."""
    chosen = [_read(text, signature) for text in given]
    for text, value in zip(given, chosen, strict=True):
        if (rows := rows_of(value)) > most:
            hint = "Give fewer rows, or set --max-batch-size higher."
            raise SettingError("--input", text, f"has {rows} rows, and a batch has at most {most}", hint)
    if not chosen and signature.example is not None:
        chosen = [signature.example]
    if not chosen and signature.takes is not ValueKind.TEXT:
        what, hint = KIND[signature.takes].noun, _HINTS[signature.takes]
        raise SettingError("--input", "", f"is needed: the target takes {what} and has no example", hint)
    return chosen or [f"headway check {n}" for n in range(most)]


def read_lines(path: Path | None) -> list[str]:
    """Inputs of a file, one a line. Empty lines are passed over.

    Raises:
        SettingError: it cannot be read, or has none.
    """
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
    """Text of a value in a line of its own, cut where it is long. Of a long array the first members are shown, and how many there are."""
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
        hint = "Write such numbers of a row, or of several, as JSON."  # An example could be what is refused.
    try:
        if signature.takes is ValueKind.JSON:
            return values.read(text.encode())
        if signature.takes is ValueKind.TENSORS:
            return tensor_json.tensors_of(values.read(text.encode()), signature.inputs)
        base64.b64decode(text, validate=True)
    except (ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise SettingError("--input", text, f"is not good for a target that takes {what}: {exc}", hint) from None
    return text
