"""No door builds what is nested in a body: a text of 400 kB may stand for 200,000 objects, and everybody would wait for them."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from headway.config import Settings
from headway.errors import BadRequest
from headway.http.inference import codecs
from headway.http.openai.members import parameters_reader, read_members
from headway.oip.parameters import KNOWN
from headway.oip.rest import bodies

TREES = {
    "lists": b"[" + b",".join([b"[" * 20 + b"]" * 20] * 10_000) + b"]",
    "objects": b"[" + b",".join([b"{}"] * 100_000) + b"]",
}
READERS: dict[str, Callable[[bytes], object]] = {
    "native": lambda tree: codecs.inference(Settings()).read(b'{"input":"x","parameters":{"x":' + tree + b"}}"),
    "values": lambda tree: codecs.inference(Settings()).read_value(b'{"input":[],"parameters":{"x":' + tree + b"}}"),
    "OpenAI": lambda tree: parameters_reader(Settings())(read_members(b'{"tools":' + tree + b',"logit_bias":{}}')),
    "OIP": lambda tree: bodies.parameters_of(msgspec.Raw(b'{"x":' + tree + b',"timeout":0}'), 64, 3),
}


@cache
def built(tree: bytes) -> int:
    return peak(lambda: json.loads(tree))


def peak(act: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("door", READERS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_of_parameters_nothing_is_built(door: str, tree: bytes) -> None:
    assert built(tree) > 8 * len(tree), "what is not to be built"
    assert peak(lambda: READERS[door](tree)) < 5 * len(tree)


@pytest.mark.parametrize("name", KNOWN)
def test_of_a_parameter_of_the_protocol_nothing_is_built(name: str) -> None:
    raw = msgspec.Raw(b'{"' + name.encode() + b'":' + TREES["lists"] + b"}")

    def read() -> None:
        with pytest.raises(BadRequest, match=r"not an integer|not a boolean"):
            bodies.parameters_of(raw, 64, 3)

    assert peak(read) < 5 * len(bytes(raw))
