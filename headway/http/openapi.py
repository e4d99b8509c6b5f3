"""The contract of the public port as an OpenAPI 3.1 document, made from the settings that are in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway import __version__, errors
from headway.config import Settings
from headway.http.contract_kinds import TEXTS, Example, Kinds
from headway.http.oip import contract as oip
from headway.http.openai import contract as openai
from headway.http.openapi_components import (
    LIMITED,
    MARKED,
    components,
    header,
    hides_models,
    parameter,
    response,
    schema,
    security,
)
from headway.http.problem import anchor
from headway.http.tasks import LONGEST_WAIT, PATH
from headway.model import ValueKind

_EXPECTED = tuple(name for name, code in errors.CODES.items() if code.native)
"""Error codes that a native route can answer with."""

_ASKED = ("RequestId", "Timeout", "Tier", "Prefer", "IdempotencyKey", "CacheControl")
"""Parameters of a native route."""

_HELLO = Example()
_BINARY = {"type": "string", "format": "binary"}

_ACCEPTED = {
    "description": "The request has become a task, as the client prefers; its outcome is kept.",
    "headers": header("X-Request-Id", "Location", "Preference-Applied", "Retry-After", *LIMITED),
    "content": {"application/json": {"schema": schema("Task")}},
    "links": {
        name: {"operationId": name, "parameters": {"task_id": "$response.body#/task_id"}}
        for name in ("result", "forget")
    },
}


def document(settings: Settings, *kinds: Kinds, example: Example = _HELLO) -> dict[str, Any]:
    """Contract under `settings`.

    Arguments:
        settings: settings that are in force.
        kinds: kinds of the values that the models take and give, one for each; none: there is one, of texts.
        example: request that works, in every form that it can have.
    """
    models = tuple(dict.fromkeys(kinds)) or (TEXTS,)
    asked = {} if example.input is None else {"input": example.input}
    named = example.of(asked) if asked else {}
    plain = {"example": asked} if asked and not example.model else {}
    native = {
        "/v1/inference": _native(settings, "Ask a model", "InferenceRequest", "InferenceAnswer", named, "inference"),
        "/api/inference": _native(
            settings, "Ask the default model", "PlainRequest", "PlainAnswer", plain, "plainInference"
        ),
        "/v1/predict": _predict(settings, models, example),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headway",
            "version": __version__,
            "description": f"Answers single inference requests with {_models(settings)}.",
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": native
        | _tasks(settings)
        | _service()
        | openai.paths(settings, example)
        | oip.paths(settings, security(settings), example),
        "components": _components(settings, models),
        "x-headway-errors": [
            {
                "error": code.shown or name,
                "status": code.status,
                "title": code.title,
                "anchor": anchor(name),
                "when": code.when,
                "retry": not code.hopeless,
            }
            for name, code in errors.CODES.items()
        ],
    }


def _models(settings: Settings) -> str:
    if settings.models:
        return "several models, which GET /v1/models lists"
    return f"model {settings.model!r}, in batches of up to {settings.max_batch_size}"


def _components(settings: Settings, kinds: Sequence[Kinds]) -> dict[str, Any]:
    """Components of the native routes, and of all other APIs."""
    parts = components(settings, kinds)
    parts["schemas"] |= openai.schemas(settings) | oip.schemas(settings)
    parts["headers"] = parts["headers"] | openai.HEADERS
    parts["responses"] |= openai.responses()
    parts["responses"]["OipError"] = oip.RESPONSE
    return parts


def _native(
    settings: Settings, summary: str, request: str, answer: str, example: dict[str, Any], operation: str
) -> dict[str, Any]:
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "description": "The answer comes on the same connection, unless the client prefers a task.",
            "parameters": [parameter(name) for name in _ASKED],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema(request), **example}},
            },
            "responses": {
                "200": {
                    "description": "The model's answer.",
                    "headers": header("X-Request-Id", *MARKED, *LIMITED),
                    "content": {"application/json": {"schema": schema(answer)}},
                },
                "202": _ACCEPTED,
                **_refusals(*_EXPECTED),
            },
            "security": security(settings),
        }
    }


def _predict(settings: Settings, kinds: Sequence[Kinds], example: Example) -> dict[str, Any]:
    default = "NAME" if settings.default and hides_models(settings) else settings.default
    asked = {"model_id": example.model or default, "input_data": example.input}
    shown = {"example": asked} if None not in asked.values() and asked["model_id"] else {}
    item = _native(settings, "Ask a model by its id", "PredictRequest", "PredictAnswer", shown, "predict")
    operation = item["post"]
    operation["parameters"].append({
        "name": "model_id",
        "in": "query",
        "description": "The model; required when the body is application/octet-stream, refused otherwise.",
        "schema": {"type": "string"},
    })  # fmt: skip
    operation["parameters"].append({
        "name": "version",
        "in": "query",
        "description": "The version that must answer, where the body is application/octet-stream; refused otherwise.",
        "schema": {"type": "string"},
    })  # fmt: skip
    takes_octets = {takes for takes, _ in kinds} == {ValueKind.BYTES}
    told = "The input itself." if takes_octets else "The input itself; in UTF-8 where the model takes no octets."
    operation["requestBody"]["content"]["application/octet-stream"] = {"schema": {**_BINARY, "description": told}}
    told = "The output itself, where `Accept` asks for it, or where the body and it are octets."
    operation["responses"]["200"]["content"]["application/octet-stream"] = {"schema": {**_BINARY, "description": told}}
    return item


def _tasks(settings: Settings) -> dict[str, Any]:
    wait = {
        "name": "wait",
        "in": "query",
        "description": f"Seconds to wait for the outcome, at most {LONGEST_WAIT:g}.",
        "schema": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$", "example": "20"},
    }
    common = (
        errors.UNAUTHENTICATED,
        errors.NOT_FOUND,
        errors.REQUEST_TIMEOUT,
        errors.PAYLOAD_TOO_LARGE,
        errors.HEADERS_TOO_LARGE,
        errors.RATE_LIMITED,
        errors.SERVICE_OVERLOADED,
    )
    known = {
        "description": "What is known of it.",
        "headers": header("X-Request-Id", "Retry-After", *LIMITED),
        "content": {"application/json": {"schema": schema("Result")}},
    }
    gone = {"description": "It is forgotten, and never gets to a GPU if it has not yet.", "headers": header(*LIMITED)}
    return {
        f"{PATH}/{{task_id}}": {
            "parameters": [parameter("TaskId")],
            "get": {
                "operationId": "result",
                "summary": "Ask for the outcome of a task",
                "description": f"It is kept for {settings.result_ttl_s:g} seconds. A task of another tenant is unknown.",
                "parameters": [parameter("RequestId"), wait],
                "responses": {"200": known, **_refusals(errors.BAD_REQUEST, *common)},
                "security": security(settings),
            },
            "delete": {
                "operationId": "forget",
                "summary": "Cancel a task, or forget its outcome",
                "parameters": [parameter("RequestId")],
                "responses": {"204": gone, **_refusals(errors.BAD_REQUEST, *common)},
                "security": security(settings),
            },
        }
    }


def _refusals(*codes: str) -> dict[str, Any]:
    """Answers for the statuses of `codes`, one for each; the first code of a status stands for all of them."""
    return {str(errors.STATUS[code]): response(code) for code in reversed(codes)}


def _service() -> dict[str, Any]:
    ready = "A worker is ready to answer and the process is not shutting down."
    return {
        "/livez": _health_check("live", "Whether the process runs", "It runs."),
        "/readyz": _health_check("ready", "Whether requests should be sent here", ready, "503"),
        "/healthz": _health_check("health", "The same as /readyz", ready, "503"),
    }


def _health_check(operation: str, summary: str, good: str, bad: str = "") -> dict[str, Any]:
    content = {"application/json": {"schema": schema("Health")}}
    responses = {"200": {"description": good, "content": content}}
    if bad:
        responses[bad] = {"description": "No.", "content": content}
    verbose = {
        "name": "verbose",
        "in": "query",
        "description": "Say what was looked at.",
        "allowEmptyValue": True,
        "schema": {"type": "string"},
    }
    get = {
        "operationId": operation,
        "summary": summary,
        "parameters": [verbose],
        "responses": responses,
        "security": [],
    }
    return {"get": get}
