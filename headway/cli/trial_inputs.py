"""Inputs of a trial: from the command line, the target's example, or numbered texts."""

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
"""Most characters that are shown of a value, and most members of an array."""
_HINTS = {
    ValueKind.JSON: "For example --input '{\"a\": 1}'.",
    ValueKind.BYTES: "Write them in base64, for example --input aGVhZHdheQ==.",
    ValueKind.TENSORS: "Write the numbers of a row, or of several, as JSON, for example --input '[1, 2, 3]'.",
}


def choose_inputs(given: Sequence[str], largest: int, signature: Signature) -> list[Value]:
    """Return the inputs of the largest batch, made from those given on the command line, or else from the target's example.

    `largest` counts rows if inputs have several. Raises SettingError if an input is of the wrong kind, or there is none.
    """
    chosen = read_inputs(given, largest, signature)
    return up_to(largest, [chosen[n % len(chosen)] for n in range(largest)])


def up_to(largest: int, inputs: Sequence[Value]) -> list[Value]:
    """Return the first inputs whose rows together are at most `largest`; at least one input."""
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
    """Format a value for one line: a long one is cut, and of a long array only the first members and the length are shown."""
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
