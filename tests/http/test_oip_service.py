"""The Open Inference Protocol over REST, except inference."""

from typing import Any

import pytest

from headway import __version__
from headway.gateway.fan_out import MOST_INPUTS
from headway.model import TensorSpec
from tests.http.stand import Answer, Stand, get, on_stand, post

MODEL = "/v2/models/default"
ELEMENT = '{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}'
KEYS: dict[str, dict[str, Any]] = {"good": {}, "other": {"models": ["other"]}}


async def test_health_has_the_bodies_that_clients_parse(stand: Stand) -> None:
    of_model = {"name": "default", "ready": True}
    bodies: dict[str, Any] = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
    for path, body in {**bodies, f"{MODEL}/ready": of_model, f"{MODEL}/versions/1/ready": of_model}.items():
        answer = await stand.ask(get(path))
        assert (answer.status, answer.json) == (200, body)


async def test_a_process_that_leaves_is_live_and_not_ready(stand: Stand) -> None:
    stand.leaving = True
    assert (await stand.ask(get("/v2/health/live"))).status == 200
    for path in ("/v2/health/ready", f"{MODEL}/ready"):
        answer = await stand.ask(get(path))
        assert (answer.status, answer.json["ready"]) == (503, False)
        assert answer.header["retry-after"] == "1"
    index = await stand.ask(post("", "/v2/repository/index"))
    assert [(one["state"], one["reason"]) for one in index.json] == [("UNAVAILABLE", "no worker is ready")]
    assert (await stand.ask(post('{"ready": true}', "/v2/repository/index"))).json == []


async def test_metadata_tell_what_works(stand: Stand) -> None:
    server = (await stand.ask(get("/v2"))).json
    assert (await stand.ask(get("/v2/"))).json == server, "clients join a base URL and nothing so"
    assert (server["name"], server["version"]) == ("headway", __version__)
    assert set(server["extensions"]) == {
        "binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics",
    }  # fmt: skip
    for path in (MODEL, f"{MODEL}/versions/1"):
        assert (await stand.ask(get(path))).json == {
            "name": "default",
            "versions": ["1"],
            "platform": "headway",
            "inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [-1, 1]}],
            "outputs": [{"name": "OUTPUT", "datatype": "BYTES", "shape": [-1, 1]}],
        }
    config = (await stand.ask(get(f"{MODEL}/config"))).json
    assert (config["name"], config["max_batch_size"]) == ("default", MOST_INPUTS)
    assert config["input"] == [{"name": "INPUT", "data_type": "TYPE_STRING", "dims": [1]}]
    assert config["dynamic_batching"] == {}


@on_stand(max_batch_size=8)
async def test_metadata_tell_the_tensors_that_a_model_takes_and_gives(stand: Stand) -> None:
    inputs = TensorSpec("x", "FP32", (3, -1)), TensorSpec("ids", "INT64")
    outputs = TensorSpec("y", "BF16", (2,)), TensorSpec("labels", "JSON", (-1,)), TensorSpec("names", "BYTES", (1,))
    stand.learn("tensors", inputs=inputs, outputs=outputs)
    described = (await stand.ask(get(MODEL))).json
    assert [(one["name"], one["datatype"], one["shape"]) for one in described["inputs"] + described["outputs"]] == [
        ("x", "FP32", [-1, 3, -1]),
        ("ids", "INT64", [-1]),
        ("y", "BF16", [-1, 2]),
        ("labels", "BYTES", [-1, -1]),
        ("names", "BYTES", [-1, 1]),
    ]
    config = (await stand.ask(get(f"{MODEL}/config"))).json
    assert config["max_batch_size"] == 8
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]},
        {"name": "ids", "data_type": "TYPE_INT64", "dims": []},
    ]
    assert [one["data_type"] for one in config["output"]] == ["TYPE_BF16", "TYPE_STRING", "TYPE_STRING"]


@on_stand(keys={"k": {}, "other": {"models": ["other"]}})
async def test_a_path_without_a_model_is_that_of_the_default(stand: Stand) -> None:
    for path in ("/v2/models//ready", "/v2/models//config"):
        answer = await stand.ask(get(path, "Authorization: Bearer k"))
        assert (answer.status, answer.json["name"]) == (200, "default")
    hidden = await stand.ask(get("/v2/models//ready", "Authorization: Bearer other"))
    assert (hidden.status, "it is only for: other" in hidden.json["error"]) == (403, True)


async def test_the_index_lists_what_is_served(stand: Stand) -> None:
    ready = [{"name": "default", "version": "1", "state": "READY", "reason": ""}]
    for body in ("", "{}", '{"ready": false}', '{"ready": true}', '{"other": 1}'):
        assert (await stand.ask(post(body, "/v2/repository/index"))).json == ready
    for body in ("[]", '{"ready": 1}', "no JSON"):
        answer = await stand.ask(post(body, "/v2/repository/index"))
        assert answer.status == 400
        assert answer.json["error"].startswith("the body is not a repository index request: ")


@on_stand(whole=True, keys={"good": {}, "neighbour": {"tenant": "other"}})
async def test_a_tenant_is_told_the_statistics_of_its_own_requests_from_its_first_question_on(stand: Stand) -> None:
    async def stats(key: str, path: str = f"{MODEL}/stats") -> Any:
        [found] = (await stand.ask(get(path, f"Authorization: Bearer {key}"))).json["model_stats"]
        return found

    async def ask(key: str, element: str) -> int:
        body = ELEMENT.replace('"a"', f'"{element}"')
        return (await stand.ask(post(body, f"{MODEL}/infer", f"Authorization: Bearer {key}"))).status

    assert await ask("good", "a") == 200
    nothing = await stats("good")
    assert (nothing["name"], nothing["version"], nothing["inference_count"]) == ("default", "1", 0)
    assert [await ask(*given) for given in (("good", "a"), ("good", "bad"), ("neighbour", "a"))] == [200, 422, 200]
    found = await stats("good")
    assert await stats("good", "/v2/models/stats") == await stats("good", f"{MODEL}/versions/1/stats") == found
    assert found["last_inference"] > 1_600_000_000_000
    figures = found["inference_stats"]
    assert (found["inference_count"], figures["success"]["count"], figures["fail"]["count"]) == (1, 1, 1)
    assert all(one["ns"] >= 0 for one in figures.values())
    assert (await stats("neighbour"))["inference_count"] == 0


async def test_what_other_servers_have_is_not_offered(stand: Stand) -> None:
    for path, says in (
        ("/v2/repository/models/default/load", "start a worker for a model"),
        (f"{MODEL}/trace/setting", "clients cannot change trace settings"),
        (f"{MODEL}/versions/1/trace/setting", "clients cannot change trace settings"),
        ("/v2/logging", "clients cannot change log settings"),
        ("/v2/systemsharedmemory/status", "shared memory is not supported; send the inputs' data in the body"),
        ("/v2/cudasharedmemory/region/r/unregister", "shared memory is not supported"),
        (f"{MODEL}/generate_stream", "generate is not supported"),
    ):
        for request in (get(path), post("{}", path)):
            answer = await stand.ask(request)
            assert (answer.status, list(answer.json)) == (501, ["error"]), path
            assert says in answer.json["error"]


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (get("/v2/models/other"), 404, "no model named 'other'"),
        (get(f"{MODEL}/versions/2"), 404, "has no version '2' that takes requests; available: 1"),
        (get("/v2/nothing"), 404, "nothing is served at /v2/nothing"),
        (post("{}", "/v2"), 405, "only GET, HEAD, OPTIONS"),
        (post("{}", MODEL), 405, "only GET, HEAD, OPTIONS"),
        (get("/v2/repository/index"), 405, "only OPTIONS, POST"),
        (get(f"{MODEL}/versions/1/infer"), 405, "only OPTIONS, POST"),
    ],
)
async def test_errors_have_the_protocol_s_form(stand: Stand, asked: bytes, status: int, says: str) -> None:
    answer = await stand.ask(asked)
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert says in answer.json["error"]
    assert answer.header["content-type"] == "application/json"


@on_stand(whole=True)
async def test_a_model_of_which_it_is_not_known_whether_it_is_served_is_asked_for_again_later(stand: Stand) -> None:
    stand.real.served.in_doubt = lambda: True
    model, version = "whether the model 'late' is served", "whether the model 'default' has a version '9'"
    for asked, doubt in (
        (post('{"input": "a", "model": "late"}'), model),
        (post('{"inputs": ["a", "b"], "model": "late"}'), model),
        (post('{"prompt": "a", "model": "late"}', "/v1/completions"), model),
        (post("{", "/v2/models/late/infer"), model),
        (get("/v2/models/late/ready"), model),
        (get("/v1/models/late"), model),
        (post('{"input": "a", "version": "9"}'), version),
        (post(ELEMENT, "/v2/models/default/versions/9/infer"), version),
        (get("/v2/models/default/versions/9/ready"), version),
    ):
        answer = await stand.ask(asked)
        assert (answer.status, answer.header["retry-after"]) == (503, "1"), asked
        assert f"it is not currently known {doubt}".encode() in answer.body
    assert (await stand.ask(post('{"input": "a", "model": "default"}'))).status == 200
    stand.real.served.in_doubt = lambda: False
    assert (await stand.ask(get("/v2/models/late"))).status == 404


async def test_a_repository_index_request_is_small(stand: Stand) -> None:
    for size, status in ((4000, 200), (5000, 413), (900_000, 413)):
        answer = await stand.ask(post('{"ready":false}' + " " * size, "/v2/repository/index"))
        assert answer.status == status
    assert "at most 4096 bytes" in answer.json["error"]


@on_stand(keys=KEYS)
async def test_a_model_is_known_to_those_who_may_ask_it(stand: Stand) -> None:
    async def ask(path: str, key: str) -> Answer:
        field, index = f"Authorization: Bearer {key}" if key else "X-A: b", "/v2/repository/index"
        return await stand.ask(post("", path, field) if path == index else get(path, field))

    for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
        assert (await ask(path, "")).status == 200
    for path in (MODEL, f"{MODEL}/ready", f"{MODEL}/config", f"{MODEL}/stats", f"{MODEL}/versions/1"):
        answers = [await ask(path, key) for key in ("good", "other", "", "bad")]
        assert [answer.status for answer in answers] == [200, 403, 401, 401]
        assert list(answers[2].json) == ["error"]
        unknown = (await ask(path.replace("default", "unknown"), "other")).json["error"]
        assert unknown.replace("unknown", "default") == answers[1].json["error"], "hidden is like unknown"
    for path in ("/v2/models/stats", "/v2/repository/index"):
        assert (await ask(path, "")).status == 401
        told = [(await ask(path, key)).json for key in ("good", "other")]
        assert [len(one if isinstance(one, list) else one["model_stats"]) for one in told] == [1, 0]
