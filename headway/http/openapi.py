"""The contract of the public port as an OpenAPI 3.1 document, made from the settings that are in force."""

from __future__ import annotations

from typing import Any

from headway import __version__, errors
from headway.config import Settings
from headway.http.shapes import HOPELESS, anchor

_WHEN: dict[str, str] = {
    errors.BAD_REQUEST: "The request is not HTTP, JSON or UTF-8 as it should be, a member is missing or of the wrong "
    "type; the message says which, and what was expected.",
    errors.UNAUTHENTICATED: "Keys are configured, and none or a wrong one was sent.",
    errors.FORBIDDEN: "The key is good, but not for this.",
    errors.NOT_FOUND: "No such model or route.",
    errors.METHOD_NOT_ALLOWED: "The route exists, but not with this method; Allow names those it has.",
    errors.REQUEST_TIMEOUT: "Header or body did not arrive in time.",
    errors.IDEMPOTENCY_CONFLICT: "A request with the same id is in flight.",
    errors.IDEMPOTENCY_MISUSE: "The Idempotency-Key was used for another request.",
    errors.PAYLOAD_TOO_LARGE: "The body is larger than the limit; it was not read.",
    errors.HEADERS_TOO_LARGE: "Request line and header are larger than the limit.",
    errors.REJECTED_BY_MODEL: "The model fails on this input even when it runs alone.",
    errors.RATE_LIMITED: "The key is over its quota; Retry-After says when there is room again.",
    errors.SHED: "At this load requests of this tier are refused.",
    errors.INTERNAL: "A fault of the server.",
    errors.BACKEND_ERROR: "The model failed for reasons of its own, and the retries are spent.",
    errors.SERVICE_OVERLOADED: "The request could not be answered in time, or too many connections are open; "
    "Retry-After is computed from how fast the queue drains.",
    errors.NO_WORKERS: "No worker is healthy.",
    errors.DRAINING: "This process is shutting down; another one may serve.",
    errors.DEADLINE_EXCEEDED: "The deadline in the queue, on the GPU or in all has passed; the message says which.",
}
_EXPECTED = (
    errors.BAD_REQUEST,
    errors.UNAUTHENTICATED,
    errors.NOT_FOUND,
    errors.REQUEST_TIMEOUT,
    errors.IDEMPOTENCY_CONFLICT,
    errors.PAYLOAD_TOO_LARGE,
    errors.REJECTED_BY_MODEL,
    errors.RATE_LIMITED,
    errors.HEADERS_TOO_LARGE,
    errors.BACKEND_ERROR,
    errors.SERVICE_OVERLOADED,
    errors.DEADLINE_EXCEEDED,
)
"""One code for each status that a native route can answer with."""

_NO_NUL = r"^[^\u0000]*$"
_TEXT = {"type": "string", "pattern": _NO_NUL, "description": "Any text without U+0000."}
_LATENCY = {"type": "number", "description": "Milliseconds from the complete request to its answer, on the server."}
_ID = {"type": "string", "pattern": "^req_[0-9a-f-]{36}$"}


def document(settings: Settings) -> dict[str, Any]:
    """The contract under `settings`."""
    native = {
        "/v1/inference": _native(
            settings, "Ask a model", "InferenceRequest", "InferenceAnswer", {"input": "hello"}, "inference"
        ),
        "/api/inference": _native(
            settings, "Ask the default model", "PlainRequest", "PlainAnswer", {"input": "hello"}, "plainInference"
        ),
        "/v1/predict": _predict(settings),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headway",
            "version": __version__,
            "description": f"Answers single inference requests with model {settings.model!r}, "
            f"in batches of up to {settings.max_batch_size}.",
        },
        "paths": native | _service(),
        "components": {
            "schemas": _schemas(settings),
            "parameters": _parameters(settings),
            "headers": {"RequestId": {"description": "The request's id.", "schema": _ID}},
            "responses": {code: _refusal(code) for code in errors.STATUS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "x-headway-errors": [
            {
                "error": code,
                "status": status,
                "title": errors.TITLE[code],
                "anchor": anchor(code),
                "when": _WHEN[code],
                "retry": code not in HOPELESS,
            }
            for code, status in errors.STATUS.items()
        ],
    }


def _native(
    settings: Settings, summary: str, request: str, answer: str, example: dict[str, str], operation: str
) -> dict[str, Any]:
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "description": "The answer comes on the same connection; there is nothing to poll.",
            "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in ("RequestId", "Timeout", "Tier")],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _schema(request), "example": example}},
            },
            "responses": {
                "200": {
                    "description": "The model's answer.",
                    "headers": {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}},
                    "content": {"application/json": {"schema": _schema(answer)}},
                },
                **{str(errors.STATUS[code]): {"$ref": f"#/components/responses/{code}"} for code in _EXPECTED},
            },
            "security": [{"key": []}] if settings.keys else [],
        }
    }


def _predict(settings: Settings) -> dict[str, Any]:
    example = {"model_id": settings.model, "input_data": "hello"}
    item = _native(settings, "Ask a model by its id", "PredictRequest", "PredictAnswer", example, "predict")
    operation = item["post"]
    operation["parameters"].append({
        "name": "model_id",
        "in": "query",
        "description": "The model; required when the body is application/octet-stream, unused otherwise.",
        "schema": {"type": "string"},
    })  # fmt: skip
    operation["requestBody"]["content"]["application/octet-stream"] = {
        "schema": {"type": "string", "pattern": _NO_NUL, "description": "The input itself, in UTF-8, without U+0000."}
    }
    return item


def _service() -> dict[str, Any]:
    ready = "A worker is ready to answer and the process is not shutting down."
    return {
        "/livez": _probe("live", "Whether the process runs", "It runs."),
        "/readyz": _probe("ready", "Whether requests should be sent here", ready, "503"),
        "/healthz": _probe("health", "The same as /readyz", ready, "503"),
    }


def _probe(operation: str, summary: str, good: str, bad: str = "") -> dict[str, Any]:
    content = {"application/json": {"schema": _schema("Health")}}
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
    return {"get": {"operationId": operation, "summary": summary, "parameters": [verbose], "responses": responses}}


def _schema(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _schemas(settings: Settings) -> dict[str, Any]:
    metadata = _object(
        ("tokens_used", "latency_ms", "model_version"),
        {
            "tokens_used": {"type": ["integer", "null"], "description": "As the model reports it."},
            "latency_ms": _LATENCY,
            "model_version": {"type": "string"},
        },
    )
    predicted = {"request_id": _ID, "output": {"type": "string"}, "latency_ms": _LATENCY}
    return {
        "InferenceRequest": _object(
            ("input",),
            {
                "input": _TEXT,
                "model": {"type": ["string", "null"], "description": f"Left out: {settings.model}."},
                "parameters": {"type": ["object", "null"], "description": "Handed to the model as it is."},
                "client_id": {"type": ["string", "null"], "description": "Yours to use; not looked at."},
            },
        ),
        "InferenceAnswer": _object(
            ("request_id", "output", "metadata"),
            {"request_id": _ID, "output": {"type": "string"}, "metadata": metadata},
        ),
        "PlainRequest": _object(("input",), {"input": _TEXT}),
        "PlainAnswer": _object(("output", "request_id", "latency_ms"), predicted),
        "PredictRequest": _object(("model_id", "input_data"), {"model_id": {"type": "string"}, "input_data": _TEXT}),
        "PredictAnswer": _object(("request_id", "output", "latency_ms"), predicted),
        "Health": _object(("status",), {"status": {"type": "string"}, "checks": {"type": "object"}}),
        "Problem": _object(
            ("type", "title", "status", "detail", "error", "message", "request_id"),
            {
                "type": {"type": "string", "description": "Where the error is described."},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "error": {"type": "string", "enum": list(errors.STATUS)},
                "message": {"type": "string"},
                "request_id": _ID,
                "retry_after_ms": {"type": "integer"},
            },
        ),
    }


def _parameters(settings: Settings) -> dict[str, Any]:
    return {
        "RequestId": {
            "name": "X-Request-Id",
            "in": "header",
            "description": "A UUID to use as the request's id, with or without req_; anything else is replaced.",
            "schema": {"type": "string"},
        },
        "Timeout": {
            "name": "X-Request-Timeout-Ms",
            "in": "header",
            "description": f"Milliseconds above 0; shortens the deadline of {settings.request_timeout_ms:g} ms.",
            "schema": {
                "type": "string",
                "pattern": r"^[0-9]{1,9}(\.[0-9]{1,6})?$",
                "not": {"pattern": "^[0.]*$"},
                "example": "1500",
            },
        },
        "Tier": {
            "name": "X-Request-Tier",
            "in": "header",
            "description": "Lowers the tier; a tier above the caller's own changes nothing.",
            "schema": {"type": "string", "enum": list(settings.tier_names)},
        },
    }


def _refusal(code: str) -> dict[str, Any]:
    return {
        "description": errors.TITLE[code],
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}},
        "content": {"application/problem+json": {"schema": _schema("Problem")}},
    }
