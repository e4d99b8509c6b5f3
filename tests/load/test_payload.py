from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.load.generator import Payload
from headway.load.spec import LoadSpec, Target

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


def test_a_key_for_all_goes_with_the_tier() -> None:
    headers, _ = split(payload(mix={"paid": 1.0}, keys={"": "secret"}).request(1, 0))
    assert (headers["Authorization"], headers["X-Request-Tier"]) == ("Bearer secret", "paid")


def test_without_a_mix_no_tier_is_sent() -> None:
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
