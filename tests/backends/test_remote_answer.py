"""How the answer of a remote API is read: what it may be, and what it may cost."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.backends import remote_answer
from headway.backends.remote_answer import NoOutputs, read
from headway.model import Item

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUES, max_size=6), st.sampled_from(["", *remote_answer.MEMBERS]), st.integers(0, 6))
def test_each_text_is_an_output_and_all_else_a_fault_of_its_own(values: list[Any], member: str, expected: int) -> None:
    body = json.dumps({"took": [3], member: values} if member else values).encode()
    if len(values) != expected:
        with pytest.raises(NoOutputs, match=f"{len(values)} outputs for {expected} inputs"):
            read(body, expected)
        return
    for item, value in zip(read(body, expected), values, strict=True):
        assert item == Item(value) if isinstance(value, str) else (item.output is None and item.fault)


@pytest.mark.parametrize(
    ("element", "kind"),
    [("null", "null"), ("true", "bool"), (" false", "bool"), ("-1.5", "number"), ("[1]", "list"), ('{"a":1}', "dict")],
)
def test_the_kind_of_what_is_no_text_is_told(element: str, kind: str) -> None:
    [item, good] = read(f'[{element}, "a"]'.encode(), 2)
    assert item.error == f"the remote API answered {kind} for this input, expected a string"
    assert good == Item("a")


def test_the_first_member_by_name_counts() -> None:
    assert read(b'{"predictions":["p"],"outputs":["o"],"results":["r"]}', 1) == [Item("o")]


@pytest.mark.parametrize("body", [b"", b"[", b'["a"', b'["a"]]', b'{"outputs":["a"}', b'["\xff"]', b"[" * 100_000])
def test_what_is_no_json_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(NoOutputs, match="something that is no JSON"):
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
