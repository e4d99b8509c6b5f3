"""Values in the contract: a schema for each kind, what models of several kinds have in common, and an example that works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.config import Settings
from headway.model import ValueKind

Kinds = tuple[ValueKind | None, ValueKind | None]
"""Kinds of the values that a model takes and gives; None while they are not known."""
TEXTS: Kinds = (ValueKind.TEXT, ValueKind.TEXT)

_NO_NUL = r"^[^\u0000]*$"
_NO_CONTROL = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
_JSON = {"description": "Any JSON value without U+0000, as the model takes or gives it."}
_OCTETS = {"type": "string", "contentEncoding": "base64", "description": "Octets in base64."}


@dataclass(frozen=True, slots=True)
class Example:
    """Request that a service answers with 200.

    Attributes:
        kinds: kinds of the model that it asks.
        input: JSON value of its input; None where none is known that the model takes.
        model: name of the model, where the service has no default; empty where none is to be named.
    """

    kinds: Kinds = TEXTS
    input: Any = "hello"
    model: str = ""

    def of(self, members: dict[str, Any]) -> dict[str, Any]:
        """Part of a media type with these members as its example, and the model's name where it is needed."""
        return {"example": {**({"model": self.model} if self.model else {}), **members}}

    @property
    def text(self) -> bool:
        """Whether its input is a text for a model that takes texts."""
        return self.kinds[0] in (ValueKind.TEXT, None) and isinstance(self.input, str)


def example_of(kinds: Kinds, own: Any, model: str) -> Example:
    """Example for a model of these kinds. `own`: the JSON value of its target's own example; None for none."""
    made = {ValueKind.TEXT: "hello", ValueKind.BYTES: "aGVsbG8=", None: "hello"}
    return Example(kinds, made.get(kinds[0]) if own is None else own, model)


def kind_schemas(settings: Settings, kinds: Iterable[Kinds]) -> dict[str, Any]:
    """Schemas of the values of models, by name: one for each kind that there is."""
    every = [*kinds]
    names = {*_names((takes for takes, _ in every), "TextInput"), *_names((gives for _, gives in every), "TextOutput")}
    known = {
        "TextInput": text_schema(settings), "TextOutput": {"type": "string", "description": "A text, as the model gives it."},
        "JsonValue": _JSON, "Octets": _OCTETS,
    }  # fmt: skip
    return {name: shape for name, shape in known.items() if name in names}


def input_of(kinds: Iterable[Kinds]) -> dict[str, Any]:
    """Schema of an input of any of the models."""
    return _union(_names((takes for takes, _ in kinds), "TextInput"))


def output_of(kinds: Iterable[Kinds]) -> dict[str, Any]:
    """Schema of an output of any of the models."""
    return _union(_names((gives for _, gives in kinds), "TextOutput"))


def text_schema(settings: Settings) -> dict[str, Any]:
    """Schema of a text as an input."""
    refused = settings.control_chars == "refuse"
    shape: dict[str, Any] = {
        "type": "string",
        "pattern": _NO_CONTROL if refused else _NO_NUL,
        "description": "Any text without U+0000." if not refused else "Any text without control characters.",
    }
    if settings.max_input_chars:
        shape["maxLength"] = settings.max_input_chars
    return shape


def _names(kinds: Iterable[ValueKind | None], text: str) -> list[str]:
    """Names of the schemas of kinds, in order. A text is a JSON value, too."""
    names = {ValueKind.JSON: "JsonValue", ValueKind.BYTES: "Octets"}
    found = {names.get(kind, text) if kind is not None else text for kind in kinds}
    return ["JsonValue"] if "JsonValue" in found else sorted(found)


def _union(names: list[str]) -> dict[str, Any]:
    parts = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return {"anyOf": parts} if len(parts) > 1 else parts[0]
