"""The part of the OpenAPI document that describes the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import msgspec

from headway import errors
from headway.config import Settings
from headway.gateway.fan_out import MOST_INPUTS
from headway.http.contract_kinds import Example
from headway.http.oip.requests import LENGTH_FIELD
from headway.http.openapi_components import LIMITED, MARKED, header, parameter, schema
from headway.model import ValueKind
from headway.oip.parameters import TOKENS
from headway.oip.tensors import BYTES, INPUT, OUTPUT

MODEL = "/v2/models/{model}"
VERSION = f"{MODEL}/versions/{{version}}"

_ASKED = ("RequestId", "Timeout", "Tier", "IdempotencyKey", "CacheControl")
"""Parameters of an inference route."""
_FAILED = tuple(name for name, code in errors.CODES.items() if code.native)
"""Error codes that an inference route can answer with."""
_UNKNOWN = (errors.UNAUTHENTICATED, errors.FORBIDDEN, errors.NOT_FOUND, errors.SERVICE_OVERLOADED)
_LENGTHS = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2}
_DURATION = {
    "type": "object",
    "required": ["count", "ns"],
    "properties": {"count": {"type": "integer"}, "ns": {"type": "integer", "description": "Nanoseconds in all."}},
}


def paths(settings: Settings, security: list[dict[str, list[str]]], example: Example) -> dict[str, Any]:
    """Paths of the protocol, with what they ask of a principal, and an example that works."""
    alone = not settings.models
    model = [_part("model", settings.model if alone else ""), _part("version", settings.model_version if alone else "")]
    told: dict[str, Any] = {
        "": ("Metadata", "What a model takes and gives", _answer("OipModelMetadata")),
        "/ready": ("Ready", "Whether a model can be asked", _readiness("OipModelReady")),
        "/config": ("Config", "How a model is served", _answer("OipModelConfig")),
        "/stats": ("Statistics", "What a model has done in this process", _answer("OipStatistics")),
    }
    found: dict[str, Any] = {
        "/v2": _get("oipServer", "Name, version and extensions of the server", _answer("OipServer")),
        "/v2/health/live": _get("oipLive", "Whether the process runs", _answer("OipLive")),
        "/v2/health/ready": _get("oipReady", "Whether requests should be sent here", _readiness("OipReady")),
        "/v2/models/stats": _get(
            "oipAllStatistics", "What the models have done in this process", _answer("OipStatistics"), security
        ),
    }
    for path, name, parts in ((MODEL, "oipModel", model[:1]), (VERSION, "oipVersion", model)):
        for of, (what, summary, answer) in told.items():
            found[path + of] = {"parameters": parts, **_get(name + what, summary, answer, security, *_UNKNOWN)}
        found[f"{path}/infer"] = {"parameters": parts, "post": _infer(f"{name}Infer", security, example)}
    found["/v2/repository/index"] = _index(security)
    return found


def schemas(settings: Settings) -> dict[str, Any]:
    """Schemas of the protocol."""
    return {**_inference_schemas(settings), **_told_schemas()}


def _inference_schemas(settings: Settings) -> dict[str, Any]:
    """Schemas of a request for inference, and of its answer."""
    most = min(MOST_INPUTS, settings.max_queue)
    text = {"type": "string"}
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": most}
    nested = {"type": "array", "items": {**texts, "maxItems": 1}, "minItems": 1, "maxItems": most}
    tensor = {"name": text, "datatype": {"type": "string", "enum": [BYTES]}, "shape": _LENGTHS}
    return {
        "OipRequest": _object(
            {
                "inputs": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 1,
                    "items": _object(
                        {
                            **tensor,
                            "data": {"oneOf": [texts, nested], "description": "One text for each element."},
                            "parameters": {
                                "type": ["object", "null"],
                                "description": "binary_data_size, in bytes, where the elements follow the JSON object.",
                            },
                        },
                        "data",
                        "parameters",
                    ),
                },
                "id": {"type": ["string", "null"], "description": "Yours to use; it is echoed."},
                "outputs": {
                    "type": ["array", "null"],
                    "maxItems": 1,
                    "items": _object({"name": {"type": "string", "enum": [OUTPUT]}}),
                    "description": f"{OUTPUT}, or nothing. Its parameter binary_data asks for the binary form.",
                },
                "parameters": {
                    "type": ["object", "null"],
                    "maxProperties": settings.max_parameters,
                    "description": "priority may lower the tier, timeout (in microseconds) shorten the deadline, and "
                    "binary_data_output asks for the binary form. The model gets the others.",
                },
            },
            "id",
            "outputs",
            "parameters",
        ),
        "OipAnswer": _object(
            {
                "model_name": text,
                "model_version": text,
                "id": {"type": "string", "description": "As the request had it."},
                "outputs": {"type": "array", "items": _object({**tensor, "data": texts})},
                "parameters": _object({TOKENS: {"type": "integer", "description": "As the model reports it."}}),
            },
            "id",
            "parameters",
        ),
    }


def _told_schemas() -> dict[str, Any]:
    """Schemas of what the server says of itself and of its models, and of errors."""
    text, numbers = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
    described = _object({"name": text, "datatype": {"type": "string", "enum": [BYTES]}, "shape": numbers})
    configured = _object({"name": text, "data_type": text, "dims": numbers})
    return {
        "OipServer": _object({"name": text, "version": text, "extensions": {"type": "array", "items": text}}),
        "OipLive": _object({"live": {"type": "boolean"}}),
        "OipReady": _object({"ready": {"type": "boolean"}}),
        "OipModelReady": _object({"name": text, "ready": {"type": "boolean"}}),
        "OipModelMetadata": _object(
            {
                "name": text,
                "versions": {"type": "array", "items": text},
                "platform": text,
                "inputs": {"type": "array", "items": described},
                "outputs": {"type": "array", "items": described},
            }
        ),
        "OipModelConfig": _object(
            {
                "name": text,
                "platform": text,
                "backend": text,
                "max_batch_size": {"type": "integer", "description": "Most elements of one request."},
                "input": {"type": "array", "items": configured},
                "output": {"type": "array", "items": configured},
                "dynamic_batching": {"type": "object"},
            }
        ),
        "OipStatistics": _object({"model_stats": {"type": "array", "items": _statistics()}}),
        "OipIndexRequest": _object({"ready": {"type": "boolean", "description": "Only models that are."}}, "ready"),
        "OipIndex": {
            "type": "array",
            "items": _object({
                "name": text, "version": text, "reason": text,
                "state": {"type": "string", "enum": ["READY", "UNAVAILABLE"]},
            }),
        },
        "OipError": _object({"error": {"type": "string", "description": "What is wrong, for people."}}),
    }  # fmt: skip


RESPONSE = {
    "description": "An error, in the form of the Open Inference Protocol.",
    "headers": header("X-Request-Id", "Retry-After", *LIMITED),
    "content": {"application/json": {"schema": schema("OipError")}},
}
"""Any error of the protocol's paths."""


def _infer(operation: str, security: list[dict[str, list[str]]], example: Example) -> dict[str, Any]:
    json = example.kinds[0] is ValueKind.JSON
    element = msgspec.json.encode(example.input).decode() if json else example.input
    body = {"inputs": [{"name": INPUT, "datatype": BYTES, "shape": [1], "data": [element]}]}
    shown = {} if example.input is None else {"example": body}
    return {
        "operationId": operation,
        "summary": "Ask a model, by the Open Inference Protocol",
        "description": "Each element of the input counts as a request. With binary data after the JSON object, "
        f"{LENGTH_FIELD} says how long the object is. The body may be compressed with gzip or deflate.",
        "parameters": [parameter(name) for name in _ASKED],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema("OipRequest"), **shown}},
        },
        "responses": {
            "200": {
                "description": "The model's answer.",
                "headers": header("X-Request-Id", *MARKED, *LIMITED),
                "content": {
                    "application/json": {"schema": schema("OipAnswer")},
                    "application/octet-stream": {
                        "schema": {
                            "type": "string",
                            "format": "binary",
                            "description": f"The answer, and {OUTPUT} in the binary form after it.",
                        }
                    },
                },
            },
            **_errors(*_FAILED),
        },
        "security": security,
    }


def _index(security: list[dict[str, list[str]]]) -> dict[str, Any]:
    return {
        "post": {
            "operationId": "oipIndex",
            "summary": "List the models",
            "requestBody": {"required": False, "content": {"application/json": {"schema": schema("OipIndexRequest")}}},
            "responses": {**_limited(_answer("OipIndex")), **_errors(errors.BAD_REQUEST, *_UNKNOWN)},
            "security": security,
        }
    }


def _get(
    operation: str,
    summary: str,
    answers: dict[str, Any],
    security: list[dict[str, list[str]]] | None = None,
    *codes: str,
) -> dict[str, Any]:
    refused = codes
    if security is not None:
        answers, refused = _limited(answers), (*codes, errors.UNAUTHENTICATED)
    return {
        "get": {
            "operationId": operation,
            "summary": summary,
            "responses": {
                **answers,
                **{status: one for status, one in _errors(*refused).items() if status not in answers},
            },
            "security": security or [],
        }
    }


def _answer(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": schema(name)}}
    return {"200": {"description": "What was asked.", "headers": header("X-Request-Id"), "content": content}}


def _limited(answers: dict[str, Any]) -> dict[str, Any]:
    """Answers that tell a limited caller what it has left."""
    return {status: {**one, "headers": {**one["headers"], **header(*LIMITED)}} for status, one in answers.items()}


def _readiness(name: str) -> dict[str, Any]:
    yes = _answer(name)["200"]
    return {"200": {**yes, "description": "A worker is ready."}, "503": {**yes, "description": "No worker is."}}


def _errors(*codes: str) -> dict[str, Any]:
    return {str(errors.STATUS[code]): {"$ref": "#/components/responses/OipError"} for code in codes}


def _part(name: str, value: str) -> dict[str, Any]:
    what = "Name of the model." if name == "model" else "Version of the model."
    schema: dict[str, Any] = {"type": "string", "enum": [value]} if value else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": what, "schema": schema}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", **({"required": required} if required else {}), "properties": properties}


def _statistics() -> dict[str, Any]:
    computed = dict.fromkeys(("compute_infer", "compute_input", "compute_output"), _DURATION)
    inferred = dict.fromkeys(("success", "fail", "queue", "cache_hit", "cache_miss"), _DURATION)
    return _object(
        {
            "name": {"type": "string"},
            "version": {"type": "string"},
            "last_inference": {"type": "integer", "description": "Milliseconds since 1970; 0: none."},
            "inference_count": {"type": "integer", "description": "Inputs that ran and got an output."},
            "execution_count": {"type": "integer", "description": "Batches that ran."},
            "inference_stats": _object({**inferred, **computed}),
            "batch_stats": {"type": "array", "items": _object({"batch_size": {"type": "integer"}, **computed})},
        }
    )
