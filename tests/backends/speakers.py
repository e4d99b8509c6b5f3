"""How a remote API of each dialect answers: with any outputs, or wrong in one way of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.dialects import Remote, reach


@dataclass(frozen=True)
class Speaker:
    """Remote API of one dialect.

    Attributes:
        path: path of its URL, which tells the dialect.
        inputs: reads the inputs of a body.
        answer: writes an answer with these outputs, any JSON values.
        wrong: answers to two inputs, each with a part of the message that says what is wrong with it.
        gives: output for a text, as the dialect reads it.
    """

    path: str
    inputs: Callable[[Any], list[str]]
    answer: Callable[[Sequence[Any]], Any]
    wrong: tuple[tuple[Any, str], ...]
    gives: Callable[[str], Any]
    model: str = ""

    def remote(self, url: str) -> Remote:
        """The API, when its server is at a URL."""
        return reach(url, model=self.model)


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
        (listed(0, -1), "an output with the index -1 for 2 inputs"),
        (listed(0, "1"), "an output without an index"),
        ({member: [output, output]}, "an output without an index"),
        ({member: ["a", "b"]}, "an output without an index"),
        ({member: {"0": output}}, "dict instead of a list"),
        ({member: None}, "null instead of a list"),
        ({"other": []}, f"no object with a list of {member}"),
        (["a", "b"], f"no object with a list of {member}"),
        (None, f"no object with a list of {member}"),
    )


_PLAIN = (
    (["a"], "1 outputs for 2 inputs"),
    (["a", "b", "c"], "3 outputs for 2 inputs"),
    ({"outputs": "ab"}, "neither a list nor an object"),
    (None, "neither a list nor an object"),
)

SPEAKERS = {
    "list": Speaker("/batch", lambda body: list(body), list, _PLAIN, str.upper),
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
"""Remote APIs by the name of their dialect."""


def encoded(speaker: Speaker, outputs: Sequence[Any]) -> bytes:
    """Body of the answer with these outputs."""
    return json.dumps(speaker.answer(outputs)).encode()
