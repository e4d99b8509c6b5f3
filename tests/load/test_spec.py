from collections.abc import Callable
from functools import partial
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
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
order = partial(LoadSpec, target=HERE, rate=1.0, duration=1.0)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("127.0.0.1:8000", HERE),
        ("HTTP://127.0.0.1:8000/", HERE),
        ("http://gpu/api/inference?x=1", Target("gpu", 80, "gpu", "/api/inference?x=1")),
        ("http://[::1]:9/a", Target("::1", 9, "[::1]:9", "/a")),
        ("https://host", Target("host", 443, "host", "/v1/inference", tls=True)),
    ],
)
def test_a_url_says_where_to(url: str, target: Target) -> None:
    assert parse_target(url) == target


@given(st.text())
def test_any_url_is_taken_or_refused(url: str) -> None:
    try:
        target = parse_target(url)
    except SettingError:
        return
    assert target.path.startswith("/")
    assert f"{target.authority}{target.path}".isascii()
    assert not any(c.isspace() for c in f"{target.authority}{target.path}")


def test_a_mix_gives_weights_in_order_and_keys_are_for_a_tier_or_for_all() -> None:
    mix = parse_mix("enterprise=5, paid=25,free=70.5")
    assert list(mix.items()) == [("enterprise", 5.0), ("paid", 25.0), ("free", 70.5)]
    assert (order().tiers, order(mix=mix).tiers) == ((ALL,), tuple(mix))
    assert parse_keys(["paid=abc", "base64=="], ["paid", "free"]) == {"paid": "abc", "": "base64=="}


@pytest.mark.parametrize(
    ("path", "text", "model", "content", "body", "member"),
    [
        ("/v1/inference", None, None, None, {"input": DEFAULT_INPUT}, "input"),
        ("/v1/inference", "hi", "m", None, {"input": "hi", "model": "m"}, "input"),
        ("/v1/predict?x", "hi", "m", None, {"input_data": "hi", "model_id": "m"}, "input_data"),
        ("/v1/completions", "hi", "m", None, {"prompt": "hi", "model": "m"}, "prompt"),
        ("/v1/inference", "hi", None, b'{"input": "a", "n": 1}', {"input": "hi", "n": 1}, "input"),
        ("/v2/models/m/infer", None, None, b'{"inputs": []}', {"inputs": []}, ""),
        ("/v1/embeddings", None, None, b'{"input": ["a", "b"]}', {"input": ["a", "b"]}, ""),
    ],
)
def test_the_body_suits_the_route(
    path: str, text: str | None, model: str | None, content: bytes | None, body: dict[str, Any], member: str
) -> None:
    assert make_body(path, text, model, content) == (body, member)


def test_tensors_are_zeros_of_their_shapes_with_their_data_behind_the_body() -> None:
    body, data = make_tensors(["FP32:8,4", "ids=INT64:8", "t=BYTES:8,1"])
    heads = [(each["name"], each["datatype"], each["shape"]) for each in body["inputs"]]
    assert heads == [("INPUT", "FP32", [8, 4]), ("ids", "INT64", [8]), ("t", "BYTES", [8, 1])]
    sizes = [each["parameters"]["binary_data_size"] for each in body["inputs"]]
    texts = data[sum(sizes[:2]) :]
    assert (data[: sum(sizes[:2])], sizes[:2]) == (bytes(128 + 64), [128, 64])
    assert texts == (len(DEFAULT_INPUT).to_bytes(4, "little") + DEFAULT_INPUT.encode()) * 8
    assert order(body=body, data=data, member="").rows == 8


@pytest.mark.parametrize("body", [{"inputs": [{"shape": []}]}, {"inputs": ["a", "b"]}, {"input": [[1, 2], [3, 4]]}])
def test_what_is_no_tensor_has_no_rows(body: dict[str, Any]) -> None:
    assert order(body=body, member="").rows is None


keys = partial(parse_keys, tiers=["paid", "free"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (partial(parse_target, url), says)
            for url, says in (
                ("ftp://host/", "'ftp' is not supported"),
                ("http://", "has no host"),
                ("http://host:99999/", "is not a URL: .*[Pp]ort"),
                ("http://host/a\r\nX: y", "characters that are not allowed in a URL"),
            )
        ),
        *(
            (partial(parse_mix, mix), says)
            for mix, says in (
                ("paid", "'paid' is not TIER=WEIGHT with a new tier"),
                ("paid=-1", "'paid=-1'"),
                ("paid=nan", "'paid=nan'"),
                ("paid=1,paid=2", "'paid=2'"),
                ("pa\nid=1", "is not TIER=WEIGHT with a new tier"),
                ("paid=0,free=0", "all weights are 0"),
            )
        ),
        *(
            (partial(keys, texts), says)
            for texts, says in (
                (["payed=secret"], "no tier 'payed'.*Use paid or free"),
                (["secret", "secret2"], "is given twice"),
                (["paid="], "is empty"),
                (["sec\r\nret"], "characters that a header can't have"),
            )
        ),
        *(
            (partial(make_body, "/v1/inference", None, None, content), "is not a JSON object")
            for content in (b"[]", b"{", b'{"a": "\xff"}')
        ),
        (partial(make_body, "/v1/predict", "hi", None, None), r"--model.*must be given for /v1/predict"),
        *(
            (partial(make_tensors, tensors), says)
            for tensors, says in (
                (["FP32:8,-1"], "is not .* For example FP32:8,4"),
                (["FP31:8,4"], "is not .* Datatypes are BOOL"),
                (["FP32:8,4", "b=FP32:7,4"], "has 7 rows, but the first tensor has 8"),
                (["FP32:65536,65536"], "is larger than 1024 MiB"),
            )
        ),
        (partial(order, rate=float("nan")), "--rate = nan: must lie between 0.001"),
        (partial(order, rate=1e6, duration=600_000.0), "--duration.*600,000,000,000 requests"),
        (partial(order, promise=0.0), r"--promise = 0.0: must lie between .* ms"),
        (partial(order, expect="lower"), "--expect = 'lower': is not known. Use none, upper, echo"),
        (
            partial(order, expect="upper", member=""),
            "--expect.*needs a string member in the body to check answers against: input, ",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_no_key_is_shown(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SettingError, match=says) as refused:
        make()
    assert "ret" not in str(refused.value)


def payload(**settings: Any) -> Payload:
    return Payload(order(**settings), "n0")


def split(request: bytes) -> tuple[dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert first == "POST /v1/inference HTTP/1.1"
    assert int(headers["Content-Length"]) == len(body)
    return headers, body


@given(TEXTS, st.integers(0, 999_999_999), st.sampled_from(["upper", "echo"]))
def test_any_text_is_carried_whole_and_only_the_answer_to_it_is_right(text: str, number: int, expect: str) -> None:
    sent = payload(body={"a": "%d", "input": text, "b": [text]}, expect=expect)
    own, other = (
        msgspec.json.decode(split(sent.request(each, 0))[1]) for each in (number, (number + 1) % 1_000_000_000)
    )
    assert own == {"a": "%d", "input": f"n0-{number:09d} {text}", "b": [text]}

    def answer(said: str) -> bytes:
        return msgspec.json.encode({"output": said.upper() if expect == "upper" else said, "request_id": "req_1"})

    assert sent.is_right(number, answer(own["input"]))
    assert not sent.is_right(number, answer(other["input"]))
    assert not sent.is_right(number, answer(own["input"] + "x"))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"output": 1}', b'{"outputs": "x"}', b"\xff", b'{"output": "'])
def test_what_is_no_answer_is_not_right(body: bytes) -> None:
    assert not payload(expect="echo").is_right(1, body)


def test_headers_say_the_key_of_a_tier_or_its_name_and_a_key_for_all_goes_with_it() -> None:
    both = payload(mix={"paid": 1.0, "free": 1.0}, keys={"paid": "100%secret"})
    for sent, tier, key, name in (
        (both, 0, "Bearer 100%secret", None),
        (both, 1, None, "free"),
        (payload(mix={"paid": 1.0}, keys={"": "secret"}), 0, "Bearer secret", "paid"),
        (payload(), 0, None, None),
    ):
        headers, _ = split(sent.request(1, tier))
        assert (headers.get("Authorization"), headers.get("X-Request-Tier")) == (key, name)


def test_a_body_with_nothing_to_vary_is_sent_as_it_is_and_data_follow_it_with_its_length_in_the_head() -> None:
    sent = payload(body={"inputs": ["100%"]}, member="")
    assert sent.request(1, 0) == sent.request(2, 0)
    assert msgspec.json.decode(split(sent.request(1, 0))[1]) == {"inputs": ["100%"]}
    data = b"%\0\r\n\r\n%d"
    headers, body = split(payload(body={"inputs": []}, data=data, member="").request(1, 0))
    length = int(headers["Inference-Header-Content-Length"])
    assert headers["Content-Type"] == "application/octet-stream"
    assert (msgspec.json.decode(body[:length]), body[length:]) == ({"inputs": []}, data)
