"""Parts of both dialects of OpenAI's: one object of parameters for all inputs, and outputs with an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.core.excerpt import excerpt
from headway.dialects import json_lists
from headway.dialects.dialect import Dialect, NoOutputs, Remote, RemoteCall, raw_members
from headway.dialects.json_lists import Json
from headway.dialects.usage import with_usage
from headway.model import ItemResult


class _Model(msgspec.Struct, gc=False):
    id: str


class _Models(msgspec.Struct, gc=False):
    data: list[_Model]


_decode_models: Any = msgspec.json.Decoder(_Models).decode


class _Numbered(msgspec.Struct, gc=False):
    index: int


_decode_index: Any = msgspec.json.Decoder(_Numbered).decode


def reached(url: str, dialect: Dialect, model: str) -> Remote:
    """The API at a URL, which tells its models beside it where that ends as OpenAI's do."""
    parts = urlsplit(url)
    found = re.fullmatch("(.*/v1)/(completions|embeddings)", parts.path)
    models = None if found is None else RemoteCall(b"", {}, parts._replace(path=f"{found[1]}/models").geturl())
    return Remote(url, dialect, models=models, model=model)


def model_names(answer: bytes | bytearray) -> list[str]:
    """Names of the models of an API; empty where the answer is no list of them."""
    try:
        return [one.id for one in _decode_models(answer).data]
    except (*json_lists.NO_JSON, msgspec.ValidationError):
        return []


def merged(own: dict[str, Any], parameters: bytes, never: frozenset[str]) -> bytes:
    """Body of a request: the members of the dialect's own, and those of the parameters but for the ones in `never`."""
    members = {name: raw for name, raw in raw_members(parameters).items() if name not in never}
    return msgspec.json.encode({**members, **own})


def read_items(
    body: bytes | bytearray,
    member: str,
    decode: Callable[[bytes | bytearray], Any],
    expected: int,
    read: Callable[[msgspec.Raw], ItemResult],
) -> list[ItemResult]:
    """Items of an answer: the objects in a list, read one by one and ordered by the index of each.

    Arguments:
        body: the answer.
        member: member of the answer that is the list.
        decode: decodes the answer to an object that has this member, and `usage`, as they stand there.
        expected: number of outputs.
        read: reads an object of the list.

    Raises:
        NoOutputs: there are not `expected` objects, one for each index.
    """
    try:
        found = decode(body)
        return with_usage(_by_index(getattr(found, member), expected, read), found.usage)
    except msgspec.ValidationError:
        raise NoOutputs(f"no object with a list of {member}") from None
    except json_lists.NO_JSON as exc:
        raise NoOutputs(f"something that is no JSON ({exc})") from None


def _by_index(content: Json, expected: int, read: Callable[[msgspec.Raw], ItemResult]) -> list[ItemResult]:
    items: list[ItemResult | None] = [None] * expected
    for raw in json_lists.elements(content, expected):
        try:
            index = _decode_index(raw).index
        except msgspec.ValidationError:
            raise NoOutputs("an output without an index") from None
        if not 0 <= index < expected:
            raise NoOutputs(f"an output with the index {excerpt(str(index))} for {expected} inputs")
        if items[index] is not None:
            raise NoOutputs(f"two outputs with the index {index}")
        items[index] = read(raw)
    return [item for item in items if item is not None]
