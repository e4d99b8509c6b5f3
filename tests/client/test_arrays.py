"""Arrays in both clients: encoding, decoding, and round trips through a real service."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headway.client import ApiError, InvalidInput, RateLimited, RejectedByModel, Result
from headway.client.arrays import array_inference, read_arrays
from headway.client.messages import Answer, Request
from tests.client.asking import CLIENTS, asking
from tests.client.scripted import LOST, Step, scripted
from tests.e2e.server import Server, serving

NAN, INFINITY = float("nan"), float("inf")

ARRAYS: dict[str, Any] = {
    "BOOL": np.array([[True, False], [False, True]]),
    **{f"UINT{bits}": np.array([[0, 2**bits - 1]], f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.array([[-(2 ** (bits - 1)), 5]], f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.array([[0.1, NAN], [-INFINITY, -0.0]], f"f{bits // 8}") for bits in (16, 32, 64)},
    "BYTES": np.array([[b"", b"\xff\0"], ["é".encode(), b"x"]], object),
}


def body_of(request: Request) -> tuple[Any, bytes]:
    assert request.body is not None
    length = int(request.header["Inference-Header-Content-Length"])
    return json.loads(request.body[:length]), request.body[length:]


def echo(request: Request, **more: Any) -> Answer:
    head, data = body_of(request)
    text = json.dumps({"model_version": "3", "outputs": head["inputs"], **more}).encode()
    header = {"inference-header-content-length": str(len(text)), "x-request-id": "req_1"}
    return Answer(200, header, text + data)


def asked(input: Any, **how: Any) -> Request:
    given = {"model": None, "parameters": None, "key": "", "outputs": None, **how}
    return array_inference(input, **given)


def step(answer: Answer) -> Step:
    return answer.status, answer.header, answer.body


def same(one: Any, other: Any) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes())


@pytest.mark.parametrize("datatype", ARRAYS)
def test_an_array_of_every_datatype_comes_back_as_it_was(datatype: str) -> None:
    array = ARRAYS[datatype]
    head, data = body_of(asked(array))
    [said] = head["inputs"]
    assert (said["name"], said["datatype"], said["shape"]) == ("INPUT", datatype, list(array.shape))
    assert said["parameters"] == {"binary_data_size": len(data)}
    output = read_arrays(echo(asked(array))).output
    assert same(output, array)
    output[...] = array[::-1]  # The caller may write to it.


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">i4").reshape(2, 3, 4),
        np.arange(24.0).reshape(4, 6).T,
        np.arange(24, dtype="u1").reshape(4, 6)[::2, ::-1],
        np.zeros((3, 0), "f4"),
    ],
)
def test_an_array_is_sent_in_rows_however_it_lies_in_memory(array: Any) -> None:
    output = read_arrays(echo(asked(array))).output
    assert output.shape == array.shape
    assert (output == array).all()


def test_texts_are_sent_in_utf_8_and_numbers_of_numpy_as_json() -> None:
    for array in (np.array(["é", "b"]), np.array(["é", b"b"], object)):
        assert read_arrays(echo(asked(array))).output.tolist() == ["é".encode(), b"b"]
    with scripted((200, {}, b'{"request_id":"r","output":1}')) as service, asking("threads", service.url) as client:
        client.infer({"a": np.float64(0.5), "b": np.str_("x")})
        assert service.asked[0].json == {"input": {"a": 0.5, "b": "x"}}


def test_bfloat16_is_read_as_float32_where_no_library_has_made_it_known() -> None:
    request = asked(np.array([16256, 49248], "u2"))
    said = {**body_of(request)[0]["inputs"][0], "datatype": "BF16"}
    output = read_arrays(echo(request, outputs=[said])).output
    assert output.tolist() == [1.0, -3.5]
    assert output.dtype.name in ("float32", "bfloat16")


def test_bfloat16_of_a_library_that_knows_it_comes_back_as_it_was() -> None:
    library = pytest.importorskip("ml_dtypes")
    array = np.array([[0.1, -3.5]], library.bfloat16)
    assert body_of(asked(array))[0]["inputs"][0]["datatype"] == "BF16"
    assert same(read_arrays(echo(asked(array))).output, array)


def test_arrays_by_name_with_parameters_and_wanted_outputs_are_one_request() -> None:
    arrays = {"a": np.zeros((2, 3), "f4"), "b": np.ones((2,), "i8")}
    request = asked(arrays, model="org/m", parameters={"top": 3}, key="k", outputs=["b"])
    assert (request.method, request.path, request.timed) == ("POST", "/v2/models/org%2Fm/infer", True)
    assert request.header["Idempotency-Key"] == "k"
    head, data = body_of(request)
    assert [one["name"] for one in head["inputs"]] == ["a", "b"]
    assert head["parameters"] == {"top": 3, "binary_data_output": True}
    assert head["outputs"] == [{"name": "b"}]
    assert data == bytes(24) + arrays["b"].tobytes()
    result = read_arrays(echo(request, parameters={"tokens_used": 7}))
    assert {name: one.tolist() for name, one in result.output.items()} == {"a": [[0.0] * 3] * 2, "b": [1, 1]}
    assert result == Result(result.output, "req_1", None, 7, "3")


@pytest.mark.parametrize(
    ("input", "how", "what"),
    [
        (np.float32(1), {}, "is not JSON"),
        (np.array(1.5), {}, r"has shape \(\), so it has no rows"),
        (np.zeros(2, complex), {}, "of dtype complex128: cannot be sent. Send bool, int8"),
        (np.array([None, 1], object), {}, "with a NoneType: expected strings or bytes"),
        (np.array(["\ud800"], object), {}, "not valid Unicode"),
        ({"a": np.zeros(2), "b": [1, 2]}, {}, r"input\['b'\] of type list: .*numpy.asarray"),
        ({"a": np.zeros(2), 5: np.zeros(2)}, {}, "input with the key 5: names of arrays must be strings"),
        ([np.zeros(2), np.zeros(3)], {}, "numpy.stack, or call infer_many"),
        (np.zeros(2), {"parameters": {"timeout": 5}}, "parameters with `timeout`: .*Rename the parameter"),
        (np.zeros(2), {"parameters": [1]}, "parameters of type list: must be a dict"),
        (
            np.zeros(2),
            {"outputs": "scores"},
            r"outputs = 'scores': must be a list of output names. For example \['scores'\]",
        ),
        (np.zeros(2), {"outputs": []}, "must be a list of output names"),
        ("text", {"outputs": ["a"]}, "can only be given for arrays, but the input is of type str"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is(input: Any, how: dict[str, Any], what: str) -> None:
    for kind in CLIENTS:
        with asking(kind, "http://127.0.0.1:1") as client, pytest.raises(InvalidInput, match=what):
            client.infer(input, **how)


class Remote:
    def __len__(self) -> int:
        return 1

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("copy it to the host first")


def test_an_array_of_another_library_that_numpy_does_not_take_is_refused_with_its_words() -> None:
    why = "input of type Remote: numpy cannot convert it: copy it to the host first"
    with pytest.raises(InvalidInput, match=why):
        asked(Remote())


@pytest.mark.processes
def test_the_clients_import_no_numpy_and_refuse_arrays_without_it() -> None:
    script = """
import sys
from headway.client import Client, InvalidInput
assert "numpy" not in sys.modules
sys.modules["numpy"] = None
class Array(list):
    def __array__(self): ...
try:
    Client().infer(Array())
except InvalidInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "sending arrays needs numpy, which is not installed. Run pip install numpy" in done.stdout


def test_an_answer_that_is_cut_or_has_other_arrays_than_it_says_is_none() -> None:
    request = asked(np.ones((2, 2), "f4"))
    good = echo(request)
    answers = [Answer(200, good.header, good.body[:cut]) for cut in (0, 1, 20, -1, -30)]
    answers += [Answer(200, {}, b"{}"), Answer(200, {"inference-header-content-length": "x"}, b"")]
    said = body_of(request)[0]["inputs"][0]
    wrong: list[dict[str, Any]] = [{"shape": [3, 2]}, {"shape": [2**80]}, {"datatype": "WHAT"}, {"datatype": "BYTES"}]
    wrong += [{"parameters": {}}, {"parameters": {"binary_data_size": -1}}]
    answers += [echo(request, outputs=[{**said, **one}]) for one in wrong]
    for answer in answers:
        with pytest.raises(ApiError, match="the answer is not Headway's"):
            read_arrays(answer)


def test_a_request_with_arrays_is_sent_again_under_its_key_and_with_the_time_that_is_left(kind: str) -> None:
    good = echo(asked(np.ones((1, 2), "f4")))
    refused: Step = (503, {"retry-after-ms": "1"}, b'{"error":"no worker is ready"}')
    with scripted(LOST, refused, step(good)) as service, asking(kind, service.url) as client:
        assert client.infer(np.ones((1, 2), "f4"), timeout=60.0).output.tolist() == [[1.0, 1.0]]
        assert {one.path for one in service.asked} == {"/v2/infer"}
        assert len({one.header["Idempotency-Key"] for one in service.asked}) == 1
        assert len({one.body for one in service.asked}) == 1
        left = [int(one.header["X-Request-Timeout-Ms"]) for one in service.asked]
        assert left == sorted(left, reverse=True)
        assert 0 < left[-1] < left[0] <= 60_000, "the pause that was asked for is gone"


def test_errors_have_their_code_from_the_header(kind: str) -> None:
    header = {"x-headway-error": "RATE_LIMITED", "x-request-id": "req_9"}
    header |= {"x-should-retry": "false", "retry-after-ms": "1500"}
    with scripted((429, header, b'{"error":"over the rate"}')) as service, asking(kind, service.url) as client:
        with pytest.raises(RateLimited) as raised:
            client.infer(np.ones((1, 2)))
        error = raised.value
    assert (error.message, error.code, error.request_id) == ("over the rate", "RATE_LIMITED", "req_9")
    assert error.retry_after == 1.5


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("halved"), target="tests.targets.passed:Halved", lawful=False) as server:
        server.expected = {"batch failed"}
        yield server


ROWS = np.arange(12, dtype="f4").reshape(3, 4)


@pytest.mark.processes
def test_a_service_gives_arrays_for_arrays(kind: str, halved: Server) -> None:
    with asking(kind, f"http://127.0.0.1:{halved.port}") as client:
        result = client.infer(ROWS)
        assert same(result.output, ROWS[:, :2] / 2)
        assert result.request_id.startswith("req_") and result.model_version == "1"
        assert client.infer(ROWS, "default", idempotency_key="once").output.shape == (3, 2)
        infinite = np.array([[INFINITY, NAN, 0, 0]], "f4")
        assert same(client.infer(infinite).output, infinite[:, :2])
        assert same(client.infer(ROWS.astype("i2")).output, ROWS[:, :2] / 2)  # A narrower datatype.


@pytest.mark.processes
def test_each_row_of_an_array_is_an_input_of_many(kind: str, halved: Server) -> None:
    with asking(kind, f"http://127.0.0.1:{halved.port}") as client:
        results = client.infer_many(ROWS)
        assert [one.output.shape for one in results] == [(2,)] * 3
        assert same(np.stack([one.output for one in results]), ROWS[:, :2] / 2)
        [good, bad] = client.infer_many(np.concatenate([ROWS[:1], ROWS[:1] + 13]), return_errors=True)
        assert isinstance(good, Result) and same(good.output, ROWS[0, :2] / 2) and isinstance(bad, RejectedByModel)
        ragged = client.infer_many([ROWS[:1], ROWS[1:]], outputs=["OUTPUT"])
        assert [one.output.shape for one in ragged] == [(1, 2), (2, 2)]
        good, bad = client.infer_many([ROWS[:1], ROWS[:1] + 13], return_errors=True)
        assert isinstance(good, Result) and isinstance(bad, RejectedByModel)
        assert "thirteen" in str(bad) and bad.code == "REJECTED_BY_MODEL"
