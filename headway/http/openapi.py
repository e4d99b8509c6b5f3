"""The OpenAPI 3.1 document of the public port: `contract.json`, filled in with the current settings."""

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
from headway.http.openai.chat import MOST_CHOICES
from headway.http.openai.members import MOST_MESSAGES, MOST_TEXTS
from headway.http.openai.responses import SETTLED
from headway.http.problem import anchor
from headway.http.tasks import LONGEST_WAIT
from headway.model import ALL_PARAMETERS, MOST_OUTPUT, PerCall, TensorSpec, ValueKind
from headway.oip.tensors import INPUT
from headway.version import __version__

MOST_ZEROS = 64

Specs = tuple[TensorSpec, ...]
_ANY: dict[str, Any] = {
    "type": ["array", "object", "number", "boolean", "string"],
    "description": "Nested arrays of numbers or strings. Several tensors are an object that maps their names to such arrays.",
}


class Kinds(NamedTuple):
    """Kinds of one model's inputs and outputs, or None if unknown. The other fields are empty if they aren't public."""

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
"""Schemas of values. The document includes only the ones that its models take or return."""
_BULK = ("File", "FileList", "DeletedFile", "BatchRequest", "Batch", "BatchList")
_NATIVE = tuple(name for name, code in errors.CODES.items() if code.native)
_COMMON = (  # Error codes of every other route with authentication.
    errors.UNAUTHENTICATED, errors.REQUEST_TIMEOUT, errors.PAYLOAD_TOO_LARGE, errors.HEADERS_TOO_LARGE, errors.RATE_LIMITED,
    errors.SERVICE_OVERLOADED, errors.BAD_REQUEST,
)  # fmt: skip
_UNKNOWN = (errors.UNAUTHENTICATED, errors.FORBIDDEN, errors.NOT_FOUND, errors.SERVICE_OVERLOADED)
"""Error codes of the Open Inference Protocol's metadata routes for one model."""


class Example(msgspec.Struct, frozen=True):
    """An example of a valid request. `input` is a JSON value, or None if unknown. `model` may be empty."""

    kinds: Kinds = TEXTS
    input: Any = "hello"
    model: str = ""


def example_of(kinds: Kinds, own: Any, model: str) -> Example:
    """Return an example for a model. `own` is the example from its target (a JSON value) or None."""
    usual = {ValueKind.TEXT: "hello", ValueKind.BYTES: "aGVsbG8=", None: "hello"}
    if own is None:
        own = zeros(kinds.inputs) if kinds.takes is ValueKind.TENSORS else usual.get(kinds.takes)
    return Example(kinds, own, model)


_HELLO = Example()


def document(settings: Settings, *kinds: Kinds, example: Example = _HELLO) -> dict[str, Any]:
    """Return the OpenAPI document for models of these `kinds`, with `example` on each route that can accept it."""
    models = tuple(dict.fromkeys(kinds)) or (TEXTS,)
    taken = _names((model.takes for model in models), "TextInput", "TensorInput")
    given = _names((model.gives for model in models), "TextOutput", "TensorOutput")
    octets = {model.takes for model in models} == {ValueKind.BYTES}
    tensors = any(ValueKind.TENSORS in (model.takes, model.gives) for model in models)
    numbers = " For a model with one tensor, the raw numbers of its rows, little-endian." if tensors else ""
    max_rows = max(model.max_batch_size for model in settings.served.values())
    contract = msgspec.json.decode(Path(__file__).with_name("contract.json").read_bytes())
    facts = {
        **_fixed_facts(settings),
        **_refusals(),
        **_examples(settings, example),
        "taken": _any_of(taken),
        "given": _any_of(given),
        "octets_taken": f"The input itself{'' if octets else ', in UTF-8 if the model takes text'}.{numbers}",
        "parameters_told": f"Passed to the model unchanged.{_per_call_hint(models)}",
        "tensors_taken": schema((model.inputs for model in models if model.takes is ValueKind.TENSORS), max_rows),
        "tensors_given": schema((model.outputs for model in models if model.gives is ValueKind.TENSORS), max_rows),
    }
    for name, part in (contract["protocol"]["tensors" if tensors else "texts"] | contract["parts"]).items():
        facts[name] = _filled(part, facts)
    facts["native_responses"] = _responses("{}", facts["problem"])
    facts["openai_responses"] = _responses("OpenAI_{}", facts["openai_problem"])
    contract_document: dict[str, Any] = _filled(contract["document"], facts)
    unserved = () if settings.bulk_dir else _BULK
    for name in (*_VALUES.difference(taken, given), *unserved):
        del contract_document["components"]["schemas"][name]
    for path in list(contract_document["paths"]):
        if unserved and path.startswith(("/v1/files", "/v1/batches")):
            del contract_document["paths"][path]
    return contract_document


def _per_call_hint(models: Iterable[Kinds]) -> str:
    shared = [model.per_call for model in models if model.per_call]
    if not shared:
        return ""
    names = sorted({f"`{name}`" for parameters in shared if parameters != ALL_PARAMETERS for name in parameters})
    which = "all of it" if ALL_PARAMETERS in shared else ", ".join(names)
    return f" Only requests with the same values of {which} run in the same call."


def _filled(value: Any, facts: dict[str, Any]) -> Any:
    """Replace "${name}" in a value of `contract.json` with the fact `name`, converted to text if it is part of a longer string. The
    member "..." of an object lists facts to merge into the object."""
    if isinstance(value, str):
        whole = _FACT.fullmatch(value)
        return facts[whole[1]] if whole else _FACT.sub(lambda match: str(facts[match[1]]), value)
    if isinstance(value, list):
        return [_filled(element, facts) for element in value]
    if not isinstance(value, dict):
        return value
    filled: dict[str, Any] = {}
    for name, element in value.items():
        if name != "...":
            filled[name] = _filled(element, facts)
            continue
        for fact in element:
            filled |= facts[fact]
    return filled


def _fixed_facts(settings: Settings) -> dict[str, Any]:
    several = bool(settings.models)
    left_out = "Required, because there are several models; GET /v1/models lists them."
    if settings.default:
        left_out = f"If left out: {'the default model' if _hides_models(settings) else settings.default}."
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
        "datatypes": [datatype for datatype in SIZES if datatype != JSON],
        "most_tensors": MOST_TENSORS,
        "most_axes": MOST_AXES,
        "settled": {name: {"description": "Repeated from the request."} for name in SETTLED},
    }


_TEXT = {"type": "string", "pattern": r"^[^\u0000]*$", "description": "Any text without U+0000."}


def _refusals() -> dict[str, Any]:
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
    """Return references to error responses by status. If several codes have the same status, the first one counts."""
    return {str(errors.STATUS[code]): {"$ref": _RESPONSES + form.format(code)} for code in reversed(codes)}


def _responses(form: str, refusal: dict[str, Any]) -> dict[str, Any]:
    titles: dict[int, list[str]] = {}
    for code in errors.CODES.values():
        titles.setdefault(code.status, []).append(code.title)
    return {
        form.format(name): {"description": "; or: ".join(titles[code.status]), **refusal}
        for name, code in errors.CODES.items()
    }


def _errors() -> list[dict[str, Any]]:
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
    input, kinds = example.input, example.kinds
    takes, gives = kinds.takes, kinds.gives
    text = takes in (ValueKind.TEXT, None) and isinstance(input, str)
    model = {"model": example.model} if example.model else {}
    default = "NAME" if _hides_models(settings) and settings.default else settings.default
    model_id = example.model or default
    element = msgspec.json.encode(input).decode() if takes is ValueKind.JSON else input
    tensors: list[dict[str, Any]] | None = [{"name": INPUT, "datatype": BYTES, "shape": [1], "data": [element]}]
    if takes is ValueKind.TENSORS:
        tensors = protocol_inputs(kinds.inputs, input)
    requests = {
        "inference_example": ({**model, "input": input}, True),
        "plain_example": ({"input": input}, not model),
        "predict_example": ({"model_id": model_id, "input_data": input}, bool(model_id)),
        "prompt_example": ({**model, "prompt": input}, text),
        "chat_example": ({**model, "messages": [{"role": "user", "content": input}]}, text),
        "input_example": ({**model, "input": input}, text),
        "embeddings_example": ({**model, "input": input}, text and gives in (ValueKind.JSON, ValueKind.TENSORS)),
        "oip_example": ({"inputs": tensors}, tensors is not None),
        "oip_default_example": ({"inputs": tensors}, tensors is not None and not model),
    }
    return {name: {"example": body} if works and input is not None else {} for name, (body, works) in requests.items()}


def _hides_models(settings: Settings) -> bool:
    """Return True if model names are secret: a credential may be limited to some models, but anyone may read the document."""
    return bool(settings.models and (settings.keys or settings.jwt))


def _names(kinds: Iterable[ValueKind | None], text: str, tensors: str) -> list[str]:
    known = {ValueKind.JSON: "JsonValue", ValueKind.BYTES: "Octets", ValueKind.TENSORS: tensors}
    names = {text if kind is None else known.get(kind, text) for kind in kinds}
    return ["JsonValue"] if "JsonValue" in names else sorted(names)


def _any_of(names: list[str]) -> dict[str, Any]:
    parts = [{"$ref": _SCHEMAS + name} for name in names]
    return {"anyOf": parts} if len(parts) > 1 else parts[0]


def schema(models: Iterable[Specs], max_rows: int) -> dict[str, Any]:
    """Return the schema of tensors in native JSON: one row, or an array of up to `max_rows` rows. Several tensors are an object."""
    options = [option for specs in dict.fromkeys(models) for option in _model_schemas(specs, max_rows)]
    return options[0] if len(options) == 1 else {"anyOf": options}


def zeros(specs: Specs) -> Any:
    """Return a row of zeros in native JSON, or None if the row would be long or the tensors are unknown."""
    if not specs or sum(count_of(_row(spec)) for spec in specs) > MOST_ZEROS:
        return None
    zero: dict[str, Any] = {"BOOL": False, BYTES: "hello"}
    rows = {spec.name: _nested(_row(spec), zero.get(spec.datatype, 0)) for spec in specs}
    return rows if len(rows) > 1 else rows[specs[0].name]


def protocol_inputs(specs: Specs, value: Any) -> list[dict[str, Any]] | None:
    """Convert one or more rows of native JSON to the Open Inference Protocol. Return None if they don't match `specs`."""
    given = value if isinstance(value, dict) else {spec.name: value for spec in specs[:1]}
    if not specs or any(spec.name not in given for spec in specs):
        return None
    inputs = []
    for spec in specs:
        data, shape = given[spec.name], _shape(given[spec.name])
        if len(shape) == len(spec.shape):
            data, shape = [data], (1, *shape)
        inputs.append({"name": spec.name, "datatype": spec.datatype, "shape": list(shape), "data": data})
    return inputs


def _model_schemas(specs: Specs, max_rows: int) -> Iterator[dict[str, Any]]:
    if not specs:
        yield _ANY
        return
    several = {"minItems": 1, "maxItems": max_rows}
    if len(specs) == 1:
        row = _schema_of_row(specs[0].shape, specs[0])
        yield {**row, "description": f"One row, {specs[0].datatype}."}
        yield {"type": "array", **several, "items": row, "description": f"Rows, {specs[0].datatype}."}
        return
    rows = {spec.name: _schema_of_row(spec.shape, spec) for spec in specs}
    yield _object(rows, "One row of each tensor.")
    yield _object(
        {name: {"type": "array", **several, "items": row} for name, row in rows.items()},
        "The same number of rows of each tensor.",
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
        low, high = BOUNDS[datatype]
        return {"type": "integer" if "INT" in datatype else "number", "minimum": low, "maximum": high}
    return {"type": {"BOOL": "boolean", BYTES: "string"}.get(datatype, "number")}


def _row(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(1 if axis < 0 else axis for axis in spec.shape)


def _nested(shape: Sequence[int], element: Any) -> Any:
    return [_nested(shape[1:], element) for _ in range(shape[0])] if shape else element


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()
