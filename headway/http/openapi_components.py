"""Components of the contract: schemas, parameters, header fields, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway import errors
from headway.config import Settings
from headway.gateway.fan_out import MOST_INPUTS
from headway.http.contract_kinds import TEXTS, Kinds, input_of, kind_schemas, output_of
from headway.http.inference.inference_head import MOST_KEY
from headway.model import MOST_OUTPUT

KEY_PATTERN = r'^([!#-~]([ -~]{0,253}[!#-~])?|"([ !#-[\]-~]|\\["\\]){1,255}")$'
"""Pattern of an Idempotency-Key."""

_VERSION = {
    "type": ["string", "null"],
    "minLength": 1,
    "description": "Version of the model that must answer; left out: any.",
}
_SAME_VERSION = {**_VERSION, "description": "The same as `version`, by the name that answers have for it."}
_LATENCY = {"type": "number", "description": "Milliseconds from the complete request to its answer, on the server."}
_ID = {"type": "string", "pattern": "^req_[0-9a-f-]{36}$"}

LIMITED = ("RateLimit-Policy", "RateLimit")
"""Header fields of every answer to a principal with rate limits."""

MARKED = ("Idempotency-Replayed", "X-Headway-Cache", "X-Headway-Kept")
"""Header fields of an answer that was made for another request, or that later requests will not get."""

_HEADERS: dict[str, Any] = {
    "X-Request-Id": {"description": "The request's id.", "schema": _ID},
    "Location": {"description": "Where to ask for the outcome.", "schema": {"type": "string"}},
    "Preference-Applied": {
        "description": "What was heeded of the preferences.",
        "schema": {"type": "string", "pattern": "^respond-async(, wait=[0-9]+)?$"},
    },
    "Retry-After": {
        "description": "Seconds after which to ask again.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "RateLimit-Policy": {
        "description": "The caller's limits: q requests in w seconds; `model` is that for the model asked. Only for callers who have limits.",
        "schema": {"type": "string", "examples": ['"user";q=1000;w=60']},
    },
    "RateLimit": {
        "description": "Of the limit with the least left: r requests now, and t seconds until all fit again.",
        "schema": {"type": "string", "examples": ['"user";r=49;t=12']},
    },
    "Idempotency-Replayed": {
        "description": "The outcome is that of an earlier request under the same Idempotency-Key.",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "X-Headway-Cache": {
        "description": "The output was made for an identical request: hit, an earlier one; collapsed, one that ran.",
        "schema": {"type": "string", "enum": ["hit", "collapsed"]},
    },
    "X-Headway-Kept": {
        "description": "The output is too large to be kept: it will not be there for a later request.",
        "schema": {"type": "string", "const": "no"},
    },
}


def hides_models(settings: Settings) -> bool:
    """Whether the contract, which strangers read, names no model, as some of several may be for some credentials only."""
    return bool(settings.models and (settings.keys or settings.jwt))


def left_out(settings: Settings) -> str:
    """Words on what the member `model` means when it is left out."""
    if settings.default:
        return f"Left out: {'the default model' if hides_models(settings) else settings.default}."
    return "Expected where there are several models, which GET /v1/models lists."


def components(settings: Settings, kinds: Sequence[Kinds] = (TEXTS,)) -> dict[str, Any]:
    """Components of the contract under `settings`, for models that take and give values of these kinds."""
    return {
        "schemas": _schemas(settings, kinds),
        "parameters": _parameters(settings),
        "headers": _HEADERS,
        "responses": {code: _refusal(code) for code in errors.STATUS},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }


def schema(name: str) -> dict[str, str]:
    """A reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def parameter(name: str) -> dict[str, str]:
    """A reference to a parameter."""
    return {"$ref": f"#/components/parameters/{name}"}


def response(code: str) -> dict[str, str]:
    """A reference to the refusal with an error code."""
    return {"$ref": f"#/components/responses/{code}"}


def security(settings: Settings) -> list[dict[str, list[str]]]:
    """Security requirement of a route under `settings`."""
    return [{"key": []}] if settings.keys or settings.jwt else []


def header(*names: str) -> dict[str, Any]:
    """References to fields of an answer's header."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def object_of(required: tuple[str, ...], properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with these members."""
    return {"type": "object", **({"required": list(required)} if required else {}), "properties": properties}


_RUN = {
    "tokens_used": {"type": ["integer", "null"], "description": "As the model reports it."},
    "model_version": {"type": "string"},
}
"""Members that tell of the run of an output."""


def _schemas(settings: Settings, kinds: Sequence[Kinds]) -> dict[str, Any]:
    """Schemas of the native routes, of health and of errors."""
    return {
        **kind_schemas(settings, kinds),
        **_inference_schemas(settings, kinds),
        **_short_schemas(kinds),
        **_task_schemas(kinds),
        "Health": object_of(("status",), {"status": {"type": "string"}, "checks": {"type": "object"}}),
        "Problem": _problem(),
    }


def _inference_schemas(settings: Settings, kinds: Sequence[Kinds]) -> dict[str, Any]:
    """Schemas of `/v1/inference`."""
    taken, given = input_of(kinds), output_of(kinds)
    metadata = object_of(("tokens_used", "latency_ms", "model_version"), {**_RUN, "latency_ms": _LATENCY})
    return {
        "InferenceRequest": object_of(
            (),
            {
                "input": taken,
                "inputs": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": min(MOST_INPUTS, settings.max_queue),
                    "items": taken,
                    "description": "Several inputs in place of `input`, which a request has to have one of. Each counts as a "
                    "request. They cannot become a task.",
                },
                "model": {"type": ["string", "null"], "description": left_out(settings)},
                "parameters": {
                    "type": ["object", "null"],
                    "maxProperties": settings.max_parameters,
                    "description": "Handed to the model as it is.",
                },
                "version": _VERSION,
                "model_version": _SAME_VERSION,
                "client_id": {"type": ["string", "null"], "description": "Yours to use; not looked at."},
            },
        ),
        "InferenceAnswer": object_of(
            ("request_id", "metadata"),
            {
                "request_id": _ID,
                "output": given,
                "outputs": {
                    "type": "array",
                    "items": given,
                    "description": "In place of `output`: one for each of several inputs, in order. One has at most "
                    f"{MOST_OUTPUT >> 20} MiB, and all together {settings.max_bodies_mb / 2:g} MiB.",
                },
                "metadata": metadata,
            },
        ),
    }


def _short_schemas(kinds: Sequence[Kinds]) -> dict[str, Any]:
    """Schemas of `/api/inference` and `/v1/predict`."""
    taken, predicted = input_of(kinds), {"request_id": _ID, "output": output_of(kinds), "latency_ms": _LATENCY}
    return {
        "PlainRequest": object_of(("input",), {"input": taken}),
        "PlainAnswer": object_of(("output", "request_id", "latency_ms"), predicted),
        "PredictRequest": object_of(
            ("model_id", "input_data"),
            {"model_id": {"type": "string"}, "input_data": taken, "version": _VERSION, "model_version": _SAME_VERSION},
        ),
        "PredictAnswer": object_of(("request_id", "output", "latency_ms"), predicted),
    }


def _task_schemas(kinds: Sequence[Kinds]) -> dict[str, Any]:
    """Schemas of tasks and their results."""
    given = output_of(kinds)
    return {
        "Task": object_of(("task_id", "status"), {"task_id": _ID, "status": {"type": "string", "enum": ["PENDING"]}}),
        "Result": object_of(
            ("task_id", "status"),
            {
                "task_id": _ID,
                "status": {"type": "string", "enum": ["PENDING", "SUCCESS", "FAILED"]},
                "output": given,
                "metadata": {**object_of(("tokens_used", "model_version"), _RUN), "description": "Of an output."},
                "error": {**schema("Problem"), "description": "Of a failure."},
            },
        ),
    }


def _problem() -> dict[str, Any]:
    """Schema of a problem document."""
    return object_of(
        ("type", "title", "status", "detail", "error", "message", "request_id"),
        {
            "type": {"type": "string", "description": "Where the error is described."},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "error": {"type": "string", "enum": [code for code in errors.STATUS if code not in errors.SHOWN]},
            "message": {"type": "string"},
            "request_id": _ID,
            "retry_after_ms": {"type": "integer"},
        },
    )


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
            "description": f"Milliseconds above 0; shortens the deadline of {settings.longest_request_s * 1000:g} ms.",
            "schema": {
                "type": "string",
                "pattern": r"^[0-9]+(\.[0-9]+)?$",
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
        "Prefer": {
            "name": "Prefer",
            "in": "header",
            "description": "respond-async: answer 202 with the id of a task. With wait=SECONDS: only if there is no "
            f"answer by then. A task may take {settings.longest_task_s * 1000:g} ms in all. Not with `inputs`. "
            "Other preferences are ignored.",
            "schema": {"type": "string", "examples": ["respond-async", "respond-async, wait=1"]},
        },
        "IdempotencyKey": {
            "name": "Idempotency-Key",
            "in": "header",
            "description": f"1 to {MOST_KEY} printable characters, in quotes or not. What was asked under it within "
            f"{settings.result_ttl_s:g} seconds is not run again but answered as it was.",
            "schema": {"type": "string", "pattern": KEY_PATTERN, "example": "8e03978e-40d5-43dd-bc93-6894a57f9324"},
        },
        "CacheControl": {
            "name": "Cache-Control",
            "in": "header",
            "description": "no-cache or no-store: the answer to an identical request will not do.",
            "schema": {"type": "string"},
        },
        "TaskId": {
            "name": "task_id",
            "in": "path",
            "required": True,
            "description": "As it was answered with 202; also the X-Request-Id of a request that preferred a task.",
            "schema": {"type": "string"},
        },
    }


def _refusal(code: str) -> dict[str, Any]:
    return {
        "description": "; or: ".join(
            errors.TITLE[other] for other in errors.STATUS if errors.STATUS[other] == errors.STATUS[code]
        ),
        "headers": header("X-Request-Id", *LIMITED),
        "content": {"application/problem+json": {"schema": schema("Problem")}},
    }
