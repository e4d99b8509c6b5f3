"""Arguments of a class target, written as in a call: `"'minilm', size=3"`. Only literals are allowed; nothing is evaluated."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

MOST_CHARS = 100_000  # Limit on the length of the string.


class NoArguments(ValueError):
    """The string isn't a list of arguments. The message says why, without quoting a value."""


def read(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Parse a string into positional and named arguments. Raises NoArguments if they aren't literals."""
    if not text.strip():
        return [], {}
    if len(text) > MOST_CHARS:
        raise NoArguments(f"they have {len(text)} characters; at most {MOST_CHARS} are allowed")
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoArguments("they are not written as in a call") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise NoArguments("they are not written as in a call")
    positional = [_literal(node, f"argument {place}") for place, node in enumerate(call.args, 1)]
    named: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise NoArguments("** is not a literal")
        if keyword.arg in named:
            raise NoArguments(f"argument {keyword.arg} is given twice")
        named[keyword.arg] = _literal(keyword.value, f"argument {keyword.arg}")
    return positional, named


def write(named: Mapping[str, object]) -> str:
    """Return named arguments as a string for `read`. Raises NoArguments if a name isn't an identifier or a value has no literal."""
    for name in named:
        if not name.isidentifier():
            raise NoArguments(f"{name!r} is not the name of an argument")
    text = ", ".join(f"{name}={_written(value, name)}" for name, value in named.items())
    read(text)
    return text


def shown(text: str) -> str:
    """Return the arguments for printing. The values, which may be secret, are left out."""
    positional, named = read(text)
    return ", ".join(["…"] * len(positional) + [f"{name}=…" for name in named])


def _literal(node: ast.expr, what: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise NoArguments(f"{what} is not a literal, such as 'text', 3, 0.5, True, None or a list of them") from None


def _written(value: object, name: str) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_written(each, name)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(each, name) for each in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise NoArguments(f"argument {name} holds a nan, which has no literal")
        return "1e999" if value > 0 else "-1e999"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    raise NoArguments(f"argument {name} holds a {type(value).__name__}; write it as text")
