"""The contract of the public port as an OpenAPI 3.1 document: `contract.json` with the settings that are in force put in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway import errors
from headway.config import Settings
from headway.core.tensor_json import BOUNDS
from headway.core.tensors import BYTES, JSON, MOST_AXES, MOST_TENSORS, SIZES, count_of
from headway.doors.fields import MOST_KEY
from headway.gateway.fan_out import MOST_INPUTS
from headway.http.openai.completions import MOST_CHOICES
from headway.http.openai.members import MOST_MESSAGES, MOST_TEXTS
from headway.http.openai.responses import SETTLED
from headway.http.problem import anchor
from headway.http.tasks import LONGEST_WAIT
from headway.model import ALL_PARAMETERS, MOST_OUTPUT, PerCall, TensorSpec, ValueKind
from headway.oip.tensors import INPUT
from headway.version import __version__

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


class Kinds(NamedTuple):
    """Kinds of the values that a model takes and gives; None while they are not known.

    Attributes:
        takes, gives: the kinds.
        inputs, outputs: specifications of its tensors; empty where it has none, or they are not to be told.
        per_call: parameters that a call of it has once; empty where they are not to be told.
    """

    takes: ValueKind | None
    gives: ValueKind | None
    inputs: Specs = ()
    outputs: Specs = ()
    per_call: PerCall = ()


TEXTS = Kinds(ValueKind.TEXT, ValueKind.TEXT)

_FACT = re.compile(r"\$\{(\w+)\}")
_SCHEMAS = "#/components/schemas/"
_RESPONSES = "#/components/responses/"
_VALUES = frozenset(["TextInput", "TextOutput", "JsonValue", "Octets", "TensorInput", "TensorOutput"])
"""Schemas of values, of which the document has those that its models take or give."""
_OF_BULK = ("File", "FileList", "DeletedFile", "BatchRequest", "Batch", "BatchList")
"""Schemas of bulk jobs, which the document has where these are served."""
_NATIVE = tuple(name for name, code in errors.CODES.items() if code.native)
"""Error codes that an inference route can answer with."""
_COMMON = (
    errors.UNAUTHENTICATED, errors.REQUEST_TIMEOUT, errors.PAYLOAD_TOO_LARGE, errors.HEADERS_TOO_LARGE, errors.RATE_LIMITED,
    errors.SERVICE_OVERLOADED, errors.BAD_REQUEST,
)  # fmt: skip
"""Error codes that any other route with a credential can answer with."""
_UNKNOWN = (errors.UNAUTHENTICATED, errors.FORBIDDEN, errors.NOT_FOUND, errors.SERVICE_OVERLOADED)
"""Error codes of the Open Inference Protocol's routes of one model that run nothing."""


class Example(msgspec.Struct, frozen=True):
    """Request that a service answers with 200.

    Attributes:
        kinds: kinds of the model that it asks.
        input: JSON value of its input; None where none is known that the model takes.
        model: name of the model, where the service has no default; empty where none is to be named.
    """

    kinds: Kinds = TEXTS
    input: Any = "hello"
    model: str = ""


def example_of(kinds: Kinds, own: Any, model: str) -> Example:
    """Example for a model of these kinds. `own`: the JSON value of its target's own example; None for none."""
    made = {ValueKind.TEXT: "hello", ValueKind.BYTES: "aGVsbG8=", None: "hello"}
    if own is None:
        own = zeros(kinds.inputs) if kinds.takes is ValueKind.TENSORS else made.get(kinds.takes)
    return Example(kinds, own, model)


_HELLO = Example()


def document(settings: Settings, *kinds: Kinds, example: Example = _HELLO) -> dict[str, Any]:
    """Contract under `settings`.

    Arguments:
        settings: settings that are in force.
        kinds: kinds of the values that the models take and give, one for each; none: there is one, of texts.
        example: request that works, in every form that it can have.
    """
    models = tuple(dict.fromkeys(kinds)) or (TEXTS,)
    taken = _names((one.takes for one in models), "TextInput", "TensorInput")
    given = _names((one.gives for one in models), "TextOutput", "TensorOutput")
    octets = {one.takes for one in models} == {ValueKind.BYTES}
    tensors = any(ValueKind.TENSORS in (one.takes, one.gives) for one in models)
    numbers = "; the numbers of its rows, little-endian, where it takes one input" if tensors else ""
    settled = _settled(settings)
    contract = msgspec.json.decode(Path(__file__).with_name("contract.json").read_bytes())
    facts = {
        **settled,
        **_refusals(),
        **_examples(settings, example),
        "taken": _any_of(taken),
        "given": _any_of(given),
        "octets_taken": f"The input itself{'' if octets else '; in UTF-8 where the model takes no octets'}{numbers}.",
        "parameters_told": f"Handed to the model as it is.{_of_calls(models)}",
        **_of_tensors(models, settings),
        **protocol_parts(_filled(contract["parts"]["oip_texts"], settled), tensors),
    }
    for name, part in contract["parts"].items():
        facts[name] = _filled(part, facts)
    facts["native_responses"] = _responses("{}", facts["problem"])
    facts["openai_responses"] = _responses("OpenAI_{}", facts["openai_problem"])
    found: dict[str, Any] = _filled(contract["document"], facts)
    unserved = () if settings.bulk_dir else _OF_BULK
    for name in (*_VALUES.difference(taken, given), *unserved):
        del found["components"]["schemas"][name]
    for path in [path for path in found["paths"] if unserved and path.startswith(("/v1/files", "/v1/batches"))]:
        del found["paths"][path]
    return found


def _of_calls(models: Iterable[Kinds]) -> str:
    """Words on the parameters that a call of one of these models has once."""
    found = [one.per_call for one in models if one.per_call]
    if not found:
        return ""
    names = sorted({f"`{name}`" for one in found if one != ALL_PARAMETERS for name in one})
    which = "all of it" if ALL_PARAMETERS in found else ", ".join(names)
    return f" Only requests with equal values of {which} run in one call."


def _filled(value: Any, facts: dict[str, Any]) -> Any:
    """A value of the contract's file with facts for their names.

    "${name}" stands for the fact itself, or for its text within a longer one. The member "..." of an object lists facts whose
    members the object has, too.
    """
    if isinstance(value, str):
        whole = _FACT.fullmatch(value)
        return facts[whole[1]] if whole else _FACT.sub(lambda found: str(facts[found[1]]), value)
    if isinstance(value, list):
        return [_filled(one, facts) for one in value]
    if not isinstance(value, dict):
        return value
    filled: dict[str, Any] = {}
    for name, one in value.items():
        if name != "...":
            filled[name] = _filled(one, facts)
            continue
        for fact in one:
            filled |= facts[fact]
    return filled


def _settled(settings: Settings) -> dict[str, Any]:
    """Facts that are the same as long as the process runs."""
    several = bool(settings.models)
    left_out = "Expected where there are several models, which GET /v1/models lists."
    if settings.default:
        left_out = f"Left out: {'the default model' if _hides_models(settings) else settings.default}."
    served = f"model {settings.model!r}, in batches of up to {settings.max_batch_size}"
    return {
        "version": __version__,
        "models": "several models, which GET /v1/models lists" if several else served,
        "security": [{"key": []}] if settings.keys or settings.jwt else [],
        "codes": [code for code in errors.STATUS if code not in errors.SHOWN],
        "errors": _errors(),
        "text": _TEXT,
        "model_left_out": left_out,
        "only_model": {} if several else {"enum": [settings.model]},
        "only_version": {} if several or not settings.model_version else {"enum": [settings.model_version]},
        "tiers": list(settings.tier_names),
        "most_inputs": min(MOST_INPUTS, settings.max_queue),
        "most_texts": min(MOST_TEXTS, settings.max_queue),
        "most_messages": MOST_MESSAGES,
        "most_choices": MOST_CHOICES,
        "most_parameters": settings.max_parameters,
        "most_output_mib": MOST_OUTPUT >> 20,
        "most_outputs_mib": f"{settings.bodies_bytes / (2 << 20):g}",
        "longest_key": MOST_KEY,
        "longest_wait_s": f"{LONGEST_WAIT:g}",
        "longest_request_ms": f"{settings.longest_request_s * 1000:g}",
        "longest_task_ms": f"{settings.longest_task_s * 1000:g}",
        "bulk_bytes": settings.bulk_max_bytes,
        "bulk_files": settings.bulk_max_files,
        "bulk_jobs": settings.bulk_max_jobs,
        "kept_s": f"{settings.result_ttl_s:g}",
        "settled": {name: {"description": "As the request has it."} for name in SETTLED},
    }


_TEXT = {"type": "string", "pattern": r"^[^\u0000]*$", "description": "Any text without U+0000."}
"""Schema of a text as an input."""


def _refusals() -> dict[str, Any]:
    """Refusals by status, for each kind of route."""
    return {
        "refusals": _by_status("{}", *_NATIVE),
        "task_refusals": _by_status("{}", *_COMMON, errors.NOT_FOUND),
        "openai_refusals": _by_status("OpenAI_{}", *_NATIVE),
        "models_refusals": _by_status("OpenAI_{}", *_COMMON),
        "model_refusals": _by_status("OpenAI_{}", *_COMMON, errors.NOT_FOUND),
        "oip_refusals": _by_status("OipError", *_NATIVE),
        "oip_unauthenticated": _by_status("OipError", errors.UNAUTHENTICATED),
        "oip_unknown": _by_status("OipError", *_UNKNOWN),
        "oip_index_refusals": _by_status("OipError", *_UNKNOWN, errors.BAD_REQUEST),
    }


def _by_status(form: str, *codes: str) -> dict[str, Any]:
    """References to the refusals with error codes, in an API's form; the first code of a status stands for all of them."""
    return {str(errors.STATUS[code]): {"$ref": _RESPONSES + form.format(code)} for code in reversed(codes)}


def _responses(form: str, refusal: dict[str, Any]) -> dict[str, Any]:
    """Refusal with each error code, in an API's form."""
    titles: dict[int, list[str]] = {}
    for code in errors.CODES.values():
        titles.setdefault(code.status, []).append(code.title)
    return {
        form.format(name): {"description": "; or: ".join(titles[code.status]), **refusal}
        for name, code in errors.CODES.items()
    }


def _errors() -> list[dict[str, Any]]:
    """Facts of each error code."""
    return [
        {
            "error": code.shown or name,
            "status": code.status,
            "title": code.title,
            "anchor": anchor(name),
            "when": code.when,
            "retry": not code.hopeless,
        }
        for name, code in errors.CODES.items()
    ]


def _examples(settings: Settings, example: Example) -> dict[str, Any]:
    """Example of each API's request; an object without one where none is known that works."""
    input, kinds = example.input, example.kinds
    takes, gives = kinds.takes, kinds.gives
    text = takes in (ValueKind.TEXT, None) and isinstance(input, str)
    model = {"model": example.model} if example.model else {}
    default = "NAME" if _hides_models(settings) and settings.default else settings.default
    asked = example.model or default
    element = msgspec.json.encode(input).decode() if takes is ValueKind.JSON else input
    tensors: list[dict[str, Any]] | None = [{"name": INPUT, "datatype": BYTES, "shape": [1], "data": [element]}]
    if takes is ValueKind.TENSORS:
        tensors = protocol_inputs(kinds.inputs, input)
    requests = {
        "inference_example": ({**model, "input": input}, True),
        "plain_example": ({"input": input}, not model),
        "predict_example": ({"model_id": asked, "input_data": input}, bool(asked)),
        "prompt_example": ({**model, "prompt": input}, text),
        "chat_example": ({**model, "messages": [{"role": "user", "content": input}]}, text),
        "input_example": ({**model, "input": input}, text),
        "embeddings_example": ({**model, "input": input}, text and gives in (ValueKind.JSON, ValueKind.TENSORS)),
        "oip_example": ({"inputs": tensors}, tensors is not None),
        "oip_default_example": ({"inputs": tensors}, tensors is not None and not model),
    }
    return {name: {"example": one} if works and input is not None else {} for name, (one, works) in requests.items()}


def _hides_models(settings: Settings) -> bool:
    """Whether the contract, which strangers read, names no model, as some of several may be for some credentials only."""
    return bool(settings.models and (settings.keys or settings.jwt))


def _of_tensors(models: Iterable[Kinds], settings: Settings) -> dict[str, Any]:
    """Schemas of tensors that models take and give."""
    models, most = list(models), max(one.max_batch_size for one in settings.served.values())
    return {
        "tensors_taken": schema((one.inputs for one in models if one.takes is ValueKind.TENSORS), most),
        "tensors_given": schema((one.outputs for one in models if one.gives is ValueKind.TENSORS), most),
    }


def _names(kinds: Iterable[ValueKind | None], text: str, tensors: str) -> list[str]:
    """Names of the schemas of kinds, in order. A text is a JSON value, too."""
    known = {ValueKind.JSON: "JsonValue", ValueKind.BYTES: "Octets", ValueKind.TENSORS: tensors}
    found = {text if kind is None else known.get(kind, text) for kind in kinds}
    return ["JsonValue"] if "JsonValue" in found else sorted(found)


def _any_of(names: list[str]) -> dict[str, Any]:
    parts = [{"$ref": _SCHEMAS + name} for name in names]
    return {"anyOf": parts} if len(parts) > 1 else parts[0]


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
