import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import SettingError
from headway.load.generator import Payload
from headway.load.spec import (
    ALL,
    DEFAULT_INPUT,
    LoadSpec,
    Target,
    make_body,
    make_tensors,
    parse_keys,
    parse_mix,
    parse_target,
)

HERE = Target("127.0.0.1", 8000, "127.0.0.1:8000", "/v1/inference")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", HERE),
        ("127.0.0.1:8000", HERE),
        ("HTTP://127.0.0.1:8000/", HERE),
        ("http://gpu/api/inference?x=1", Target("gpu", 80, "gpu", "/api/inference?x=1")),
        ("http://[::1]:9/a", Target("::1", 9, "[::1]:9", "/a")),
        ("https://host", Target("host", 443, "host", "/v1/inference", tls=True)),
    ],
)
def test_a_url_says_where_to(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/", "'ftp' is not supported"),
        ("http://", "names no host"),
        ("http://host:port/", "is no URL: .*[Pp]ort"),
        ("http://host:99999/", "is no URL: .*[Pp]ort"),
        ("http://host/a b", "characters no URL has"),
        ("http://höst/", "characters no URL has"),
        ("http://host/a\r\nX: y", "characters no URL has"),
        ("http://[::1/", "is no URL"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        parse_target(url)


@given(st.text())
def test_any_url_is_taken_or_refused(url: str) -> None:
    try:
        target = parse_target(url)
    except SettingError:
        return
    assert target.path.startswith("/")
    assert f"{target.authority}{target.path}".isascii()
    assert not any(c.isspace() for c in f"{target.authority}{target.path}")


def test_a_mix_gives_weights_in_order() -> None:
    assert list(parse_mix("enterprise=5, paid=25,free=70.5").items()) == [
        ("enterprise", 5.0),
        ("paid", 25.0),
        ("free", 70.5),
    ]
    assert parse_mix("") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("paid", "'paid' is not a new TIER=WEIGHT"),
        ("paid=", "'paid='"),
        ("=5", "'=5'"),
        ("paid=x", "'paid=x'"),
        ("paid=-1", "'paid=-1'"),
        ("paid=nan", "'paid=nan'"),
        ("paid=inf", "'paid=inf'"),
        ("paid=1,paid=2", "'paid=2'"),
        ("pa\nid=1", "is not a new TIER=WEIGHT"),
        ("paid=0,free=0", "all weights are 0"),
    ],
)
def test_a_mix_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        parse_mix(text)


def test_keys_are_for_a_tier_or_for_all() -> None:
    assert parse_keys(["paid=abc", "base64=="], ["paid", "free"]) == {"paid": "abc", "": "base64=="}
    assert parse_keys([], []) == {}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["payed=secret"], "no tier 'payed'.*Use paid or free"),
        (["paid=secret", "paid=secret2"], "is given twice"),
        (["secret", "secret2"], "is given twice"),
        (["paid="], "is empty"),
        (["sec ret"], "no header can carry"),
        (["sec\r\nret"], "no header can carry"),
        ([""], "is empty"),
    ],
)
def test_keys_that_cannot_be_are_refused_and_not_shown(texts: list[str], says: str) -> None:
    with pytest.raises(SettingError, match=says) as caught:
        parse_keys(texts, ["paid", "free"])
    assert "ret" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text", "model", "content", "body", "member"),
    [
        ("/v1/inference", None, None, None, {"input": DEFAULT_INPUT}, "input"),
        ("/v1/inference", "hi", "m", None, {"input": "hi", "model": "m"}, "input"),
        ("/v1/predict?x", "hi", "m", None, {"input_data": "hi", "model_id": "m"}, "input_data"),
        ("/v1/completions", "hi", "m", None, {"prompt": "hi", "model": "m"}, "prompt"),
        ("/v1/inference", None, None, b'{"input": "a", "parameters": {}}', {"input": "a", "parameters": {}}, "input"),
        ("/v1/inference", "hi", None, b'{"input": "a", "n": 1}', {"input": "hi", "n": 1}, "input"),
        ("/v1/predict", None, None, b'{"model_id": "m", "input_data": "a"}', {"model_id": "m", "input_data": "a"}, "input_data"),
        ("/v2/models/m/infer", None, None, b'{"inputs": []}', {"inputs": []}, ""),
        ("/v1/embeddings", None, None, b'{"input": ["a", "b"]}', {"input": ["a", "b"]}, ""),
    ],
)  # fmt: skip
def test_the_body_suits_the_route(
    path: str, text: str | None, model: str | None, content: bytes | None, body: dict[str, Any], member: str
) -> None:
    assert make_body(path, text, model, content) == (body, member)


@pytest.mark.parametrize("content", [b"", b"[]", b'"text"', b"{", b'{"a": "\xff"}'])
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(SettingError, match="is not a JSON object"):
        make_body("/v1/inference", None, None, content)


def test_a_route_that_asks_for_a_model_gets_one() -> None:
    with pytest.raises(SettingError, match=r"--model.*asks for a model"):
        make_body("/v1/predict", "hi", None, None)


def test_tensors_are_zeros_of_their_shapes_with_their_data_behind_the_body() -> None:
    body, data = make_tensors(["FP32:8,4", "ids=INT64:8", "t=BYTES:8,1"])
    assert [(one["name"], one["datatype"], one["shape"]) for one in body["inputs"]] == [
        ("INPUT", "FP32", [8, 4]),
        ("ids", "INT64", [8]),
        ("t", "BYTES", [8, 1]),
    ]
    sizes = [one["parameters"]["binary_data_size"] for one in body["inputs"]]
    texts = data[sum(sizes[:2]) :]
    assert (data[: sum(sizes[:2])], sizes[:2]) == (bytes(128 + 64), [128, 64])
    assert texts == (len(DEFAULT_INPUT).to_bytes(4, "little") + DEFAULT_INPUT.encode()) * 8
    assert LoadSpec(target=HERE, rate=1.0, duration=1.0, body=body, data=data, member="").rows == 8


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["FP32"], "is not .* For example FP32:8,4"),
        (["FP32:"], "is not"),
        (["FP32:8,-1"], "is not"),
        (["FP32:0,4"], "is not"),
        (["FP31:8,4"], "is not .* Datatypes are BOOL"),
        (["JSON:1"], "is not"),
        (["FP32:8,4", "b=FP32:7,4"], "has 7 rows, and the first tensor 8"),
        (["FP32:65536,65536"], "of more than 1024 MiB"),
    ],
)
def test_tensors_that_are_none_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        make_tensors(texts)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ({"inputs": [{"name": "a", "shape": [3, 2], "datatype": "FP32", "data": [1] * 6}]}, 3),
        ({"inputs": [{"shape": []}]}, None),
        ({"inputs": ["a", "b"]}, None),
        ({"input": [[1, 2], [3, 4]]}, None),
    ],
)
def test_rows_are_told_by_the_shape_of_the_first_tensor(body: dict[str, Any], rows: int | None) -> None:
    assert LoadSpec(target=HERE, rate=1.0, duration=1.0, body=body, member="").rows == rows


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rate": 0.0}, "--rate = 0.0: must lie between 0.001"),
        ({"rate": math.nan}, "--rate = nan"),
        ({"rate": 1e9}, "--rate"),
        ({"duration": 0.0}, "--duration"),
        ({"duration": math.inf}, "--duration"),
        ({"rate": 1e6, "duration": 600_000.0}, "--duration.*600,000,000,000 requests"),
        ({"timeout": 0.0}, "--timeout"),
        ({"promise": 0.0}, r"--promise = 0.0: must lie between .* ms"),
        ({"connections": 0}, "--connections"),
        ({"expect": "lower"}, "--expect = 'lower': is not known. Use none, upper, echo"),
        ({"expect": "upper", "member": ""}, "--expect.*no text member"),
    ],
)
def test_an_order_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        LoadSpec(**{"target": HERE, "rate": 1.0, "duration": 1.0, **settings})


def test_without_a_mix_there_is_one_stream() -> None:
    assert LoadSpec(target=HERE, rate=1.0, duration=1.0).tiers == (ALL,)
    assert LoadSpec(target=HERE, rate=1.0, duration=1.0, mix={"paid": 1.0}).tiers == ("paid",)


TARGET = Target("h", 80, "h:80", "/v1/inference")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def payload(**settings: Any) -> Payload:
    return Payload(LoadSpec(**{"target": TARGET, "rate": 1.0, "duration": 1.0, **settings}), "n0")


def split(request: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert first == "POST /v1/inference HTTP/1.1"
    assert int(headers["Content-Length"]) == len(body)
    return headers, msgspec.json.decode(body)


@given(TEXTS, st.integers(0, 999_999_999))
def test_any_text_is_carried_whole_after_the_prefix(text: str, number: int) -> None:
    _, body = split(payload(body={"a": "%d", "input": text, "b": [text]}).request(number, 0))
    assert body == {"a": "%d", "input": f"n0-{number:09d} {text}", "b": [text]}


def test_headers_say_tier_or_key() -> None:
    both = payload(mix={"paid": 1.0, "free": 1.0}, keys={"paid": "100%secret"})
    paid, _ = split(both.request(1, 0))
    free, _ = split(both.request(1, 1))
    assert (paid["Authorization"], paid.get("X-Request-Tier")) == ("Bearer 100%secret", None)
    assert (free.get("Authorization"), free["X-Request-Tier"]) == (None, "free")


def test_a_key_for_all_goes_with_the_tier_and_without_a_mix_none_is_sent() -> None:
    headers, _ = split(payload(mix={"paid": 1.0}, keys={"": "secret"}).request(1, 0))
    assert (headers["Authorization"], headers["X-Request-Tier"]) == ("Bearer secret", "paid")
    headers, _ = split(payload().request(1, 0))
    assert "X-Request-Tier" not in headers
    assert "Authorization" not in headers


def test_a_body_with_nothing_to_vary_is_sent_as_it_is() -> None:
    sent = payload(body={"inputs": ["100%"]}, member="")
    assert sent.request(1, 0) == sent.request(2, 0)
    assert split(sent.request(1, 0))[1] == {"inputs": ["100%"]}


def test_data_follow_the_body_with_the_length_of_that_in_the_head() -> None:
    data = b"%\0\r\n\r\n%d"
    head, _, sent = payload(body={"inputs": []}, data=data, member="").request(1, 0).partition(b"\r\n\r\n")
    lines = dict(line.split(": ", 1) for line in head.decode("ascii").split("\r\n")[1:])
    length = int(lines["Inference-Header-Content-Length"])
    assert lines["Content-Type"] == "application/octet-stream"
    assert int(lines["Content-Length"]) == len(sent)
    assert (msgspec.json.decode(sent[:length]), sent[length:]) == ({"inputs": []}, data)


@given(TEXTS, st.integers(0, 999_999_999), st.sampled_from(["upper", "echo"]))
def test_only_the_answer_to_its_own_input_is_right(text: str, number: int, expect: str) -> None:
    asked = payload(body={"input": text}, expect=expect)
    own = split(asked.request(number, 0))[1]["input"]
    other = split(asked.request((number + 1) % 10**9, 0))[1]["input"]

    def answer(said: str) -> bytes:
        return msgspec.json.encode({"output": said.upper() if expect == "upper" else said, "request_id": "req_1"})

    assert asked.is_right(number, answer(own))
    assert not asked.is_right(number, answer(other))
    assert not asked.is_right(number, answer(own + "x"))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"output": 1}', b'{"outputs": "x"}', b"\xff", b'{"output": "'])
def test_what_is_no_answer_is_not_right(body: bytes) -> None:
    assert not payload(expect="echo").is_right(1, body)
