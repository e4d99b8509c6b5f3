"""Long bodies are read in short steps that don't block the event loop, and no nested values are built from them."""

import contextlib
import functools
import gc
import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Settings
from headway.core import json_pages
from headway.core.json_pages import MAX_LEVELS, SHORT, Pages, Steps, TooDeep, drop_strings, finish, members, split
from headway.core.values import NoValue, read, read_in_steps
from headway.doors.entrance import CHARGED
from headway.errors import BadRequest, RequestError
from headway.http.inference import codecs
from headway.http.openai.chat import MOST_PARTS
from headway.http.openai.members import MOST_MESSAGES, MOST_VALUES, parameters_reader, read_members
from headway.oip.parameters import KNOWN
from headway.oip.rest import bodies as oip_bodies
from tests.fuzz.dearest import MOST_AT_ONCE, Dear, at_once, bodies, steps_of
from tests.http.stand import Stand, on_stand, post
from tests.http.test_budget import Counts

SIZE = 60_000
MOST_BYTECODES = 100_000
"""The limit for one step; it takes about 2 ms."""
SMALL = {f"{one.name} at {one.path}": one for one in bodies(SIZE // 10)}


@functools.cache
def dear_bodies(size: int = SIZE) -> dict[str, Dear]:
    """Return expensive bodies by name. The process that reads them builds them."""
    return {f"{one.name} at {one.path}": one for one in bodies(size)}


def steppings(steps: Steps[Any]) -> tuple[list[int], list[int]]:
    """Return how many bytecodes each step took, and how many bytes it read."""
    bytecodes, sizes = list[int](), list[int]()
    with contextlib.suppress(StopIteration, RequestError):
        while True:
            with Counts(lambda path: True) as counts:
                try:
                    sizes.append(next(steps))
                finally:
                    bytecodes.append(counts.bytecodes.total())
    return bytecodes, sizes


@pytest.mark.parametrize("name", SMALL)
def test_no_step_of_the_dearest_bodies_takes_long(name: str) -> None:
    dear = dear_bodies()[name]
    bytecodes, sizes = steppings(steps_of(dear))
    assert 0 < max(bytecodes) <= MOST_BYTECODES
    assert max(sizes, default=0) <= MOST_AT_ONCE


LONG_TEXTS = [
    name
    for name, one in SMALL.items()
    if len(drop_strings(b"", one.body)) < 400 < len(one.body) and one.name != "numbers in a text"
]
"""Bodies that consist of one long string. A step decodes it in one go, but only once."""


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_no_step_goes_through_a_long_text_twice(name: str) -> None:
    """Peak memory shows it: a step may build one string, at four bytes per character outside the BMP, and its JSON."""
    dear = dear_bodies(200_000)[name]
    steps, most = steps_of(dear), 0
    tracemalloc.start()
    try:
        with contextlib.suppress(StopIteration, RequestError):
            while True:
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                try:
                    next(steps)
                finally:
                    most = max(most, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert most <= 5.1 * len(dear.body)


@pytest.mark.parametrize("name", SMALL)
def test_a_long_body_has_the_outcome_that_it_would_have_at_once(name: str) -> None:
    dear = dear_bodies()[name]
    try:
        found = finish(steps_of(dear))
    except RequestError:
        return  # Some limits apply only to long bodies.
    short = at_once(dear)
    assert (found.model, found.input, found.parameters) == (short.model, short.input, short.parameters)


_LEAVES = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=6),
    max_leaves=60,
)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pages, "PAGE", 16)


@settings(max_examples=100)
@given(_TREES, st.sampled_from([(",", ":"), (" , ", " : ")]), st.data())
def test_pages_of_a_text_are_valid_as_the_whole_is(tree: Any, separators: tuple[str, str], data: st.DataObject) -> None:
    text = json.dumps(tree, separators=separators).encode()
    cut = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:cut]
        + data.draw(st.sampled_from([b"", b",", b"]", b"}", b"[", b"{", b'"', b"0", b":", b"\\"]))
        + text[cut + 1 :]
    )
    for one in (text, damaged):
        assert _is_valid(one, reach=16) == _is_valid(one, reach=1 << 20) == _decodes(one)


def _decodes(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _is_valid(text: bytes, reach: int) -> bool:
    try:
        for _ in Pages(text, reach=reach):
            pass
    except msgspec.DecodeError:
        return False
    return True


@pytest.mark.usefixtures("small_pages")
def test_a_text_is_split_as_a_decoder_would() -> None:
    tree = {"a,]": [1, [2, {"b": '}\\"'}], []], "": {}, "long": "x" * 100 + '"', "c": [[[[["deep"], 1], 2], 3], 4]}
    text = json.dumps(tree).encode()
    found = finish(members(text, 10))
    assert found is not None
    assert {name: json.loads(value) for name, value in found.items()} == tree
    for name, one in tree.items():
        if isinstance(one, list):
            parts = finish(split(found[name], 10))
            assert parts is not None
            assert [json.loads(part) for part in parts] == one
    assert finish(split(b"[]", 1)) == []
    assert finish(split(b"[1,2]", 1)) is None


def test_the_place_of_what_is_no_json_is_that_in_the_whole_text() -> None:
    text = b"[%b,nul]" % b",".join([b"0"] * 50)
    told = []
    for reach in (16, 1 << 20):
        with pytest.raises(msgspec.DecodeError) as caught:
            for _ in Pages(text, reach=reach):
                pass
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_what_is_nested_too_deeply_is_refused_before_it_is_walked() -> None:
    for text in (b"[" * 500_000, b"[" * 500_000 + b"]" * 500_000, b"[0," * (MAX_LEVELS + 1) + b"]" * (MAX_LEVELS + 1)):
        with pytest.raises(TooDeep):
            for _ in Pages(text, reach=64):
                pass


@pytest.mark.parametrize(
    "text", [rb"\u00e9", rb"\ud83d\ude00", rb"\ud83d", rb"\ude00", rb"\u0000", rb"\\\\u0000", rb"\n\\", "é😀".encode()]
)
def test_escapes_of_a_long_text_mean_what_they_do_in_a_short_one(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.core.values.PAGE", 40)
    for before in range(45):
        whole = b'["%b%b"]' % (b"x" * before, text)
        assert _value(lambda: finish(read_in_steps(whole))) == _value(lambda: read(whole))  # noqa: B023


def _value(make: Any) -> Any:
    try:
        return make()
    except (NoValue, msgspec.DecodeError) as exc:
        return type(exc)


def _listed(before: str, one: str, count: int, after: str) -> bytes:
    return f"{before}{','.join([one] * count)}{after}".encode()


_MESSAGE = '{"role":"user","content":"a"}'
_PART = '{"type":"text","text":""}'
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_MESSAGES, _TOO_MANY = '{"messages":[', f"more than {MOST_MESSAGES} messages"
_PARTS = f"at most {MOST_PARTS} are allowed; join some of them - at `$.messages[0].content`"
BOUNDS = [
    (_CHAT, _MESSAGES, _MESSAGE, MOST_MESSAGES + 1, "]}", _TOO_MANY),
    (_RESPONSES, '{"input":[', _MESSAGE, MOST_MESSAGES + 1, "]}", _TOO_MANY),
    (_RESPONSES, '{"input":[{"role":"user","x":[', "0", MOST_VALUES + 2, "]}]}", f"more than {MOST_VALUES} values"),
    (_CHAT, _MESSAGES + '{"role":"user","content":[', _PART, MOST_PARTS + 1, "]}]}", _PARTS),
    (_RESPONSES, '{"input":"a","metadata":{"a":"', "b", SHORT, '"}}', f"at most {SHORT} are allowed - at `$.metadata`"),
    ("/v1/embeddings", '{"input":[', '"aaa"', 2049, "]}", "more than 2048 texts"),
    ("/v1/inference", '{"inputs":[', '"aaaaaaaaa"', 1025, "]}", "more than 1024 members"),
]


async def test_bounds_of_long_bodies_are_told(stand: Stand) -> None:
    for path, before, one, count, after, why in BOUNDS:
        answer = await stand.ask(post(_listed(before, one, count, after), path))
        assert answer.status == 413, (path, before)
        assert why in json.dumps(json.loads(answer.body), ensure_ascii=False), answer.body
    members = ",".join(f'"{one}":"{one}"' for one in range(1100))
    for body, path, says in (
        (_listed('{"input":[', "1000", 3000, "]}"), "/v1/embeddings", b"token arrays are not supported"),
        (f'{{"input":"a",{members}}}', "/v1/inference", b"more than 1024 members"),
    ):
        answer = await stand.ask(post(body, path))
        assert (answer.status, says in answer.body) == (400, True)


@on_stand(keys={"k": {"rate": 60.0, "burst": 20.0}}, whole=True)
async def test_json_outside_texts_counts_by_its_pages(stand: Stand) -> None:
    async def left(body: bytes | str) -> int:
        answer = await stand.ask(post(body, "/v1/inference", "Authorization: Bearer k"))
        found = re.search(r";r=(\d+)", answer.header["ratelimit"])
        assert found is not None
        return int(found[1])

    assert await left('{"input":"a"}') == 19
    assert await left(b'{"input":"%b"}' % (b"a" * 4 * CHARGED)) == 18
    await left(_listed('{"input":[', "0", 2 * CHARGED + 99, "]}"))  # Its pages are charged only after its answer.
    assert await left('{"input":"a"}') == 18 - 1 - 4 - 1
    deep = "[" * 24 + "]" * 24
    await left(_listed('{"input":"a","parameters":{"a":[', deep, 800, "]}}"))
    assert await left('{"input":"a"}') <= 12 - 1 - 5 - 1, "deep nesting takes long to read"


@pytest.mark.parametrize("between", [b" ", b"1", b"x"])
def test_a_long_text_without_commas_is_given_up_before_it_is_read(between: bytes) -> None:
    """A megabyte of white space used to be a single page, which took 30 ms."""
    with pytest.raises(msgspec.DecodeError, match="more than 131072 bytes without a comma"):
        finish(read_in_steps(b"[" + between * 200_000 + b"]"))
    assert finish(read_in_steps(b"[" + b" " * 100_000 + b"]")) == b"[" + b" " * 100_000 + b"]"


TREES = {
    "lists": b"[" + b",".join([b"[" * 20 + b"]" * 20] * 4_000) + b"]",
    "objects": b"[" + b",".join([b"{}"] * 40_000) + b"]",
}
READERS: dict[str, Callable[[bytes], object]] = {
    "native": lambda tree: codecs.inference(Settings()).read(b'{"input":"x","parameters":{"x":' + tree + b"}}"),
    "values": lambda tree: codecs.inference(Settings()).read_value(b'{"input":[],"parameters":{"x":' + tree + b"}}"),
    "OpenAI": lambda tree: parameters_reader(Settings())(read_members(b'{"tools":' + tree + b',"logit_bias":{}}')),
    "OIP": lambda tree: oip_bodies.parameters_of(msgspec.Raw(b'{"x":' + tree + b',"timeout":0}'), 64, 3),
}


@functools.cache
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
            oip_bodies.parameters_of(raw, 64, 3)

    assert peak(read) < 5 * len(bytes(raw))
