"""Reasons why a body cannot be read, and what its client most likely meant whose body lacks a member."""

from __future__ import annotations

import difflib
import re

import msgspec

from headway.core.excerpt import excerpt

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_MISSING = re.compile("Object missing required field `(input|input_data|model_id)`")
_MOST_BYTES = 1 << 16
"""Bytes of the longest body that is looked into."""
_MOST_SHOWN = 5
_ELSEWHERE = {
    "instances": "several inputs go as `inputs` to /v1/inference",
    "inputs": "several inputs go to /v1/inference",
    "prompt": "prompts go to /v1/completions",
    "messages": "chats go to /v1/chat/completions",
    "input": "/v1/inference takes an `input`",
    "input_data": "/v1/predict takes an `input_data`",
}
"""Members of the bodies of other routes and APIs, with where they go."""
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def why_not(exc: Exception, body: bytes) -> str:
    """Reason why a body, or a part of one, cannot be decoded, as its client may read it."""
    if isinstance(exc, UnicodeDecodeError):
        return f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
    if isinstance(exc, RecursionError):
        return "the body is nested too deeply"
    if isinstance(exc, msgspec.ValidationError):
        return (problem := str(exc)) + meant(problem, body)
    if not body:
        return "the body is empty; expected a JSON object"
    if _LONE_SURROGATE.search(body):
        return r"the body contains a lone surrogate (\ud800 to \udfff without its other half), which is no text"
    return f"the body is not JSON: {exc}"


def meant(problem: str, body: bytes) -> str:
    """Words to add to the message about a body; empty where it lacks no member, or nothing can be said.

    Arguments:
        problem: the message.
        body: the body.
    """
    if (missing := _MISSING.fullmatch(problem)) is None or len(body) > _MOST_BYTES:
        return ""
    try:
        names = list(_members(body))
    except msgspec.MsgspecError:
        return ""
    lower = {name.lower(): name for name in names}
    if near := difflib.get_close_matches(missing[1], lower, 1, 0.8):
        return f"; did you mean it by `{excerpt(lower[near[0]])}`?"
    if found := next((what for name, what in _ELSEWHERE.items() if name in lower), ""):
        return f"; {found}"
    shown = ", ".join(f"`{excerpt(name)}`" for name in names[:_MOST_SHOWN])
    more = ", …" if len(names) > _MOST_SHOWN else ""
    return f"; it has {shown}{more}" if names else ""
