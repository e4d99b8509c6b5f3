"""Files and batches over HTTP with a running service: what clients see, and what hostile ones can't do."""

import contextlib
import http.client
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from headway.app.serving import BackgroundService
from headway.bulk.folder import BulkFolder
from headway.config import Settings
from headway.errors import FolderUnavailable, StoreUnavailable
from headway.http.openai.bulk import _batch_object
from headway.http.server.listener import Listener
from headway.model import Role
from headway.model.bulk import BulkJob, JobDelay, JobStatus
from headway.storage.rows import BulkRows
from tests.e2e.client import wait_until
from tests.identity.writing import entry, key_of

pytestmark = pytest.mark.processes

BOUNDARY = "xYzZY"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
EXPIRES = f'batch\r\n--{BOUNDARY}\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600'


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


def form(content: bytes, purpose: str = "batch") -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n'
        f"Content-Type: application/octet-stream\r\n\r\n"
    ).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()  # fmt: skip


def line(number: int, prompt: str | list[Any] = "a", **body: Any) -> str:
    asked = {"model": "default", "prompt": prompt, **body}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": asked})


def slow(inputs: list[str]) -> list[str]:
    time.sleep(0.05)
    return inputs


class Client:
    def __init__(self, url: str, key: str) -> None:
        self._address = urlsplit(url)
        self._headers = {"authorization": f"Bearer {key_of(key)}"} if key else {}

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=20)
        try:
            connection.request(method, path, body or None, {**self._headers, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        found, content = self.ask(method, path, b"" if body is None else json.dumps(body).encode())
        assert found == status, content
        return json.loads(content)

    def upload(self, content: bytes, status: int = 200, **known: str) -> Any:
        found, answer = self.ask("POST", "/v1/files", form(content, **known), **{"content-type": FORM})
        assert found == status, answer
        return json.loads(answer)

    def batch(self, *lines: str, **known: Any) -> Any:
        file = self.upload("\n".join(lines).encode())
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h", **known}
        return self.json("POST", "/v1/batches", asked)

    def ended(self, batch: Any) -> Any:
        until = time.monotonic() + 30
        while (found := self.json("GET", f"/v1/batches/{batch['id']}"))["status"] not in (
            "completed",
            "failed",
            "cancelled",
        ):
            assert time.monotonic() < until, found
            time.sleep(0.1)
        return found

    def records(self, id: str | None) -> dict[str | None, Any]:
        if id is None:
            return {}
        _, content = self.ask("GET", f"/v1/files/{id}/content")
        return {one["custom_id"]: one for one in map(json.loads, content.splitlines())}


class Served:
    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self._url = folder, url

    def client(self, key: str = "") -> Client:
        return Client(self._url, key)

    @property
    def incoming(self) -> list[Path]:
        return [*(self.folder / "bulk" / "incoming").iterdir()]


@contextlib.contextmanager
def serving(folder: Path, target: str = "upper", **known: Any) -> Iterator[Served]:
    settings = Settings(**{"port": 0, "admin_port": 0, "bulk_dir": str(folder / "bulk"), **known})
    service = BackgroundService(settings, Role.SERVE, f"{__name__}:{target}", Listener)
    try:
        yield Served(service.url, folder)
    finally:
        service.stop(drain=False)


TENANTS = "batches", "files", "forms", "none", "away", "judged", "downloads"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service for all tests that need no special settings. Each has its own key and tenant, named after it."""
    folder = tmp_path_factory.mktemp("served")
    keys, policy = folder / "keys.toml", folder / "policy.toml"
    keys.write_text("".join(entry(name, tenant=name) for name in TENANTS) + entry("ada", more="rate = 1\nburst = 8"))
    policy.write_text('[[rules]]\nname = "judge"\nfunction = "tests.bulk.targets:harmless"\n')
    ledger = f"sqlite:///{folder / 'ledger.db'}"
    with serving(folder, keys=str(keys), input_policy=str(policy), ledger=ledger) as service:
        yield service


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with low limits and short timeouts."""
    folder = tmp_path_factory.mktemp("small")
    keys = folder / "keys.toml"
    keys.write_text("".join(entry(name, tenant=name) for name in ("leaves", "large", "stalls")))
    bounds: dict[str, Any] = {"bulk_max_bytes": 1 << 20, "max_body_bytes": 1 << 16, "read_timeout_ms": 500.0}
    with serving(folder, keys=str(keys), **bounds) as service:
        yield service


def test_a_batch_is_answered_as_its_route_would_and_has_a_row_in_the_ledger(served: Served) -> None:
    client = served.client("batches")
    wrong = [
        line(2, model="elsewhere"),
        line(3, stream=True),
        line(4, n=200),
        json.dumps({"custom_id": "5", "method": "POST", "url": "/v1/embeddings", "body": {}}),
        "no JSON",
        line(7, prompt=["a", 3]),
        json.dumps({"custom_id": "8", "method": "GET", "url": "/v1/completions", "body": {}}),
    ]
    batch = client.batch(line(1, "hello"), *wrong, line(9, ["a", "b"], n=2), metadata={"k": "v"})
    assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "validating", "/v1/completions")
    found = client.ended(batch)
    assert found["request_counts"] == {"total": 9, "completed": 2, "failed": 7}
    assert found["metadata"] == {"k": "v"} and found["errors"] is None
    answers = client.records(found["output_file_id"])
    assert [one["text"] for one in answers["9"]["response"]["body"]["choices"]] == ["A", "A", "B", "B"]
    answer = answers["1"]
    assert answer["error"] is None and answer["response"]["status_code"] == 200
    told = answer["response"]["body"]
    sync = client.json("POST", "/v1/completions", {"model": "default", "prompt": "hello"})
    assert told["choices"] == sync["choices"] and told.keys() == sync.keys()
    assert told["id"] == f"cmpl-{answer['response']['request_id'][4:]}"
    errors = client.records(found["error_file_id"])
    statuses = {id: (one["response"]["status_code"], one["line"]) for id, one in errors.items()}
    assert statuses == {
        "2": (404, 2), "3": (400, 3), "4": (400, 4), "5": (400, 5), None: (400, 6), "7": (400, 7), "8": (400, 8),
    }  # fmt: skip
    refused = client.json("POST", "/v1/completions", {"model": "elsewhere", "prompt": "a"}, 404)
    assert errors["2"]["response"]["body"] == refused
    rows = "SELECT status, requests FROM headway_requests WHERE tier = 'bulk' AND tenant = 'batches'"
    with contextlib.closing(sqlite3.connect(served.folder / "ledger.db")) as database:
        wait_until(lambda: database.execute(rows).fetchall() == [("completed", 9)])


def test_files_are_listed_fetched_and_deleted(served: Served) -> None:
    client = served.client("files")
    content = bytes(range(256)) * 3000
    files = [client.upload(content + bytes([n])) for n in range(3)]
    assert files[0]["bytes"] == len(content) + 1 and files[0]["filename"] == "lines.jsonl"
    assert client.ask("GET", f"/v1/files/{files[1]['id']}/content") == (200, content + b"\1")
    assert client.json("GET", f"/v1/files/{files[1]['id']}") == files[1]
    page = client.json("GET", "/v1/files?limit=2")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([files[2]["id"], files[1]["id"]], True)
    page = client.json("GET", f"/v1/files?limit=2&after={files[1]['id']}")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([files[0]["id"]], False)
    assert client.json("DELETE", f"/v1/files/{files[0]['id']}")["deleted"] is True
    assert client.json("GET", f"/v1/files/{files[0]['id']}", status=404)["error"]["code"] == "not_found"
    client.json("DELETE", f"/v1/files/{files[2]['id']}")
    page = client.json("GET", f"/v1/files?after={files[2]['id']}")
    assert [one["id"] for one in page["data"]] == [files[1]["id"]], "the cursor is of a file that is gone"
    for path in ("files?after=file-1", f"files?after=batch_{files[1]['id'][5:]}", f"batches?after={files[1]['id']}"):
        assert client.json("GET", f"/v1/{path}", status=400)["error"]["param"] == "after"
    assert client.json("GET", "/v1/batches?limit=0", status=400)["error"]["param"] == "limit"


def test_ids_of_others_are_unknown_and_quotas_are_each_tenants(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("mine") + entry("yours", tenant="globex"))
    with serving(tmp_path, keys=str(tmp_path / "keys.toml"), bulk_max_bytes=1000) as service:
        mine, yours, nobody = service.client("mine"), service.client("yours"), service.client()
        assert nobody.json("GET", "/v1/files", status=401)["error"]["code"] == "invalid_api_key"
        batch = mine.batch("x" * 600)
        for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/batches/{batch['id']}"):
            assert mine.json("GET", path)["id"]
            assert yours.json("GET", path, status=404)["error"]["code"] == "not_found"
        assert yours.json("POST", f"/v1/batches/{batch['id']}/cancel", status=404)
        stolen = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert yours.json("POST", "/v1/batches", stolen, 404)["error"]["code"] == "not_found"
        assert yours.json("GET", "/v1/batches")["data"] == []
        assert "bulk_max_bytes" in mine.upload(b"y" * 600, 413)["error"]["message"]
        yours.upload(b"y" * 600)
        for _ in range(9):
            yours.upload(b"y")
        assert "10 files" in yours.upload(b"y", 413)["error"]["message"]
        mine.ended(batch)


def test_what_is_no_form_is_refused(served: Served) -> None:
    client = served.client("forms")
    for body, kind, words in (
        (b"{}", "application/json", "multipart/form-data"),
        (form(b"a"), "multipart/form-data", "boundary"),
        (b"x" * 100_000, FORM, "malformed"),
        (form(b"a")[:-10], FORM, "malformed"),
        (form(b"a", EXPIRES), FORM, "keep_days"),
        (form(b"a", "fine-tune"), FORM, "purpose"),
        (form(b""), FORM, "file"),
        (form(b"a", "batch" * 1000), FORM, "more than"),
        (b"--" + BOUNDARY.encode() + b"\r\n" + b"A: b\r\n" * 5000, FORM, "malformed"),
    ):
        status, answer = client.ask("POST", "/v1/files", body, **{"content-type": kind})
        assert (status, words in json.loads(answer)["error"]["message"]) == (400, True), (body[:200], answer)
        assert (served.incoming, client.json("GET", "/v1/files")["data"]) == ([], [])


def test_a_batch_that_is_none_is_refused(served: Served) -> None:
    client = served.client("none")
    good = {"input_file_id": client.upload(b"a")["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"metadata": {"k": 3}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ):
        assert client.json("POST", "/v1/batches", {**good, **change}, 400)["error"]["param"] == param
    told = client.json("POST", "/v1/batches", {**good, "completion_window": "30m"}, 400)["error"]["message"]
    assert "from 1h to 30d" in told
    client.ended(client.json("POST", "/v1/batches", {**good, "output_expires_after": None}))


def begun_upload(client: Client) -> http.client.HTTPConnection:
    """Open a connection, and send two thirds of an upload."""
    connection = http.client.HTTPConnection(client._address.hostname or "", client._address.port, timeout=20)
    connection.putrequest("POST", "/v1/files")
    for name, value in {**client._headers, "content-type": FORM, "content-length": "900000"}.items():
        connection.putheader(name, value)
    connection.endheaders(form(b"x" * 600_000)[:600_000])
    return connection


def test_a_client_that_leaves_its_upload_leaves_nothing(small: Served) -> None:
    client, kind = small.client("leaves"), {"content-type": FORM}
    for _ in range(3):
        begun_upload(client).close()
    wait_until(lambda: client.ask("POST", "/v1/files", form(b"y" * 900_000), **kind)[0] == 200)
    wait_until(lambda: not small.incoming)


def test_an_upload_may_be_larger_than_other_bodies_and_no_larger_than_its_quota(small: Served) -> None:
    client = small.client("large")
    client.upload(b"x" * 600_000)
    head = {"content-type": FORM, "content-length": str(2 << 20)}
    status, answer = client.ask("POST", "/v1/files", b"x", **head)
    assert status == 413, answer
    client.json("POST", "/v1/completions", {"model": "default", "prompt": "a" * (1 << 17)}, 413)


def test_an_upload_that_stalls_is_cut_off(small: Served) -> None:
    connection = begun_upload(small.client("stalls"))
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "request_timeout")
    connection.close()
    wait_until(lambda: not small.incoming)


def test_clients_do_not_read_where_the_database_and_the_folder_are(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, secret = (
        served.client("away"),
        "postgresql://…@10.0.0.9/jobs does not answer: [Errno 111] Connection refused",
    )
    file = client.upload(line(1).encode())["id"]
    for part, owner, method, error, path in (
        ("database", BulkRows, "files", StoreUnavailable, "/v1/files"),
        ("folder", BulkFolder, "size", FolderUnavailable, f"/v1/files/{file}/content"),
    ):
        monkeypatch.setattr(owner, method, AsyncMock(side_effect=error(f"{secret} of the {part}")))
        answer = client.json("GET", path, status=503)
        words = f"bulk jobs are not available right now, because their {part} is unreachable; try again"
        assert answer["error"]["message"] == words
        assert f"{secret} of the {part}" in caplog.text


def test_without_a_folder_there_are_no_files(tmp_path: Path) -> None:
    with serving(tmp_path, bulk_dir="") as service:
        assert service.client().json("GET", "/v1/files", status=404)["error"]["code"] == "unknown_url"


def test_lines_are_judged_by_the_functions_of_the_input_policy(served: Served) -> None:
    client = served.client("judged")
    found = client.ended(client.batch(*(line(number) for number in range(1, 21)), line(21, ["a", "evil", "b"])))
    assert found["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    [failed] = client.records(found["error_file_id"]).values()
    told = failed["response"]["body"]["error"]
    assert (failed["line"], failed["response"]["status_code"]) == (21, 422)
    assert told["message"].startswith("input 1 of 3")


def test_each_call_of_files_and_batches_counts_as_a_request_but_a_look_at_a_batch(served: Served) -> None:
    client = served.client("ada")
    batch = client.batch(line(1))
    file = f"/v1/files/{batch['input_file_id']}"
    for method, path in (("GET", file), ("GET", f"{file}/content"), ("HEAD", f"{file}/content"), ("GET", "/v1/files")):
        assert client.ask(method, path)[0] == 200
    client.ended(batch)
    assert client.ask("GET", "/v1/batches")[0] == 200
    assert client.ask("POST", f"/v1/batches/{batch['id']}/cancel")[0] == 400
    for method, path in (
        ("GET", file), ("DELETE", file), ("GET", f"{file}/content"), ("GET", "/v1/files"), ("GET", "/v1/batches"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"), ("POST", "/v1/files"), ("POST", "/v1/batches"),
        ("POST", "/v1/completions"),
    ):  # fmt: skip
        status, answer = client.ask(method, path, b"{}" if method == "POST" else b"")
        assert status == 429, (method, path, answer)
        assert json.loads(answer)["error"]["code"] == "rate_limit_exceeded"
    assert client.ask("GET", f"/v1/batches/{batch['id']}")[0] == 200


def unread(client: Client, id: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(client._address.hostname or "", client._address.port, timeout=20)
    connection.request("GET", f"/v1/files/{id}/content", headers=client._headers)
    return connection


def test_a_download_that_is_not_read_holds_no_file_open_and_too_many_are_refused(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client("downloads")
    content = b"x" * (8 << 20)
    id = client.upload(content)["id"]
    downloads, answers = [unread(client, id) for _ in range(130)], []
    for download in downloads:
        answers.append(download.getresponse())
    assert Counter(one.status for one in answers) == {200: 115, 429: 15}
    told = json.loads(answers[-1].read())["error"]
    assert told["message"].startswith("115 of your files are being transferred")
    path, until = (served.folder / "bulk" / "files" / id).resolve(), time.monotonic() + 20
    while path in open_files():  # The last ones may still be filling their clients' buffers.
        assert time.monotonic() < until
    status, answer = client.ask("POST", "/v1/files", form(b"a"), **{"content-type": FORM})
    assert (status, json.loads(answer)["error"]["message"]) == (429, told["message"])
    assert answers[0].read() == content
    client.json("DELETE", f"/v1/files/{id}")
    with pytest.raises(http.client.IncompleteRead):
        answers[1].read()
    for download in downloads:
        download.close()
    id, until = client.upload(content)["id"], time.monotonic() + 20
    while client.ask("GET", f"/v1/files/{id}/content")[0] != 200:
        assert time.monotonic() < until
    assert "Traceback" not in caplog.text


def open_files() -> set[Path]:
    """Return the paths of this process's open files. A descriptor may be closed by another thread in the meantime."""
    paths = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.add(descriptor.readlink())
    return paths


def test_a_job_ends_when_its_key_does(tmp_path: Path) -> None:
    """One key expires, and the other loses access to the model."""
    keys, other = tmp_path / "keys.toml", entry("bob") + entry("eve", tenant="globex")
    keys.write_text(entry("ada") + entry("cyd", tenant="globex") + other)
    with serving(tmp_path, "slow", keys=str(keys), max_batch_size=1) as service:
        clients = [service.client(name) for name in ("ada", "cyd")]
        batches = [client.batch(*(line(number) for number in range(500))) for client in clients]
        for client, batch in zip(clients, batches, strict=True):
            # While the key is being changed, lines fail one by one, but the job doesn't.
            path = f"/v1/batches/{batch['id']}"
            wait_until(lambda: client.json("GET", path)["request_counts"]["completed"])  # noqa: B023
        changed, only = tmp_path / "changed.toml", 'models = ["other"]'
        changed.write_text(entry("ada", more="expires_at = 1") + entry("cyd", tenant="globex", more=only) + other)
        changed.replace(keys)  # Atomically: during a normal write a reader may see an empty file.
        for name, batch, code in zip(("bob", "eve"), batches, ("key_not_valid", "model_not_allowed"), strict=True):
            client = service.client(name)
            job = client.ended(batch)
            assert (job["status"], [fault["code"] for fault in job["errors"]["data"]]) == ("failed", [code])
            counts = job["request_counts"]
            assert counts["completed"] < counts["total"] or not counts["total"]
            assert len(client.records(job["output_file_id"])) == counts["completed"]


def test_a_batch_that_waits_says_for_what_and_how_long() -> None:
    job = BulkJob(
        id="batch_1", tenant="t", user="u", endpoint="/v1/completions", input_file="file-1", created_at=0.0, expires_at=9.0,
        status=JobStatus.IN_PROGRESS, delay=JobDelay(waits="requests came of late", until=127.0),
    )  # fmt: skip
    assert [one["message"] for one in _batch_object(job, 100.0)["errors"]["data"]] == [
        "requests came of late; 27 seconds more"
    ]
    assert _batch_object(job, 100.0)["errors"]["data"][0]["code"] == "waiting"
    assert _batch_object(job, 128.0)["errors"]["data"][0]["message"] == "requests came of late"
    assert _batch_object(replace(job, status=JobStatus.COMPLETED), 100.0)["errors"] is None
