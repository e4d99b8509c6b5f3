"""The public port's ordinary routes, and requests from other origins."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from headway import errors
from headway.config import Settings
from headway.doors import readiness
from headway.errors import SettingError
from headway.http import openapi
from headway.http.inference.context import Origins
from headway.http.server.head import Head
from headway.model import WorkerInfo, WorkerStatus
from tests.dashboard.chromium import browser
from tests.http.stand import ADA, Answer, Stand, get, on_stand, post

MODELS = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
ELEMENT = '{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["a"]}], "id": "1"}'


async def test_health_routes_answer_ok_and_list_their_checks(stand: Stand) -> None:
    for path in ("/livez", "/readyz", "/healthz"):
        answer = await stand.ask(get(path))
        assert (answer.status, answer.json) == (200, {"status": "ok"})
        assert answer.header["cache-control"] == "no-store"
        verbose = (await stand.ask(get(f"{path}?verbose"))).json
        assert verbose["status"] == "ok" and verbose["checks"]


async def test_ready_means_a_warm_worker_and_not_draining(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "AGE", -1.0)
    offline = WorkerInfo(worker_id="gpu-0", model="default", status=WorkerStatus.OFFLINE)
    await stand.broker.heartbeat(offline)
    for path in ("/readyz", "/healthz"):
        answer = await stand.ask(get(f"{path}?verbose"))
        assert (answer.status, answer.json["status"]) == (503, "unavailable")
        assert answer.json["checks"]["workers"] == "none is healthy"
        assert answer.header["retry-after"] == "1"
    assert (await stand.ask(get("/livez"))).status == 200
    await stand.broker.heartbeat(WorkerInfo(worker_id="gpu-1", model="default", status=WorkerStatus.HEALTHY))
    assert (await stand.ask(get("/readyz"))).json == {"status": "degraded"}
    stand.leaving = True
    answer = await stand.ask(get("/readyz"))
    assert (answer.status, answer.json) == (503, {"status": "draining"})
    assert (await stand.ask(get("/livez"))).status == 200


@on_stand(whole=True)
async def test_a_failed_model_is_told_without_the_reason(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "AGE", -1.0)
    failed = WorkerInfo(worker_id="gpu-0", model="default", status=WorkerStatus.FAILED, reason="s3cret", retry_in=9.0)
    before = (await stand.ask(get("/v1/models"))).json["data"]
    keyed = post('{"input": "a"}', "/v1/inference", "Idempotency-Key: k")
    first = await stand.ask(keyed)
    await stand.broker.heartbeat(failed)
    stand.real.served.learn([failed])
    ready = await stand.ask(get("/readyz?verbose"))
    assert ready.json["checks"]["failed"] == "some models did not load"
    assert not any(sign.isdigit() for sign in ready.body.decode()), "how many there are is the operators' business"
    assert (await stand.ask(get("/v1/models"))).json["data"] == [before[0] | {"status": "failed"}]
    [index] = (await stand.ask(post("", "/v2/repository/index"))).json
    assert (index["state"], index["reason"]) == ("UNAVAILABLE", "it did not load")
    refused = await stand.ask(post('{"input": "a"}'))
    assert (refused.status, refused.error, refused.header["retry-after"]) == (503, "NO_WORKERS", "9")
    assert "s3cret" not in ready.body.decode() + refused.body.decode()
    again = await stand.ask(keyed)
    assert (again.status, again.json["output"]) == (200, first.json["output"]), "what is kept is there all the same"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nowhere", 404, None),
        ("GET", "/", 404, None),
        ("GET", "//evil.example/..", 404, None),
        ("GET", "/docs/", 404, None),
        ("GET", "/v2x", 404, None),
        ("DELETE", "/livez", 405, "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/inference", 405, "OPTIONS, POST"),
        ("OPTIONS", "/v1/predict", 204, "OPTIONS, POST"),
        ("OPTIONS", "/docs", 204, "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/result/x", 405, "DELETE, GET, HEAD, OPTIONS"),
        ("GET", "/v1/result/x/y", 404, None),
        ("OPTIONS", "/nowhere", 404, None),
        ("POST", "/v1/inference/", 404, None),
        ("GET", "/v1/result/x//", 404, None),
        ("GET", "/nowhere/", 404, None),
    ],
)
async def test_a_wrong_route_is_a_404_and_a_wrong_method_a_405_that_names_the_right_ones(
    stand: Stand, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = await stand.ask(get(path, method=method))
    assert answer.status == status
    assert answer.header.get("allow") == allow
    if status != 204:
        assert answer.error == ("NOT_FOUND" if status == 404 else "METHOD_NOT_ALLOWED")
        assert path in answer.json["message"]
        hint = f"; remove the trailing slash: {path.rstrip('/')}"
        assert answer.json["message"].endswith(hint) == (path[-1] == "/" and path not in ("/", "/nowhere/"))


async def test_the_page_needs_nothing_but_this_server(stand: Stand) -> None:
    answer = await stand.ask(get("/docs"))
    outside = r"<[^>]*\s(src|srcset|action|data|poster)=|<link|https?://|@import|url\(|innerHTML"
    assert not re.search(outside, answer.body.decode())
    policy = answer.header["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2


LOOK = """(() => {
  const root = document.documentElement;
  const wide = [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > root.clientWidth + 1);
  const lines = (one) => { const range = document.createRange(); range.selectNodeContents(one); return range.getClientRects().length; };
  const torn = [...document.querySelectorAll("td")].filter((one) => /^[A-Za-z]{1,20}$/.test(one.textContent) && lines(one) > 1);
  return [root.scrollWidth - root.clientWidth, [...torn, ...wide].map((one) => one.tagName + " " + one.textContent.slice(0, 30))];
})()"""
"""Returns how many pixels the page exceeds the window by, and elements that are broken across lines or too wide."""


@pytest.mark.processes
async def test_the_page_fits_its_window_and_no_word_is_torn(stand: Stand, tmp_path: Path) -> None:
    async with browser(tmp_path) as chromium:
        page = await chromium.open(f"http://127.0.0.1:{stand.door.port}/docs")
        await page.until("document.querySelector('#errors tr')")
        for width in (320, 700):
            await page.size(width, 800)
            assert await page.run(LOOK) == [0, []], width


@on_stand(tiers="gold,tin", default_tier="tin")
async def test_the_contract_names_every_route_and_error_of_these_settings(stand: Stand) -> None:
    contract = (await stand.ask(get("/openapi.json"))).json
    assert set(contract["paths"]) == {
        "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/repository/index", "/v2/infer",
        *(model + of for model in MODELS for of in ("", "/ready", "/config", "/stats", "/infer")),
        "/v1/inference", "/api/inference", "/v1/predict", "/v1/result/{task_id}", "/livez", "/readyz", "/healthz",
        "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/models", "/v1/models/{id}",
    }  # fmt: skip
    assert [error["error"] for error in contract["x-headway-errors"]] == [
        errors.SHOWN.get(code, code) for code in errors.STATUS
    ]
    assert contract["components"]["parameters"]["Tier"]["schema"]["enum"] == ["gold", "tin"]


def _contract() -> Any:
    def closed(part: Any) -> Any:
        if isinstance(part, list):
            return [closed(one) for one in part]
        if not isinstance(part, dict):
            return part
        shut = {"additionalProperties": False} if part.get("type") == "object" and "properties" in part else {}
        return {**{name: closed(one) for name, one in part.items()}, **shut}

    return closed(openapi.document(Settings()))


def _answers(contract: dict[str, Any], path: str, answer: Answer) -> tuple[dict[str, Any], set[str]]:
    """Return an answer's schema, and the header fields that it may have in addition to the common ones."""
    operations = contract["paths"][path]
    operation = operations.get("post") or operations["get"]
    found = operation["responses"][str(answer.status)]
    if "$ref" in found:
        found = contract["components"]["responses"][found["$ref"].rpartition("/")[2]]
    content = found["content"][answer.header["content-type"].partition(";")[0]]
    return {**content["schema"], "components": contract["components"]}, {
        name.lower() for name in found.get("headers", ())
    }


TOLD = frozenset((
    "location", "preference-applied", "ratelimit", "ratelimit-policy", "idempotency-replayed", "x-headway-cache",
    "x-headway-kept", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
))  # fmt: skip
RESULT = "/v1/result/{task_id}"


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (post('{"input": "a"}'), "/v1/inference"),
        (post('{"model_id": "m", "input_data": "a"}', "/v1/predict"), "/v1/predict"),
        (post("", length=5_000_000), "/v1/inference"),
        (post('{"input": "a"}', "/v1/inference", ADA, "Idempotency-Key: k"), "/v1/inference"),
        (post('{"input": "b"}', "/v1/inference", ADA, "Idempotency-Key: k"), "/v1/inference"),
        (post('{"input": "a"}', "/api/inference", ADA, "Prefer: respond-async, wait=0"), "/api/inference"),
        (post(ELEMENT, "/v2/models/default/infer", ADA), f"{MODELS[0]}/infer"),
        (post(ELEMENT, "/v2/models/default/versions/1/infer", ADA), f"{MODELS[1]}/infer"),
        (post("{}", "/v2/models/default/infer", ADA), f"{MODELS[0]}/infer"),
        (get("/livez"), "/livez"),
        (get("/readyz?verbose"), "/readyz"),
        (get("/v2"), "/v2"),
        (get("/v2/health/ready"), "/v2/health/ready"),
        (get("/v2/models/stats", ADA), "/v2/models/stats"),
        (get("/v2/models/default", ADA), MODELS[0]),
        (get("/v2/models/default/config", ADA), f"{MODELS[0]}/config"),
        (get("/v2/models/default/versions/1/stats", ADA), f"{MODELS[1]}/stats"),
        (post("", "/v2/repository/index", ADA), "/v2/repository/index"),
        (get("/v1/result/x", ADA), RESULT),
        (post('{"prompt": ["a", "b"]}', "/v1/completions", ADA), "/v1/completions"),
        (post('{"messages": [{"role": "user", "content": "a"}]}', "/v1/chat/completions", ADA), "/v1/chat/completions"),
        (post('{"input": "[1]"}', "/v1/embeddings", ADA), "/v1/embeddings"),
        (post('{"input": "a", "instructions": "b"}', "/v1/responses", ADA), "/v1/responses"),
        (post('{"input": "a", "tools": [1]}', "/v1/responses", ADA), "/v1/responses"),
        (get("/v1/models", ADA), "/v1/models"),
        (get("/v1/models/default", ADA), "/v1/models/{id}"),
        (get("/v1/models/other", ADA), "/v1/models/{id}"),
    ],
)
@on_stand(keys={"ada": {}}, whole=True, cache=True)
async def test_answers_keep_the_contract(stand: Stand, request_: bytes, path: str) -> None:
    contract = _contract()
    await stand.ask(post('{"input": "a"}', "/v1/inference", ADA, "Idempotency-Key: k"))
    answer = await stand.ask(request_)
    schema, fields = _answers(contract, path, answer)
    jsonschema_rs.validate(schema, answer.json)
    assert TOLD & set(answer.header) <= fields


@on_stand(whole=True)
async def test_a_task_keeps_the_contract_in_all_its_states(stand: Stand) -> None:
    contract, states = _contract(), set()
    for input in ("a", "bad"):
        stand.go.clear()
        task = await stand.ask(post(f'{{"input": "{input}"}}', "/v1/inference", "Prefer: respond-async"))
        pending = await stand.ask(get(task.header["location"]))
        stand.go.set()
        for answer in (pending, await stand.ask(get(f"{task.header['location']}?wait=25"))):
            jsonschema_rs.validate(_answers(contract, RESULT, answer)[0], answer.json)
            states.add(answer.json["status"])
    assert states == {"PENDING", "SUCCESS", "FAILED"}


APP = "https://app.example"
ALLOWED = "access-control-allow-origin"
PATHS = "/v1/inference", "/v1/result/x", "/v1/models", "/v2/models/default/infer", "/readyz", "/openapi.json"


def preflight(path: str, origin: str = APP) -> bytes:
    asked = "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x"
    return get(path, f"Origin: {origin}", *asked, method="OPTIONS")


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
async def test_every_answer_to_a_page_that_may_ask_says_so(stand: Stand) -> None:
    page = f"Origin: {APP}"
    for request, status in (
        (post("{}", "/v1/inference", ADA, page), 400),
        (post("{}", "/v1/inference", page), 401),
        (get("/nowhere", page), 404),
        (get("/v1/models", ADA, page), 200),
        (post('{"input": "a"}', "/v1/inference", ADA, page, "Prefer: respond-async"), 202),
    ):
        answer = await stand.ask(request)
        assert (answer.status, answer.header[ALLOWED]) == (status, APP)
        assert "x-request-id" in answer.header["access-control-expose-headers"]
    large = json.dumps({"input": "HTTP/1.1 200 OK " * 20_000})
    answer = await stand.ask(post(large, "/v1/inference", ADA, page))
    assert (answer.status, answer.header[ALLOWED], len(answer.json["output"])) == (200, APP, 320_000)
    evil = await stand.ask(post('{"input": "a"}', "/v1/inference", ADA, "Origin: https://evil.example"))
    assert ALLOWED not in evil.header


@on_stand(keys={"ada": {}}, whole=True, cors_origins=APP)
async def test_what_comes_after_a_page_on_its_connection_gets_none_of_its_lines(stand: Stand) -> None:
    asked = post('{"input": "a"}', "/v1/inference", ADA, f"Origin: {APP}")
    head = post('{"input": "a"}', "/v1/inference", ADA)
    for other in (get("/livez"), head, get("/nowhere"), b"GET / HTTP/9\r\n\r\n"):
        client = await stand.connect()
        for request in (asked, asked, other):
            assert (await client.ask(request)).header.get(ALLOWED) == (APP if request is asked else None)
    client = await stand.connect()
    await client.send(asked + asked + head + asked)
    assert [(await client.answer()).header.get(ALLOWED) for _ in range(4)] == [APP, APP, None, APP]
    await client.send(asked[:20])
    assert (await client.ask(asked[20:])).header.get(ALLOWED) == APP


@on_stand(cors_origins="*")
async def test_a_star_stands_for_all_pages(stand: Stand) -> None:
    answer = await stand.ask(post('{"input": "a"}', "/v1/inference", "Origin: null"))
    assert (answer.header[ALLOWED], "vary" in answer.header) == ("*", False)


async def test_where_no_page_may_ask_nothing_is_said(stand: Stand) -> None:
    assert ALLOWED not in (await stand.ask(preflight("/v1/inference"))).header
    assert ALLOWED not in (await stand.ask(post('{"input": "a"}', "/v1/inference", f"Origin: {APP}"))).header


def test_what_is_no_origin_is_refused_as_a_setting() -> None:
    for origins in ("app.example", "https://app.example/", "https://a,*", "ftp://a", "https://a b"):
        with pytest.raises(SettingError, match=r"must be \* or origins"):
            Settings(cors_origins=origins)


def test_an_origin_is_told_whatever_its_case() -> None:
    origins = Origins("https://app.example")
    for origin, known in ((b"HTTPS://APP.EXAMPLE", True), (b"https://app.example.evil", False)):
        assert bool(origins.marks(Head(b"GET", b"/", "1.1", [(b"origin", origin)]))) is known


@on_stand(whole=True, cors_origins=APP)
async def test_a_preflight_whose_body_is_malformed_has_one_answer(stand: Stand) -> None:
    client = await stand.connect()
    await client.send(preflight("/v1/inference").replace(b"Origin", b"Transfer-Encoding: chunked\r\nOrigin", 1))
    assert (await client.answer()).status == 204
    await client.send(b"no chunk\r\n")
    assert await client.ended()
