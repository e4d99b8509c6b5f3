"""OpenAI's routes in the contract: paths, schemas, and refusals in that API's form."""

from __future__ import annotations

from typing import Any

from headway import errors
from headway.config import Settings
from headway.http.contract_kinds import Example, text_schema
from headway.http.openai import responses as responses_route
from headway.http.openai.completions import MOST_CHOICES
from headway.http.openai.members import MOST_TEXTS
from headway.http.openapi_components import (
    LIMITED,
    MARKED,
    header,
    left_out,
    object_of,
    parameter,
    response,
    schema,
    security,
)
from headway.model import ValueKind

_PREFIX = "OpenAI_"
"""Beginning of the names of refusals in this API's form."""

_ASKED = ("RequestId", "Timeout", "Tier", "IdempotencyKey", "CacheControl")
_COUNTED = ("X-RateLimit-Limit-Requests", "X-RateLimit-Remaining-Requests", "X-RateLimit-Reset-Requests")
_NO_NUL = {"type": "string", "pattern": r"^[^\u0000]*$"}
_ANSWERED = tuple(name for name, code in errors.CODES.items() if code.native)

HEADERS = {
    "X-RateLimit-Limit-Requests": {
        "description": "Requests a minute of the limit with the least left.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "X-RateLimit-Remaining-Requests": {
        "description": "Requests that fit now.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "X-RateLimit-Reset-Requests": {
        "description": "Time until all fit again.",
        "schema": {"type": "string", "examples": ["12s"]},
    },
}
"""Header fields by which this API's clients learn of their limits."""


def paths(settings: Settings, example: Example) -> dict[str, Any]:
    """Paths of the routes. `example`: request that works; its model may be of no use here."""
    prompt = example.of({"prompt": example.input}) if example.text else {}
    messages = example.of({"messages": [{"role": "user", "content": example.input}]}) if example.text else {}
    talk = example.of({"input": example.input}) if example.text else {}
    embeds = example.text and example.kinds[1] is ValueKind.JSON
    input = example.of({"input": example.input}) if embeds else {}
    return {
        "/v1/completions": _asked(settings, "complete", "Complete texts", "Completion", prompt, True),
        "/v1/chat/completions": _asked(settings, "chat", "Answer a chat", "Chat", messages, True),
        "/v1/responses": _asked(settings, "respond", "Answer a conversation", "Response", talk, True),
        "/v1/embeddings": _asked(settings, "embed", "Make embeddings of texts", "Embedding", input, False),
        "/v1/models": {"get": _told(settings, "models", "List the models that the caller may ask", "ModelList")},
        "/v1/models/{id}": {
            "parameters": [
                {
                    "name": "id",
                    "in": "path",
                    "required": True,
                    "description": "Name of the model; a slash in it may be written as %2F.",
                    "schema": {"type": "string"},
                }
            ],
            "get": _told(settings, "model", "Ask whether a model is there", "Model", errors.NOT_FOUND),
        },
    }


def schemas(settings: Settings) -> dict[str, Any]:
    """Schemas of the routes."""
    text = text_schema(settings)
    most = min(MOST_TEXTS, settings.max_queue)
    texts = {"anyOf": [text, {"type": "array", "minItems": 1, "maxItems": most, "items": text}]}
    model = {"type": ["string", "null"], "description": left_out(settings)}
    n = {"type": ["integer", "null"], "minimum": 1, "maximum": MOST_CHOICES, "description": "Choices for each text."}
    options = {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}}
    stream = {
        "stream": {"type": ["boolean", "null"], "description": "Answer with server-sent events."},
        "stream_options": {**options, "description": "Only with stream."},
    }
    part = object_of(("type", "text"), {"type": {"type": "string", "const": "text"}, "text": text})
    message = object_of(
        ("role", "content"),
        {
            "role": _NO_NUL,
            "content": {"anyOf": [text, {"type": "array", "items": part}]},
            "name": {**_NO_NUL, "type": ["string", "null"]},
        },
    )
    messages = {"type": "array", "minItems": 1, "items": message}
    return {
        "CompletionRequest": object_of(("prompt",), {"model": model, "prompt": texts, "n": n, **stream}),
        "CompletionAnswer": _answer({"text": {"type": "string"}}),
        "ChatRequest": object_of(("messages",), {"model": model, "messages": messages, "n": n, **stream}),
        "ChatAnswer": _answer({"message": {"type": "object"}}),
        **_response_schemas(text, model),
        **_embedding_schemas(texts, model),
        **_told_schemas(),
    }


def _embedding_schemas(texts: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Schemas of the route of embeddings."""
    encoding = {"anyOf": [{"type": "string", "enum": ["float", "base64"]}, {"type": "null"}]}
    numbers = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}
    return {
        "EmbeddingRequest": object_of(
            ("input",),
            {
                "model": model,
                "input": texts,
                "encoding_format": encoding,
                "dimensions": {
                    "type": ["integer", "null"],
                    "description": "As many as the model gives, if it is set at all.",
                },
            },
        ),
        "EmbeddingAnswer": object_of(
            ("object", "data", "model", "usage"),
            {
                "object": {"const": "list"},
                "data": {"type": "array", "items": _item("embedding", {"embedding": numbers})},
                "model": {"type": "string"},
                "usage": _usage("prompt_tokens", "total_tokens"),
            },
        ),
    }


def _told_schemas() -> dict[str, Any]:
    """Schemas of what the API says of its models, and of errors."""
    return {
        "ModelList": object_of(
            ("object", "data"), {"object": {"const": "list"}, "data": {"type": "array", "items": schema("Model")}}
        ),
        "Model": object_of(
            ("id", "object", "created", "owned_by"),
            {
                "id": {"type": "string"},
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": {"type": "string"},
            },
        ),
        "OpenAIError": object_of(
            ("error",),
            {
                "error": object_of(
                    ("message", "type", "param", "code"),
                    {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": "string"},
                    },
                )
            },
        ),
    }


def _response_schemas(text: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Schemas of the route of responses."""
    kinds = {"type": "string", "enum": ["input_text", "output_text", "text"]}
    part = object_of(("type", "text"), {"type": kinds, "text": text})
    content = {"anyOf": [text, {"type": "array", "items": part}]}
    item = object_of(("role", "content"), {"type": {"const": "message"}, "role": _NO_NUL, "content": content})
    flag = {"type": ["boolean", "null"], "description": "Answer with server-sent events."}
    return {
        "ResponseRequest": object_of(
            ("input",),
            {
                "model": model,
                "input": {"anyOf": [text, {"type": "array", "minItems": 1, "items": item}]},
                "instructions": {**_NO_NUL, "type": ["string", "null"]},
                "stream": flag,
            },
        ),
        "ResponseAnswer": object_of(
            ("id", "object", "created_at", "model", "status", "output", "usage"),
            {
                "id": {"type": "string"},
                "object": {"const": "response"},
                "created_at": {"type": "integer"},
                "model": {"type": "string"},
                "status": {"enum": ["completed", "incomplete"]},
                "output": {"type": "array", "items": {"type": "object"}},
                "usage": {"type": ["object", "null"], "description": "As the model tells it."},
                "completed_at": {"type": ["integer", "null"]},
                "incomplete_details": {"type": ["object", "null"], "description": "Why the answer ended early."},
                "metadata": {"type": "object"},
                **{name: {"description": "As the request has it."} for name in responses_route.SETTLED},
            },
        ),
    }


def responses() -> dict[str, Any]:
    """Refusals by error code, in this API's form."""
    return {
        f"{_PREFIX}{name}": {
            "description": "; or: ".join(one.title for one in errors.CODES.values() if one.status == code.status),
            "headers": header("X-Request-Id", *LIMITED, *_COUNTED),
            "content": {"application/json": {"schema": schema("OpenAIError")}},
        }
        for name, code in errors.CODES.items()
    }


def _refusals(*codes: str) -> dict[str, Any]:
    return {str(errors.STATUS[code]): response(f"{_PREFIX}{code}") for code in reversed(codes)}


def _asked(
    settings: Settings, operation: str, summary: str, name: str, example: dict[str, Any], streams: bool
) -> dict[str, Any]:
    content = {"application/json": {"schema": schema(f"{name}Answer")}}
    if streams:
        content["text/event-stream"] = {"schema": object_of(("data",), {"data": {"type": "string"}})}
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "description": "In OpenAI's form. Members that are not named here reach the model as parameters.",
            "parameters": [parameter(one) for one in _ASKED],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema(f"{name}Request"), **example}},
            },
            "responses": {
                "200": {
                    "description": "The model's answer.",
                    "headers": header("X-Request-Id", *MARKED, *LIMITED, *_COUNTED),
                    "content": content,
                },
                **_refusals(*_ANSWERED),
            },
            "security": security(settings),
        }
    }


def _told(settings: Settings, operation: str, summary: str, name: str, *codes: str) -> dict[str, Any]:
    common = (
        errors.BAD_REQUEST,
        errors.UNAUTHENTICATED,
        errors.REQUEST_TIMEOUT,
        errors.PAYLOAD_TOO_LARGE,
        errors.HEADERS_TOO_LARGE,
        errors.RATE_LIMITED,
        errors.SERVICE_OVERLOADED,
    )
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [parameter("RequestId")],
        "responses": {
            "200": {
                "description": "What is there.",
                "headers": header("X-Request-Id", *LIMITED),
                "content": {"application/json": {"schema": schema(name)}},
            },
            **_refusals(*common, *codes),
        },
        "security": security(settings),
    }


def _usage(*names: str) -> dict[str, Any]:
    return object_of(names, {name: {"type": "integer"} for name in names})


def _item(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    return object_of(("object", "index", *more), {"object": {"const": kind}, "index": {"type": "integer"}, **more})


def _answer(more: dict[str, Any]) -> dict[str, Any]:
    choice = object_of(
        ("index", *more, "finish_reason"),
        {"index": {"type": "integer"}, **more, "logprobs": {"type": "null"}, "finish_reason": {"type": "string"}},
    )
    return object_of(
        ("id", "object", "created", "model", "choices"),
        {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "usage": {
                **_usage("prompt_tokens", "completion_tokens", "total_tokens"),
                "description": "As the model tells it.",
            },
        },
    )
