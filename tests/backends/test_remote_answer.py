"""Reading of a remote API's answer: its forms, and its cost."""

from __future__ import annotations

import asyncio
import json
import signal
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends.remote import reader
from headway.dialects.dialect import NoOutputs
from headway.dialects.texts import MEMBERS, TextList, read
from headway.model import ItemResult

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=6), st.sampled_from(["", *MEMBERS]), st.integers(0, 6))
def test_each_text_is_an_output_and_all_else_a_fault_of_its_own(values: list[Any], member: str, expected: int) -> None:
    body = json.dumps({"took": [3], member: values} if member else values).encode()
    if len(values) != expected:
        with pytest.raises(NoOutputs, match=f"{len(values)} outputs for {expected} inputs"):
            read(body, expected)
        return
    for item, value in zip(read(body, expected), values, strict=True):
        assert item == ItemResult(value) if isinstance(value, str) else (item.output is None and item.fault)


@pytest.mark.parametrize(
    ("element", "kind"),
    [("null", "null"), ("true", "bool"), (" false", "bool"), ("-1.5", "number"), ("[1]", "list"), ('{"a":1}', "dict")],
)
def test_the_kind_of_what_is_no_text_is_told(element: str, kind: str) -> None:
    [item, good] = read(f'[{element}, "a"]'.encode(), 2)
    assert item.error == f"the remote API answered {kind} for this input, expected a string"
    assert good == ItemResult("a")


def test_the_first_member_by_name_counts() -> None:
    assert read(b'{"predictions":["p"],"outputs":["o"],"results":["r"]}', 1) == [ItemResult("o")]


@pytest.mark.parametrize("body", [b"", b"[", b'["a"', b'["a"]]', b'{"outputs":["a"}', b'["\xff"]', b"[" * 100_000])
def test_what_is_no_json_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(NoOutputs, match="something that is not JSON"):
        read(body, 1)


BOMB = b",".join([b"{}"] * 1_000_000)


@pytest.mark.parametrize(
    "body", [b"[" + BOMB + b"]", b'{"outputs":[' + BOMB + b"]}", b'{"outputs":["a"],"more":[' + BOMB + b"]}"]
)
def test_what_nobody_asked_for_is_not_built(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NoOutputs, match=r"another number of outputs than 8|1 outputs for 8 inputs"):
            read(body, 8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even short answers are read in a process of their own."""
    monkeypatch.setattr(reader, "APART_FROM", 0)


BODIES = [b'["a"]', b'{"outputs":[null]}', b'["\\ud83d\\ude00"]', b"[]", b"[", b'{"a":1}', b"[" + BOMB + b"]"]


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_a_process_of_its_own_reads_the_same() -> None:
    def here(body: bytes) -> object:
        try:
            return read(body, 1)
        except NoOutputs as exc:
            return str(exc)

    async def apart(body: bytes) -> object:
        try:
            return await reader.read(TextList(), body, 1)
        except NoOutputs as exc:
            return str(exc)

    async def main() -> list[object]:
        return [await apart(body) for body in BODIES]

    assert asyncio.run(main()) == [here(body) for body in BODIES]


@pytest.mark.processes
def test_a_long_answer_is_read_whole() -> None:
    texts = ["x" * 3_000_000, "é" * 1_000_000]

    async def main() -> list[ItemResult]:
        return await reader.read(TextList(), json.dumps(texts).encode(), 2)

    assert asyncio.run(main()) == [ItemResult(text) for text in texts]


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
async def test_a_reader_that_nobody_waits_for_any_more_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    start = asyncio.create_subprocess_exec

    async def starting(*_: str, **how: Any) -> asyncio.subprocess.Process:
        started.set_result(await start("sleep", "60", **how))
        return started.result()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    reading = asyncio.ensure_future(reader.read(TextList(), b'["a"]', 1))
    process = await started
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert process.returncode == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_a_reader_that_ends_before_it_has_said_all_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "true")
    with pytest.raises(NoOutputs, match="could not be read"):
        asyncio.run(reader.read(TextList(), b'["a"]', 1))


@pytest.mark.processes
@pytest.mark.usefixtures("any_length")
def test_where_no_reader_can_be_started_the_answer_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert asyncio.run(reader.read(TextList(), b'["a"]', 1)) == [ItemResult("a")]
