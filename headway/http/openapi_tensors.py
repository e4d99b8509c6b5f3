"""Parts of the contract on tensors: schemas of the arrays that models take and give, and examples of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headway.core.tensor_json import BOUNDS
from headway.core.tensors import BYTES, JSON, MOST_AXES, MOST_TENSORS, SIZES, count_of
from headway.model import TensorSpec

MOST_ZEROS = 64
"""Most numbers of an example that is made of zeros."""

Specs = tuple[TensorSpec, ...]
"""Specifications of the tensors of one model, in or out; empty where they are not known."""
_ANY: dict[str, Any] = {
    "type": ["array", "object", "number", "boolean", "string"],
    "description": "Nested arrays of numbers, or of texts; several tensors are an object with such by name.",
}
_ANY_DATA: dict[str, Any] = {
    "type": "array",
    "description": "The elements, nested by the shape or one after the other.",
}


def schema(models: Iterable[Specs], most_rows: int) -> dict[str, Any]:
    """Schema of tensors as native JSON has them: one row, or an array of rows; several tensors as an object.

    Arguments:
        models: specifications of each model.
        most_rows: most rows.
    """
    found = [one for specs in dict.fromkeys(models) for one in _of_model(specs, most_rows)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def protocol_parts(texts: dict[str, Any], tensors: bool) -> dict[str, Any]:
    """Parts of the schemas of the Open Inference Protocol that depend on whether a model has tensors.

    Arguments:
        texts: schema of the data of an input or output of texts.
        tensors: whether there is such a model.
    """
    if not tensors:
        each = {"type": "array", "items": {**texts, "maxItems": 1}, "minItems": 1, "maxItems": texts["maxItems"]}
        return {
            "oip_datatypes": [BYTES],
            "oip_most_tensors": 1,
            "oip_shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2},
            "oip_data": {"oneOf": [texts, each], "description": "One text for each element."},
            "oip_told": texts,
            "oip_wanted": {"type": "string", "enum": ["OUTPUT"]},
            "oip_outputs": "OUTPUT, or nothing. Its parameter binary_data asks for the binary form.",
        }
    axes = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MOST_AXES}
    return {
        "oip_datatypes": [one for one in SIZES if one != JSON],
        "oip_most_tensors": MOST_TENSORS,
        "oip_shape": {**axes, "description": "The first axis is that of the rows."},
        "oip_data": _ANY_DATA,
        "oip_told": _ANY_DATA,
        "oip_wanted": {"type": "string"},
        "oip_outputs": "Outputs that are wanted; nothing: all. The parameter binary_data of one asks for its binary form.",
    }


def zeros(specs: Specs) -> Any:
    """One row of zeros as native JSON has it; None where that is long, or nothing is known."""
    if not specs or sum(count_of(_row(one)) for one in specs) > MOST_ZEROS:
        return None
    rows = {one.name: _nested(_row(one), _zero(one)) for one in specs}
    return rows if len(rows) > 1 else rows[specs[0].name]


def protocol_inputs(specs: Specs, value: Any) -> list[dict[str, Any]] | None:
    """Inputs of the Open Inference Protocol for a value as native JSON has it; None where nothing is known.

    Arguments:
        specs: specifications of the model's inputs.
        value: one row or several, of one input or by name.
    """
    given = value if isinstance(value, dict) else {one.name: value for one in specs[:1]}
    if not specs or any(one.name not in given for one in specs):
        return None
    found = []
    for one in specs:
        data, shape = given[one.name], _shape(given[one.name])
        if len(shape) == len(one.shape):
            data, shape = [data], (1, *shape)
        found.append({"name": one.name, "datatype": one.datatype, "shape": list(shape), "data": data})
    return found


def _of_model(specs: Specs, most_rows: int) -> Iterator[dict[str, Any]]:
    if not specs:
        yield _ANY
        return
    several = {"minItems": 1, "maxItems": most_rows}
    if len(specs) == 1:
        row = _schema_of_row(specs[0].shape, specs[0])
        yield {**row, "description": f"One row, {specs[0].datatype}."}
        yield {"type": "array", **several, "items": row, "description": f"Rows, {specs[0].datatype}."}
        return
    rows = {one.name: _schema_of_row(one.shape, one) for one in specs}
    yield _object(rows, "One row of each.")
    yield _object(
        {name: {"type": "array", **several, "items": row} for name, row in rows.items()}, "As many rows of each."
    )


def _object(members: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "object", "required": [*members], "properties": members, "description": description}


def _schema_of_row(shape: Sequence[int], spec: TensorSpec) -> dict[str, Any]:
    if not shape:
        return _schema_of_element(spec.datatype)
    bounds = {} if shape[0] < 0 else {"minItems": shape[0], "maxItems": shape[0]}
    return {"type": "array", **bounds, "items": _schema_of_row(shape[1:], spec)}


def _schema_of_element(datatype: str) -> dict[str, Any]:
    if datatype in BOUNDS:
        least, most = BOUNDS[datatype]
        return {"type": "integer" if "INT" in datatype else "number", "minimum": least, "maximum": most}
    return {"type": {"BOOL": "boolean", BYTES: "string"}.get(datatype, "number")}


def _row(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(1 if axis < 0 else axis for axis in spec.shape)


def _zero(spec: TensorSpec) -> Any:
    return {"BOOL": False, BYTES: "hello"}.get(spec.datatype, 0)


def _nested(shape: Sequence[int], element: Any) -> Any:
    return [_nested(shape[1:], element) for _ in range(shape[0])] if shape else element


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()
