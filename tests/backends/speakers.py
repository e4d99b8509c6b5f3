"""Remote APIs for each dialect, with correct and wrong answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from headway.core.tensors import join_elements, split_elements
from headway.dialects import AUTO
from headway.dialects.dialect import Remote
from headway.dialects.table import reach
from headway.model import ItemResult


def _in_json(answer: Any) -> tuple[bytes, Mapping[str, str]]:
    return json.dumps(answer).encode(), {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Speaker:
    """A remote API that speaks one dialect.
    path: path of its URL, which implies the dialect if `format` is AUTO.
    inputs: returns the inputs from a decoded body.
    answer: returns an answer with these outputs, which may be any JSON values.
    wrong: wrong answers to two inputs, each with part of the expected error message.
    gives: returns the output for an input, as the dialect decodes it.
    read: decodes a body.
    write: returns the body and header fields of an answer.
    """

    path: str
    inputs: Callable[[Any], list[str]]
    answer: Callable[[Sequence[Any]], Any]
    wrong: tuple[tuple[Any, str], ...]
    gives: Callable[[str], Any]
    model: str = ""
    format: str = AUTO
    read: Callable[[bytes], Any] = json.loads
    write: Callable[[Any], tuple[bytes, Mapping[str, str]]] = _in_json

    def remote(self, url: str) -> Remote:
        return reach(url, self.format, self.model)

    def response(self, answer: Any) -> web.Response:
        body, headers = self.write(answer)
        return web.Response(body=body, headers=headers)

    def decoded(self, answer: Any, expected: int) -> list[ItemResult]:
        """Return the items that the dialect decodes from an answer."""
        body, headers = self.write(answer)
        json_bytes = int(headers.get("Inference-Header-Content-Length", -1))
        return self.remote(f"http://h{self.path}").dialect.decode(body, expected, json_bytes)


def _choices(outputs: Sequence[Any]) -> Any:
    listed = [{"index": index, "text": output, "finish_reason": "stop"} for index, output in enumerate(outputs)]
    return {"id": "x", "object": "text_completion", "choices": listed[::-1]}


def _vectors(outputs: Sequence[Any]) -> Any:
    listed = [{"object": "embedding", "index": index, "embedding": output} for index, output in enumerate(outputs)]
    return {"object": "list", "data": listed[::-1]}


def _wrong_numbers(member: str, output: dict[str, Any]) -> tuple[tuple[Any, str], ...]:
    def listed(*indexes: Any) -> Any:
        return {member: [{**output, "index": index} for index in indexes]}

    return (
        (listed(0), "1 outputs for 2 inputs"),
        (listed(0, 1, 2), "3 outputs for 2 inputs"),
        (listed(0, 0), "two outputs with the index 0"),
        (listed(0, 2), "an output with the index 2 for 2 inputs"),
        (listed(0, 10**4000), "an output with the index 10{1,200}…? for 2 inputs"),
        (listed(0, "1"), "an output without an index"),
        ({member: [output, output]}, "an output without an index"),
        ({member: {"0": output}}, "dict instead of a list"),
        ({member: None}, "null instead of a list"),
        ({"other": []}, f"no object with a list of {member}"),
        (None, f"no object with a list of {member}"),
    )


def tensor(outputs: Sequence[Any], **other: Any) -> tuple[Any, bytes]:
    """Return an answer with one tensor. Outputs that aren't strings become invalid UTF-8. `other` overrides its members."""
    elements = [output.encode() if isinstance(output, str) else b"\xff" for output in outputs]
    data = join_elements(elements)
    named = {"name": "OUTPUT", "datatype": "BYTES", "shape": [len(outputs)]}
    said = {**named, "parameters": {"binary_data_size": len(data)}, **other}
    return {"model_name": "m", "outputs": [said]}, data


def read_tensor(body: bytes) -> Any:
    """Return the JSON of a request, with its tensor's strings as `texts`."""
    head, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    texts = [text.decode() for text in split_elements(body[end:])]
    return {**head, "texts": texts, "k": head.get("parameters", {}).get("k")}


def _write_tensor(answer: Any) -> tuple[bytes, Mapping[str, str]]:
    head, data = answer if isinstance(answer, tuple) else (answer, b"")
    text = json.dumps(head).encode()
    return text + data, {"Inference-Header-Content-Length": str(len(text))}


_TENSORS: tuple[tuple[Any, str], ...] = (
    (tensor(["a"]), "1 outputs for 2 inputs"),
    (tensor(["a", "b", "c"]), "3 outputs for 2 inputs"),
    (tensor(["a"], shape=[2]), "1 outputs for 2 inputs"),
    (tensor(["a", "b", "c"], shape=[2]), "5 bytes of binary data more than 2 outputs"),
    (tensor(["a", "b"], datatype="FP32"), "an output of a datatype other than BYTES"),
    (tensor(["a", "b"], shape=[2, 2]), "an output of 2 dimensions"),
    (tensor(["a", "b"], shape=[]), "an output of an impossible shape"),
    (tensor(["a", "b"], shape=[-1]), "an output of an impossible shape"),
    (tensor(["a", "b"], shape=[1] * 33), "an output that is not a tensor"),
    (tensor(["a", "b"], shape=[10**4000]), "an output that is not a tensor"),
    (tensor(["a", "b"], parameters={}), "10 bytes of binary data, but does not say"),
    (tensor(["a", "b"], parameters={"binary_data_size": 9}), "10 bytes of binary data, but announces 9"),
    (tensor(["a", "b"], parameters={"binary_data_size": 10**4000}), "an output that is not a tensor"),
    ((tensor(["a", "b"])[0], tensor(["a", "b"])[1][:-1]), "9 bytes of binary data, but announces 10"),
    ((tensor(["a", "b"])[0], b"\xff" * 10), "binary data that ends in the middle of an output"),
    (({"outputs": []}, b""), "no object with one member in its outputs"),
    (({"outputs": tensor(["a"])[0]["outputs"] * 2}, b""), "no object with one member in its outputs"),
    ((None, b""), "no object with one member in its outputs"),
)

_PLAIN = (
    (["a"], "1 outputs for 2 inputs"),
    (["a", "b", "c"], "3 outputs for 2 inputs"),
    ({"outputs": "ab"}, "neither a list nor an object"),
    (None, "neither a list nor an object"),
)

SPEAKERS = {
    "list": Speaker("/batch", lambda body: list(body), list, _PLAIN, str.upper),
    "oip": Speaker(
        "/oip",
        lambda body: body["texts"],
        tensor,
        _TENSORS,
        str.upper,
        format="oip",
        read=read_tensor,
        write=_write_tensor,
    ),
    "openai-completions": Speaker(
        "/v1/completions",
        lambda body: body["prompt"],
        _choices,
        _wrong_numbers("choices", {"text": "a"}),
        str.upper,
        "m",
    ),
    "openai-embeddings": Speaker(
        "/v1/embeddings",
        lambda body: body["input"],
        _vectors,
        _wrong_numbers("data", {"embedding": [1]}),
        lambda text: [len(text), 0.5],
        "m",
    ),
}


def encoded(speaker: Speaker, outputs: Sequence[Any]) -> bytes:
    return speaker.write(speaker.answer(outputs))[0]
