"""Dialects as pure functions: the requests they write, and how they read answers."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import protos
from headway.core.values import shown
from headway.dialects import AUTO
from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs
from headway.dialects.table import DIALECTS, NamedInputs, TextList, reach
from headway.errors import SettingError
from headway.model import ALL_PARAMETERS, ItemResult, TokenCount, ValueKind
from tests.backends.speakers import SPEAKERS, encoded, tensor

OPENAI = ("openai-completions", "openai-embeddings")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["index", "text", "embedding"]), inner),
    max_leaves=6,
)


def dialect(name: str) -> Dialect:
    return SPEAKERS[name].remote(f"http://h{SPEAKERS[name].path}").dialect


def said(name: str, *inputs: str, parameters: bytes = b"") -> Any:
    return json.loads(dialect(name).encode(inputs, [parameters] * len(inputs)).body)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h/batch", "list"),
        ("http://h", "list"),
        ("http://h/v1/completions", "openai-completions"),
        ("https://h/some/v1/completions?key=x", "openai-completions"),
        ("http://h/v1/embeddings", "openai-embeddings"),
        ("http://h/completions", "list"),
    ],
)
def test_the_path_tells_the_dialect(url: str, name: str) -> None:
    found = reach(url, AUTO, "m")
    assert type(found.dialect) is DIALECTS[name]
    assert found.url == url
    assert "key" not in repr(found)


@pytest.mark.parametrize(
    ("url", "name", "model", "what"),
    [
        ("http://h/v1/chat/completions", AUTO, "m", "`?remote_format.*takes a single conversation.*/v1/completions"),
        ("http://h/v1/completions", AUTO, "", "remote_model.*openai-completions must name a model"),
        ("http://h/x", "openai-embeddings", "", "remote_model.*openai-embeddings must name a model"),
    ],
)
def test_what_does_not_fit_the_dialect_is_refused(url: str, name: str, model: str, what: str) -> None:
    with pytest.raises(SettingError, match=what):
        reach(url, name, model)


def test_inputs_go_in_one_request_with_the_parameters_that_they_share() -> None:
    wished = b'{"max_tokens":5,"temperature":0.30,"n":3,"stream":true,"prompt":"x","model":"y","messages":[]}'
    prompts = {"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "temperature": 0.3}
    assert said("openai-completions", "a", "b", parameters=wished) == prompts
    wished = b'{"dimensions": 2, "encoding_format": "base64", "input": "x"}'
    expected = {"model": "m", "input": ["a", "b"], "encoding_format": "float", "dimensions": 2}
    assert said("openai-embeddings", "a", "b", parameters=wished) == expected
    assert json.loads(TextList().encode(["a", "b"], [b""] * 2).body) == ["a", "b"]
    assert json.loads(NamedInputs().encode(["a", "b"], [b""] * 2).body) == {"inputs": ["a", "b"]}
    own = {"inputs": ["a", "b"], "parameters": [{}, {"k": 1}]}
    assert json.loads(NamedInputs().encode(["a", "b"], [b"", b'{"k":1}']).body) == own
    assert not TextList().signature.sees
    assert all(one.signature.sees == ALL_PARAMETERS for one in (NamedInputs(), *map(dialect, OPENAI)))


def test_embeddings_are_json_values_as_they_were_written() -> None:
    body = b'{"data":[{"index":1,"embedding":[3.00, -1e-7 ]},{"embedding": [0.1],"index":0}]}'
    assert dialect("openai-embeddings").decode(body, 2) == [ItemResult(b"[0.1]"), ItemResult(b"[3.00, -1e-7 ]")]
    assert dialect("openai-embeddings").signature.gives is ValueKind.JSON


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, one in SPEAKERS.items() for case in one.wrong])
def test_an_answer_that_is_not_one_output_for_each_input_is_refused(name: str, case: tuple[Any, str]) -> None:
    answer, what = case
    with pytest.raises(NoOutputs, match=what):
        SPEAKERS[name].decoded(answer, 2)


@pytest.mark.parametrize("name", [name for name in SPEAKERS if name != "oip"])
def test_a_body_that_is_cut_or_no_json_is_refused(name: str) -> None:
    good = encoded(SPEAKERS[name], [SPEAKERS[name].gives(text) for text in ("a", "b")])
    for body in (*(good[:end] for end in range(len(good))), good + b"]", b"\xff", b"<html>", b"[" * 100_000):
        with pytest.raises(NoOutputs):
            dialect(name).decode(body, 2)
    for number in ("NaN", "Infinity", "1e999", "-1e999"):
        body = f'{{"data":[{{"index":0,"embedding":[1,{number}]}}]}}'.encode()
        with contextlib.suppress(NoOutputs):
            assert dialect("openai-embeddings").decode(body, 1)[0].fault
    body = b'{"outputs":[{"name":"\xe7"}]}'
    with pytest.raises(NoOutputs, match="something that is not JSON"):
        dialect("oip").decode(body, 1, len(body))


@pytest.mark.parametrize(
    ("name", "output", "what"),
    [
        *(
            ("list", output, f"answered {kind} for this input, expected a string")
            for output, kind in ((None, "null"), (False, "bool"), (-1.5, "number"), ([1], "list"), ({"a": 1}, "dict"))
        ),
        ("openai-completions", None, "a choice without a text"),
        ("openai-completions", 5, "a choice without a text"),
        ("openai-embeddings", None, "null for this input, expected a list of numbers"),
        ("openai-embeddings", "AACAPw==", "string for this input, expected a list of numbers"),
        ("openai-embeddings", [], "an empty list"),
        ("openai-embeddings", [1, "a"], "a list of something else"),
        ("openai-embeddings", [1, None], "a list of something else"),
        ("openai-embeddings", [[1]], "a list of something else"),
    ],
)
def test_an_output_of_another_kind_fails_its_input_alone(name: str, output: Any, what: str) -> None:
    well = SPEAKERS[name].gives("a")
    first, second = SPEAKERS[name].decoded(SPEAKERS[name].answer([output, well]), 2)
    assert first.fault
    assert first.output is None
    assert what in (first.error or "")
    assert second.output is not None


@pytest.mark.parametrize("name", OPENAI)
@given(values=st.lists(VALUES, max_size=4), expected=st.integers(0, 4))
def test_whatever_the_list_holds_is_one_item_each_or_none(name: str, values: list[Any], expected: int) -> None:
    member = "choices" if name == "openai-completions" else "data"
    try:
        items = dialect(name).decode(json.dumps({member: values}).encode(), expected)
    except NoOutputs:
        return
    assert sorted(value["index"] for value in values) == list(range(expected))
    assert len(items) == expected


@pytest.mark.parametrize("name", SPEAKERS)
@given(outputs=st.lists(st.text(), min_size=1, max_size=5))
def test_outputs_come_in_the_order_of_the_inputs_whatever_that_of_the_answer(name: str, outputs: list[str]) -> None:
    speaker = SPEAKERS[name]
    given = [speaker.gives(text) for text in outputs]
    items = speaker.decoded(speaker.answer(given), len(given))
    assert [
        item.output if isinstance(item.output, str) else json.loads(shown(item.output or b"0")) for item in items
    ] == given


@pytest.mark.parametrize("name", SPEAKERS)
@given(body=st.binary(max_size=60))
def test_no_body_makes_a_dialect_raise_anything_else(name: str, body: bytes) -> None:
    with contextlib.suppress(NoOutputs):
        dialect(name).decode(body, 1)


def test_the_models_of_an_api_over_grpc_are_those_of_its_index() -> None:
    kind = protos.message_classes(protos.OPEN_INFERENCE, "RepositoryIndex")[1]
    index = kind()
    index.models.add(name="upper")
    remote = reach("grpc://h:1/other")
    assert remote.models is not None and remote.models.place.endswith("/RepositoryIndex")
    assert remote.dialect.models(index.SerializeToString()) == ["upper"]
    assert remote.dialect.models(b"\xff" * 9) == []


def test_metadata_with_a_size_that_cannot_be_is_refused_in_few_words() -> None:
    shape = [-1, 10**4000]
    metadata = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": shape}], "outputs": []}
    with pytest.raises(BadMetadata, match="not the metadata of a model") as refused:
        dialect("oip").learn(json.dumps(metadata).encode())
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}, TokenCount(7, 3)),
        ({"prompt_tokens": 3, "total_tokens": 3}, TokenCount(3, 3)),
        ({"prompt_tokens": 6, "completion_tokens": None, "total_tokens": 6}, TokenCount(6, 6)),
        ({"total_tokens": 9}, TokenCount(9, 0)),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),
        *(
            (usage, None)
            for usage in ({"prompt_tokens": -1}, {"prompt_tokens": 1 << 40}, {"prompt_tokens": "3"}, "much", None)
        ),
    ],
)
def test_the_usage_of_a_whole_answer_is_with_its_first_item(name: str, usage: Any, tokens: TokenCount | None) -> None:
    answer = json.loads(encoded(SPEAKERS[name], [SPEAKERS[name].gives(text) for text in ("a", "b")]))
    items = dialect(name).decode(json.dumps({**answer, "usage": usage}).encode(), 2)
    assert [item.tokens for item in items] == [tokens, None]
    assert all(item.output is not None for item in items)
    listed = dialect("list").decode(json.dumps({"outputs": ["A", "B"], "usage": usage}).encode(), 2)
    assert listed == [ItemResult("A", tokens=tokens), ItemResult("B")]


@pytest.mark.parametrize(
    ("told", "tokens"), [(7, TokenCount(7)), (0, None), (-1, None), (1 << 40, None), ("7", None), (None, None)]
)
def test_another_headways_tokens_are_with_the_first_item(told: Any, tokens: TokenCount | None) -> None:
    both = [ItemResult("A", tokens=tokens), ItemResult("B")]
    own = {"request_id": "x", "outputs": ["A", "B"], "metadata": {"tokens_used": told, "model_version": "1"}}
    assert dialect("list").decode(json.dumps(own).encode(), 2) == both
    said, data = tensor(["A", "B"])
    assert SPEAKERS["oip"].decoded(({**said, "parameters": {"tokens_used": told}}, data), 2) == both
    if isinstance(told, int):
        over_grpc = protos.message("inference.ModelInferResponse")()
        over_grpc.outputs.add(name="output", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"A", b"B"])
        over_grpc.parameters["tokens_used"].int64_param = told
        assert reach("grpc://h:8001/m").dialect.decode(over_grpc.SerializeToString(), 2) == both
