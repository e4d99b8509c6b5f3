"""The Open Inference Protocol over REST, on the wire: all routes but inference."""

from typing import Any

import pytest

from headway import __version__
from headway.gateway.fan_out import MOST_INPUTS
from headway.model import TensorSpec, WorkerInfo, WorkerStatus
from tests.http.stand import Answer, Stand, get, on_stand, post

MODEL = "/v2/models/default"
KEYS: dict[str, dict[str, Any]] = {"good": {}, "other": {"models": ["other"]}}


async def test_health_has_the_bodies_that_clients_parse(stand: Stand) -> None:
    client = await stand.connect()
    for path, body in {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        f"{MODEL}/ready": {"name": "default", "ready": True},
        f"{MODEL}/versions/1/ready": {"name": "default", "ready": True},
    }.items():
        await client.send(get(path))
        answer = await client.answer()
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
    worker = WorkerInfo(
        worker_id="gpu-0", model="default", status=WorkerStatus.HEALTHY, takes="tensors", gives="tensors", inputs=inputs, outputs=outputs
    )  # fmt: skip
    stand.real.served.learn([worker])
    described = (await stand.ask(get(MODEL))).json
    assert described["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]},
        {"name": "ids", "datatype": "INT64", "shape": [-1]},
    ]
    assert described["outputs"] == [
        {"name": "y", "datatype": "BF16", "shape": [-1, 2]},
        {"name": "labels", "datatype": "BYTES", "shape": [-1, -1]},
        {"name": "names", "datatype": "BYTES", "shape": [-1, 1]},
    ]
    config = (await stand.ask(get(f"{MODEL}/config"))).json
    assert config["max_batch_size"] == 8
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]},
        {"name": "ids", "data_type": "TYPE_INT64", "dims": []},
    ]
    assert [one["data_type"] for one in config["output"]] == ["TYPE_BF16", "TYPE_STRING", "TYPE_STRING"]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (get(MODEL, "Authorization: Bearer k"), 200),
        (get(f"{MODEL}/ready", "Authorization: Bearer k"), 200),
        (get(f"{MODEL}/config", "Authorization: Bearer k"), 200),
        (get(f"{MODEL}/stats", "Authorization: Bearer k"), 200),
        (get("/v2/models/stats", "Authorization: Bearer k"), 200),
        (get("/v2/models/nowhere", "Authorization: Bearer k"), 404),
        (get("/v1/models", "Authorization: Bearer k"), 200),
        (get("/v1/models/nowhere", "Authorization: Bearer k"), 404),
        (post("", "/v2/repository/index", "Authorization: Bearer k"), 200),
        (post("[]", "/v2/repository/index", "Authorization: Bearer k"), 400),
        (post("", "/v2/repository/models/default/load", "Authorization: Bearer k"), 501),
    ],
)
@on_stand(keys={"k": {"rate": 60.0, "burst": 5.0}})
async def test_every_answer_tells_a_limited_caller_what_it_has_left(stand: Stand, asked: bytes, status: int) -> None:
    answer = await stand.ask(asked)
    assert answer.status == status
    assert (answer.header["ratelimit-policy"], answer.header["ratelimit"]) == ('"key";q=60;w=60', '"key";r=5;t=0')


@on_stand(keys={"k": {}, "other": {"models": ["other"]}})
async def test_a_path_without_a_model_is_that_of_the_default(stand: Stand) -> None:
    for path, name in (("/v2/models//ready", "default"), ("/v2/models//config", "default")):
        answer = await stand.ask(get(path, "Authorization: Bearer k"))
        assert (answer.status, answer.json["name"]) == (200, name)
    hidden = await stand.ask(get("/v2/models//ready", "Authorization: Bearer other"))
    assert hidden.status == 403
    assert "it is only for: other" in hidden.json["error"]


async def test_the_index_lists_what_is_served(stand: Stand) -> None:
    ready = [{"name": "default", "version": "1", "state": "READY", "reason": ""}]
    for body in ("", "{}", '{"ready": false}', '{"ready": true}', '{"other": 1}'):
        assert (await stand.ask(post(body, "/v2/repository/index"))).json == ready
    for body in ("[]", '{"ready": 1}', "no JSON"):
        answer = await stand.ask(post(body, "/v2/repository/index"))
        assert answer.status == 400
        assert answer.json["error"].startswith("the body is not a repository index request: ")


@on_stand(whole=True)
async def test_statistics_count_inputs_and_batches(stand: Stand) -> None:
    client = await stand.connect()

    async def stats(path: str = f"{MODEL}/stats") -> Any:
        await client.send(get(path))
        [found] = (await client.answer()).json["model_stats"]
        return found

    nothing = await stats()
    assert (nothing["name"], nothing["version"], nothing["last_inference"]) == ("default", "1", 0)
    asked = '{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "bad"]}]}'
    await client.send(post(asked, f"{MODEL}/infer"))
    assert (await client.answer()).status == 422
    await client.send(post(asked.replace("bad", "good"), f"{MODEL}/infer"))
    assert (await client.answer()).status == 200
    found = await stats()
    assert await stats("/v2/models/stats") == await stats(f"{MODEL}/versions/1/stats") == found
    assert found["inference_count"] >= 3
    assert found["execution_count"] == sum(one["compute_infer"]["count"] for one in found["batch_stats"]) >= 1
    assert found["last_inference"] > 1_600_000_000_000
    figures = found["inference_stats"]
    assert figures["success"]["count"] == found["inference_count"]
    assert figures["fail"]["count"] >= 1
    assert all(one["ns"] >= 0 for one in figures.values())


@on_stand(whole=True, keys={"good": {}, "neighbour": {"tenant": "other"}})
async def test_a_tenant_is_told_the_statistics_of_its_own_requests_from_its_first_question_on(stand: Stand) -> None:
    async def counts(key: str) -> Any:
        [found] = (await stand.ask(get(f"{MODEL}/stats", f"Authorization: Bearer {key}"))).json["model_stats"]
        return found["inference_count"], found["execution_count"], found["last_inference"] > 0

    async def ask(key: str) -> None:
        asked = '{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]}'
        assert (await stand.ask(post(asked, f"{MODEL}/infer", f"Authorization: Bearer {key}"))).status == 200

    await ask("good")
    assert await counts("good") == (0, 0, False)
    await ask("good")
    await ask("neighbour")
    inferences, executions, answered = await counts("good")
    assert (inferences, answered) == (2, True) and 1 <= executions <= 2
    assert await counts("neighbour") == (0, 0, False)
    await ask("neighbour")
    assert (await counts("neighbour"))[0] == (await counts("good"))[0] == 2


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v2/repository/models/default/load", "start a worker for a model"),
        ("/v2/repository/models/default/unload", "start a worker for a model"),
        ("/v2/trace/setting", "trace settings are not offered"),
        (f"{MODEL}/trace/setting", "trace settings are not offered"),
        (f"{MODEL}/versions/1/trace/setting", "trace settings are not offered"),
        ("/v2/logging", "log settings are not offered"),
        ("/v2/systemsharedmemory/status", "shared memory is not offered; send the data of the inputs in the body"),
        ("/v2/systemsharedmemory/region/r/register", "shared memory is not offered"),
        ("/v2/cudasharedmemory/region/r/unregister", "shared memory is not offered"),
        (f"{MODEL}/generate", "generate is not offered"),
        (f"{MODEL}/generate_stream", "generate is not offered"),
    ],
)
async def test_what_other_servers_have_is_not_offered(stand: Stand, path: str, says: str) -> None:
    for request in (get(path), post("{}", path)):
        answer = await stand.ask(request)
        assert (answer.status, list(answer.json)) == (501, ["error"])
        assert says in answer.json["error"]


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (get("/v2/models/other"), 404, "no model named 'other'"),
        (get("/v2/models/other/ready"), 404, "no model named 'other'"),
        (get("/v2/models/other/stats"), 404, "no model named 'other'"),
        (get(f"{MODEL}/versions/2"), 404, "has no version '2' that takes requests; there is: 1"),
        (get(f"{MODEL}/versions/2/config"), 404, "has no version '2'"),
        (get("/v2/nothing"), 404, "nothing is served at /v2/nothing"),
        (post("{}", "/v2"), 405, "only GET, HEAD, OPTIONS"),
        (post("{}", "/v2/"), 405, "only GET, HEAD, OPTIONS"),
        (post("{}", MODEL), 405, "only GET, HEAD, OPTIONS"),
        (get("/v2/repository/index"), 405, "only OPTIONS, POST"),
        (get(f"{MODEL}/infer"), 405, "only OPTIONS, POST"),
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
    tensor = '{"inputs": [{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}'
    stand.real.served.in_doubt = lambda: True
    for asked in (
        post('{"input": "a", "model": "late"}'),
        post('{"inputs": ["a", "b"], "model": "late"}'),
        post('{"input": "a", "model": "late"}', "/v1/inference", "Prefer: respond-async"),
        post('{"input_data": "a", "model_id": "late"}', "/v1/predict"),
        post('{"prompt": "a", "model": "late"}', "/v1/completions"),
        post(tensor, "/v2/models/late/infer"),
        post("{", "/v2/models/late/infer"),
        get("/v2/models/late"),
        get("/v2/models/late/ready"),
        get("/v2/models/late/versions/3/stats"),
        get("/v1/models/late"),
    ):
        answer = await stand.ask(asked)
        assert (answer.status, answer.header["retry-after"]) == (503, "1"), asked
        assert b"it is not known now whether the model 'late' is served" in answer.body
    for asked in (
        post('{"input": "a", "version": "9"}'),
        post('{"inputs": ["a", "b"], "version": "9"}'),
        post(tensor, "/v2/models/default/versions/9/infer"),
        get("/v2/models/default/versions/9"),
        get("/v2/models/default/versions/9/ready"),
    ):
        answer = await stand.ask(asked)
        assert (answer.status, answer.header["retry-after"]) == (503, "1"), asked
        assert b"it is not known now whether the model 'default' has a version '9'" in answer.body
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
    async def ask(stand: Stand, asked: str, key: str, body: str | None = None) -> Answer:
        fields = [f"Authorization: Bearer {key}"] if key else []
        return await stand.ask(get(asked, *fields) if body is None else post(body, asked, *fields))

    for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
        assert (await ask(stand, path, "")).status == 200
    for path in (MODEL, f"{MODEL}/ready", f"{MODEL}/config", f"{MODEL}/stats", f"{MODEL}/versions/1"):
        assert [(await ask(stand, path, key)).status for key in ("good", "other", "", "bad")] == [200, 403, 401, 401]
        assert list((await ask(stand, path, "")).json) == ["error"]
        unknown = await ask(stand, path.replace("default", "unknown"), "other")
        hidden = await ask(stand, path, "other")
        assert (unknown.status, unknown.json["error"].replace("unknown", "default")) == (403, hidden.json["error"])
    assert (await ask(stand, "/v2/models/stats", "")).status == 401
    assert len((await ask(stand, "/v2/models/stats", "good")).json["model_stats"]) == 1
    assert (await ask(stand, "/v2/models/stats", "other")).json["model_stats"] == []
    assert (await ask(stand, "/v2/repository/index", "", "")).status == 401
    assert len((await ask(stand, "/v2/repository/index", "good", "")).json) == 1
    assert (await ask(stand, "/v2/repository/index", "other", "")).json == []
