"""Bodies that lack a member, paths with a slash too many, and versions by either name: what clients read of them."""

from __future__ import annotations

import pytest

from headway.doors.bodies import suggestion
from tests.http.stand import Stand, get, on_stand, post

MISSING = "Object missing required field `input`"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"Input": "a"}', "; did you mean it by `Input`?"),
        (b'{"imput": "a"}', "; did you mean it by `imput`?"),
        (b'{"instances": ["a"]}', "; several inputs go as `inputs` to /v1/inference"),
        (b'{"prompt": "a"}', "; prompts go to /v1/completions"),
        (b'{"messages": []}', "; chats go to /v1/chat/completions"),
        (b'{"a": 1, "b": 2}', "; it has `a`, `b`"),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', "; it has `a`, `b`, `c`, `d`, `e`, …"),
        (b"{}", ""),
        (b"[]", ""),
        (b'{"a": "' + b"x" * 70_000 + b'"}', ""),
    ],
)
def test_who_lacks_a_member_is_told_what_was_most_likely_meant(body: bytes, told: str) -> None:
    assert suggestion(MISSING, body) == told
    assert suggestion("Expected `str`, got `int` - at `$.input`", body) == ""


@on_stand()
async def test_each_native_route_tells_it(stand: Stand) -> None:
    for path, body, told in (
        ("/v1/inference", '{"Input": "a"}', "`input`; did you mean it by `Input`?"),
        ("/api/inference", '{"inputs": ["a"]}', "`input`; did you mean it by `inputs`?"),
        ("/v1/predict", '{"model_id": "m", "input": "a"}', "`input_data`; /v1/inference takes an `input`"),
    ):
        answer = await stand.ask(post(body, path))
        assert (answer.status, answer.error) == (400, "BAD_REQUEST")
        assert answer.json["message"].endswith(told), answer.json["message"]


@on_stand()
async def test_a_slash_at_the_end_of_a_route_is_pointed_out(stand: Stand) -> None:
    for request, path in (
        (post('{"input": "a"}', "/v1/inference/"), "/v1/inference"),
        (get("/v1/result/x//"), "/v1/result/x"),
        (get("/readyz/"), "/readyz"),
    ):
        answer = await stand.ask(request)
        assert answer.status == 404
        assert answer.json["message"].endswith(f"; leave out the slash at its end: {path}")
    assert "leave out" not in (await stand.ask(get("/nowhere/"))).json["message"]


@pytest.mark.parametrize("path", ["/v1/inference", "/v1/predict"])
@on_stand(whole=True)
async def test_a_version_is_heeded_by_either_name(stand: Stand, path: str) -> None:
    input = '"input": "a"' if path == "/v1/inference" else '"model_id": "default", "input_data": "a"'
    assert (await stand.ask(post(f'{{{input}, "model_version": "1"}}', path))).status == 200
    assert (await stand.ask(post(f'{{{input}, "model_version": "1", "version": "1"}}', path))).status == 200
    for member in ("version", "model_version"):
        answer = await stand.ask(post(f'{{{input}, "{member}": "7"}}', path))
        assert (answer.status, answer.error) == (404, "NOT_FOUND"), answer.json
    assert (await stand.ask(post(f'{{{input}, "model_version": ""}}', path))).status == 400
    differ = await stand.ask(post(f'{{{input}, "model_version": "1", "version": "2"}}', path))
    assert (differ.status, "which differ" in differ.json["message"]) == (400, True)
