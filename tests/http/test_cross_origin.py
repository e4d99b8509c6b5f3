"""Pages of other sites: who may ask, what the browser is told before, and that nobody else pays for it."""

from __future__ import annotations

import json

import pytest

from headway.config import Settings
from headway.errors import SettingError
from headway.http.inference.cross_origin import Origins
from headway.http.server.head import Head
from tests.http.stand import Stand, get, on_stand, post

APP = "https://app.example"
ALLOWED = "access-control-allow-origin"
PATHS = (
    "/v1/inference",
    "/v1/predict",
    "/v1/result/x",
    "/v1/models",
    "/v2/models/default/infer",
    "/readyz",
    "/openapi.json",
)


def preflight(path: str, origin: str = APP, method: str = "POST") -> bytes:
    fields = (
        f"Origin: {origin}",
        f"Access-Control-Request-Method: {method}",
        "Access-Control-Request-Headers: authorization,x",
    )
    return get(path, *fields).replace(b"GET", b"OPTIONS", 1)


@pytest.mark.parametrize("path", PATHS)
@on_stand(keys={"ada": {}}, whole=True, cors_origins=f"http://localhost:5173, {APP}")
async def test_a_browser_is_told_that_it_may_ask_without_a_credential(stand: Stand, path: str) -> None:
    answer = await stand.ask(preflight(path))
    assert (answer.status, answer.body) == (204, b"")
    assert answer.header[ALLOWED] == APP
    assert answer.header["access-control-allow-headers"] == "authorization,x"
    assert "POST" in answer.header["access-control-allow-methods"]
    assert answer.header["vary"] == "origin"
    refused = await stand.ask(preflight(path, "https://evil.example"))
    assert (refused.status, ALLOWED in refused.header) == (403, False)
    assert "--cors-origins" in refused.json["message"]


@on_stand(keys={"ada": {}}, whole=True, cors_origins=APP)
async def test_every_answer_to_a_page_that_may_ask_says_so_also_under_a_head_that_is_remembered(stand: Stand) -> None:
    ada = "Authorization: Bearer ada"
    asked = post('{"input": "a"}', "/v1/inference", ada, f"Origin: {APP}")
    plain = post('{"input": "a"}', "/v1/inference", ada)
    for request in (asked, asked, plain, plain, asked, asked):
        answer = await stand.ask(request)
        assert answer.status == 200
        assert answer.header.get(ALLOWED) == (APP if request is asked else None)
    for request, status in (
        (post("{}", "/v1/inference", ada, f"Origin: {APP}"), 400),
        (post("{}", "/v1/inference", f"Origin: {APP}"), 401),
        (get("/nowhere", f"Origin: {APP}"), 404),
        (get("/v1/models", ada, f"Origin: {APP}"), 200),
        (post('{"input": "a"}', "/v1/inference", ada, f"Origin: {APP}", "Prefer: respond-async"), 202),
    ):
        answer = await stand.ask(request)
        assert (answer.status, answer.header[ALLOWED]) == (status, APP)
        assert "x-request-id" in answer.header["access-control-expose-headers"]
    large = json.dumps({"input": "HTTP/1.1 200 OK " * 20_000})
    answer = await stand.ask(post(large, "/v1/inference", ada, f"Origin: {APP}"))
    assert (answer.status, answer.header[ALLOWED]) == (200, APP)
    assert len(answer.json["output"]) == 320_000
    assert (
        ALLOWED
        not in (await stand.ask(post('{"input": "a"}', "/v1/inference", ada, "Origin: https://evil.example"))).header
    )


@on_stand(keys={"ada": {}}, whole=True, cors_origins=APP)
async def test_what_comes_after_a_page_on_its_connection_gets_none_of_its_lines(stand: Stand) -> None:
    ada = "Authorization: Bearer ada"
    asked = post('{"input": "a"}', "/v1/inference", ada, f"Origin: {APP}")
    head = post('{"input": "a"}', "/v1/inference", ada)
    for other in (get("/livez"), head, get("/nowhere"), b"GET / HTTP/9\r\n\r\n"):
        client = await stand.connect()
        for request in (asked, asked, other):
            await client.send(request)
            assert (await client.answer()).header.get(ALLOWED) == (APP if request is asked else None)
    client = await stand.connect()
    await client.send(asked + asked + head + asked)
    assert [(await client.answer()).header.get(ALLOWED) for _ in range(4)] == [APP, APP, None, APP]
    await client.send(asked[:20])
    await client.send(asked[20:])
    assert (await client.answer()).header.get(ALLOWED) == APP


@on_stand(cors_origins="*")
async def test_a_star_stands_for_all_pages(stand: Stand) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", "Origin: null"))
    assert (answer.header[ALLOWED], "vary" in answer.header) == ("*", False)


@on_stand()
async def test_where_no_page_may_ask_nothing_is_said(stand: Stand) -> None:
    assert ALLOWED not in (await stand.ask(preflight("/v1/inference"))).header
    assert ALLOWED not in (await stand.ask(post('{"input": "a"}', "/v1/inference", f"Origin: {APP}"))).header


@pytest.mark.parametrize("origins", ["app.example", "https://app.example/", "https://a,*", "ftp://a", "https://a b"])
def test_what_is_no_origin_is_refused_as_a_setting(origins: str) -> None:
    with pytest.raises(SettingError, match="must be origins"):
        Settings(cors_origins=origins)


def test_an_origin_is_told_whatever_its_case() -> None:
    origins = Origins("https://app.example")
    assert origins.marks(head_of(b"HTTPS://APP.EXAMPLE"))
    assert not origins.marks(head_of(b"https://app.example.evil"))


def head_of(origin: bytes) -> Head:
    return Head(b"GET", b"/", "1.1", [(b"origin", origin)])


@on_stand(whole=True, cors_origins=APP)
async def test_a_preflight_whose_body_is_malformed_has_one_answer(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(preflight("/v1/inference").replace(b"Origin", b"Transfer-Encoding: chunked\r\nOrigin", 1))
    assert (await client.answer()).status == 204
    await client.send(b"no chunk\r\n")
    assert await client.ended()
