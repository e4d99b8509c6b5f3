"""Attacks on the admin port through an operator's browser, and browser sessions."""

import asyncio
from typing import Any

import pytest

from headway.admin.dashboard.sign_in import SignIn
from headway.admin.guard import LIFETIME, MOST, PAUSE, TRIES, ServiceTokens, Sessions, Tries, cookie_name, cookie_of
from headway.config import Settings
from headway.errors import SettingError
from tests.http.ordinary import request
from tests.http.test_admin import Answer, Port, on_admin
from tests.services.stand import Stand

TOKEN = "s3cret"
BEARER = f"Bearer {TOKEN}"
LONG = "0123456789abcdef" * 2
SESSION = "/dashboard/session"
HERE = {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:9000"}
NEAR = "http://127.0.0.1:3000"


async def sign_in(port: Port, token: str = TOKEN, **how: Any) -> Answer:
    return await port.ask("POST", SESSION, body=b'{"token":"%b"}' % token.encode(), **{"fields": HERE, **how})


def cookie_in(answer: Answer) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


@on_admin(admin_token=TOKEN, admin_names="ops.example,gpu-1")
async def test_a_rebound_name_is_refused_even_with_the_token(stand: Stand, port: Port) -> None:
    for path in ("/internal/dlq", "/metrics", "/dashboard/session", "/nowhere"):
        for host in ("evil.example:9000", "127.0.0.1.evil.example", "ops.example.evil.example", "", "x@y"):
            refused = await port.ask("GET", path, host=host, token=BEARER)
            assert (refused.status, refused.json["error"]) == (403, "FORBIDDEN"), host
            assert "HEADWAY_ADMIN_NAMES" in refused.json["message"]
        for host in ("10.0.0.7:9000", "[fd00::7]", "localhost", "ops.example:9000", "OPS.example.", "gpu-1"):
            assert (await port.ask("GET", path, host=host, token=BEARER)).status in (200, 404), host


@on_admin(admin_token=TOKEN)
async def test_the_ports_own_address_leads_to_the_dashboard(stand: Stand, port: Port) -> None:
    answer = await port.ask("GET", "/")
    assert (answer.status, answer.headers["location"]) == (307, "/dashboard")
    assert (await port.ask("GET", "/", host="evil.example")).status == 403


def test_what_is_no_name_is_refused_as_a_setting() -> None:
    for names in ("http://ops.example", "ops.example:9000", "a b", ",", "a,"):
        with pytest.raises(SettingError, match="must be comma-separated host names"):
            Settings(admin_names=names)


@pytest.mark.parametrize(
    "fields",
    [
        {"sec-fetch-site": "same-site", "origin": NEAR},
        {"sec-fetch-site": "cross-site"},
        *({"origin": origin} for origin in (NEAR, "https://evil.example", "null", "")),
    ],
    ids=str,
)
@on_admin(admin_token=TOKEN)
async def test_a_page_of_another_site_changes_nothing_with_a_token_or_a_cookie(
    stand: Stand, port: Port, fields: dict[str, str]
) -> None:
    cookie = cookie_in(await sign_in(port))
    for method, path in (("DELETE", "/internal/dlq/x"), ("POST", "/internal/dlq/x/replay"), ("DELETE", SESSION)):
        for token, sent in ((BEARER, fields), (None, {**fields, "cookie": cookie})):
            refused = await port.ask(method, path, token=token, fields=sent)
            assert (refused.status, refused.json["error"]) == (403, "FORBIDDEN")
            assert "another site" in refused.json["message"]
    assert (await sign_in(port, fields=fields)).status == 403, "nor is a browser signed in by it"
    stolen = await port.ask("GET", "/internal/dlq", fields={**fields, "cookie": cookie})
    assert stolen.status == 401, "a cookie is good for the port's own pages only"
    assert (await port.ask("GET", "/internal/dlq", fields={**HERE, "cookie": cookie})).status == 200
    assert (await port.ask("GET", "/internal/dlq", fields=fields, token=BEARER)).status == 200, "it changes nothing"
    for here in (HERE, {"sec-fetch-site": "none"}, {"origin": HERE["origin"]}, {}):
        assert (await port.ask("DELETE", "/internal/dlq/x", fields=here, token=BEARER)).status == 404


@on_admin(admin_token=TOKEN)
async def test_a_token_in_an_address_is_refused(stand: Stand, port: Port) -> None:
    for path in ("/internal/health", "/dashboard/session", "/metrics"):
        for name in ("token", "access_token", "Admin_Token", "authorization"):
            for token in (None, BEARER):
                refused = await port.ask("GET", f"{path}?{name}={TOKEN}", token=token)
                assert (refused.status, refused.json["error"]) == (400, "BAD_REQUEST")
                assert "replace any token that was sent like this" in refused.json["message"]
                assert TOKEN.encode() not in refused.body


@on_admin(admin_token=f"new,{TOKEN}")
async def test_a_session_opens_the_admin_routes_until_it_is_signed_out(stand: Stand, port: Port) -> None:
    assert (await port.get("/internal/dlq")).status == 401
    assert (await port.get(SESSION)).json == {"needed": True, "signed_in": False}
    begun = await sign_in(port)
    assert (begun.status, begun.headers["cache-control"]) == (204, "no-store")
    attributes = begun.headers["set-cookie"].split("; ")[1:]
    assert attributes == ["Path=/", f"Max-Age={LIFETIME:.0f}", "HttpOnly", "SameSite=Strict"]
    stolen = {"cookie": f"other=1; {cookie_in(begun)}"}
    assert TOKEN not in begun.headers["set-cookie"]
    assert (await port.ask("GET", SESSION, fields=stolen)).json == {"needed": True, "signed_in": True}
    assert (await port.ask("GET", "/internal/dlq", fields=stolen)).status == 200
    assert (await port.ask("DELETE", "/internal/dlq/x", fields={**HERE, **stolen})).status == 404
    ended = await port.ask("DELETE", SESSION, fields={**HERE, **stolen})
    assert ended.status == 204 and "Max-Age=0" in ended.headers["set-cookie"]
    for path in ("/internal/dlq", "/metrics", "/internal/health"):
        assert (await port.ask("GET", path, fields=stolen)).status == 401, "whoever has a copy of the cookie"
    assert (await port.ask("GET", SESSION, fields=stolen)).json == {"needed": True, "signed_in": False}


def test_a_session_ends_by_itself_and_the_oldest_makes_room() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    text = sessions.begin()
    assert sessions.valid(text)
    now = LIFETIME
    assert not sessions.valid(text)
    sessions = Sessions(lambda: 0.0)
    texts = [sessions.begin() for _ in range(MOST + 1)]
    assert [sessions.valid(text) for text in texts] == [False] + [True] * MOST


@on_admin(admin_token=TOKEN)
async def test_wrong_tokens_are_limited_and_the_right_one_waits_too(stand: Stand, port: Port) -> None:
    for wrong in ("", "S3cret", "s3cret2", "hw_live_x", "új")[:TRIES]:
        refused = await sign_in(port, wrong)
        assert (refused.status, refused.json["error"]) == (401, "UNAUTHENTICATED")
        assert "set-cookie" not in refused.headers
    for token in ("wrong", TOKEN):
        refused = await sign_in(port, token)
        assert (refused.status, refused.json["error"]) == (429, "RATE_LIMITED")
        assert 0 < int(refused.headers["retry-after"]) <= PAUSE
    assert (await port.ask("GET", "/internal/dlq", token=BEARER)).status == 200, "programs are not kept out by it"
    await asyncio.sleep(PAUSE + 0.1)
    assert (await sign_in(port)).status == 204
    assert (await sign_in(port, "wrong")).status == 401, "the tries are there again"


@pytest.mark.parametrize("scheme", ["bearer wrong{n}", "Basic d3Jvbmc6d3Jvbmc="])
@on_admin(admin_token=TOKEN)
async def test_wrong_authorization_is_limited_for_its_sender_alone(stand: Stand, port: Port, scheme: str) -> None:
    async def ask(token: str, client: str) -> Answer:
        return await port.ask("GET", "/internal/dlq", token=token, client=client)

    assert (await ask(BEARER, "10.0.0.1")).status == 200
    statuses = [(await ask(scheme.format(n=n), "10.0.0.1")).status for n in range(3 * TRIES)]
    assert (statuses.count(401), statuses.count(429)) == (TRIES, 2 * TRIES)
    assert (await ask(BEARER, "10.0.0.1")).status == 200, "it was let in before from there"
    assert (await ask(BEARER, "10.0.0.2")).status == 200, "it is another client"
    for n in range(3 * TRIES):
        await ask(f"Bearer wrong{n}", "10.0.0.3")
    refused = await ask(BEARER, "10.0.0.3")
    assert (refused.status, 0 < int(refused.headers["retry-after"]) <= PAUSE) == (429, True), "it can be guessed"
    assert (await sign_in(port)).status == 204, "browsers have tries of their own"
    await asyncio.sleep(PAUSE + 0.1)
    assert (await ask(BEARER, "10.0.0.3")).status == 200


@on_admin(admin_token=f"{LONG},old-{LONG}")
async def test_nobody_keeps_a_token_out_that_cannot_be_guessed(stand: Stand, port: Port) -> None:
    for n in range(100):
        await port.ask("GET", "/internal/dlq", token=f"Bearer {n}", client=f"10.0.0.{n}")
        await port.ask("GET", "/internal/dlq", token=f"Bearer {n}")
        await sign_in(port, f"{n}")
    refused = await port.ask("GET", "/internal/dlq", token="Bearer wrong", client="10.0.1.1")
    assert refused.status == 429, "all addresses together are limited, too"
    assert (await port.ask("GET", "/internal/dlq", token=f"Bearer {LONG}")).status == 200
    assert (await sign_in(port, LONG)).status == 204


@on_admin(admin_token=TOKEN)
async def test_a_browser_with_a_session_is_not_counted_behind_a_proxy(stand: Stand, port: Port) -> None:
    cookie = cookie_in(await sign_in(port))
    for _ in range(3 * TRIES):
        answer = await port.ask(
            "GET", "/internal/dlq", token="Basic cHJveHk6cHJveHk=", fields={**HERE, "cookie": cookie}
        )
        assert answer.status == 200
    assert (await port.ask("GET", "/internal/dlq", token="Bearer wrong")).status == 401
    for nothing in (None, "", "Bearer", "wrong"):
        for _ in range(3 * TRIES):
            assert (await port.ask("GET", "/internal/dlq", token=nothing)).status == 401
    assert (await port.ask("GET", "/internal/dlq", token=BEARER)).status == 200


def test_addresses_from_which_the_token_came_are_remembered_up_to_a_bound() -> None:
    tries = Tries(lambda: 0.0)
    for n in range(5000):
        assert tries.check(f"10.0.{n >> 8}.{n & 255}", right=True, guessable=True) == 0.0
    assert len(tries._known) <= 256


async def test_tries_whose_bodies_come_late_and_together_are_limited_like_others() -> None:
    routes = SignIn(ServiceTokens(TOKEN), Sessions(lambda: 0.0), Tries(lambda: 0.0), secure=False)
    requests = [request("POST", SESSION, body=None, client="10.0.0.1") for _ in range(3 * TRIES)]
    tries = [asyncio.ensure_future(routes.answer(one)) for one in requests]
    await asyncio.sleep(0)
    for one in requests:
        one.feed(b'{"token":"wrong"}')
        one.end()
    statuses = [answer.status for answer in await asyncio.gather(*tries)]
    assert (statuses.count(401), statuses.count(429)) == (TRIES, 2 * TRIES)


def test_many_addresses_share_a_limit_of_tries() -> None:
    tries, count = Tries(lambda: 100.0), 0
    while not tries.wait(f"10.0.0.{count}"):
        tries.failed(f"10.0.0.{count}")
        count += 1
    assert count == 50
    assert tries.wait("10.9.9.9") == pytest.approx(1.0)


@on_admin(admin_token=TOKEN)
async def test_a_sign_in_that_is_none_is_a_bad_request(stand: Stand, port: Port) -> None:
    for body in (b"", b"{}", b"[]", b'{"token":1}', b"\xff", b'{"token":"' + b"x" * 9000 + b'"}'):
        refused = await port.ask("POST", SESSION, body=body, fields=HERE)
        assert (refused.status, refused.json["error"]) == (400, "BAD_REQUEST")


async def test_without_a_token_nobody_has_to_sign_in(stand: Stand, port: Port) -> None:
    assert (await port.get(SESSION)).json == {"needed": False, "signed_in": True}
    begun = await sign_in(port)
    assert (begun.status, "set-cookie" in begun.headers) == (204, False)


def test_processes_on_one_host_have_cookies_of_their_own() -> None:
    assert cookie_name("127.0.0.1:9000") != cookie_name("127.0.0.1:9001")
    assert cookie_name("[::1]") == cookie_name("ops.example") == "headway-session"
    assert cookie_of("a=1; headway-session-9000=x; b=2", "headway-session-9000") == "x"
    assert cookie_of("xheadway-session=1", "headway-session") == ""
