"""Third-party generators can read the contract, and the clients they generate call each route."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.config import Settings
from headway.http import openapi
from headway.model import ValueKind
from tests.clients.environments import run_client
from tests.e2e.server import Server, launched

TARGETS = ("text=tests.clients.targets:answer", "octets=tests.clients.targets:octets")
TEXTS = ["A", "B", "C", ["D", "E"], "QUI=", "F", "G", "USER: H\nASSISTANT:", "I", "J", "J", "J"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Server, str, Path]]:
    """A service with two models that have different types of values, its URL, and a folder for the client."""
    (tmp_path / "client").mkdir()
    with launched(tmp_path, *TARGETS[1:], "--default-model", "text", target=TARGETS[0]) as server:
        server.ready()
        yield server, f"http://127.0.0.1:{server.port}", tmp_path / "client"
        server.signal()
        server.check_end()


def operations(server: Server) -> set[str]:
    paths: dict[str, Any] = server.get("/openapi.json").json["paths"]
    return {
        one["operationId"] for item in paths.values() for name, one in item.items() if name in ("get", "post", "delete")
    }


def test_a_client_by_openapi_python_client_calls_every_route(service: tuple[Server, str, Path]) -> None:
    server, url, folder = service
    seen = run_client("openapi-python", "openapi_python_program.py", url, str(folder))
    assert (seen.pop("texts"), seen.pop("numbers"), seen.pop("refused")) == (TEXTS, [2.0, 0.5, -1.0], "BAD_REQUEST")
    assert seen.pop("warned") == 0, "the generator passes over nothing"
    assert set(seen) == {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name) for name in operations(server)}


def test_a_client_by_openapi_ts_calls_every_route(service: tuple[Server, str, Path]) -> None:
    server, url, folder = service
    seen = run_client("openapi-ts", "openapi_ts_program.js", url, str(folder))
    assert (seen["texts"], seen["numbers"], seen["refused"]) == (TEXTS, [2, 0.5, -1], "BAD_REQUEST")
    assert set(seen["called"]) == operations(server)


def documents() -> list[dict[str, Any]]:
    every = [openapi.document(Settings(), openapi.Kinds(*kinds)) for kinds in product(ValueKind, ValueKind)]
    return [*every, openapi.document(Settings(keys="keys.toml"))]


def test_a_validator_of_others_finds_no_error_in_the_contract(tmp_path: Path) -> None:
    (tmp_path / "contracts.json").write_bytes(msgspec.json.encode(documents()))
    assert run_client("openapi", "lint_openapi.py", str(tmp_path / "contracts.json")) == []


def test_every_operation_says_which_credential_it_takes_and_where_it_is() -> None:
    for document in documents():
        assert document["servers"] == [{"url": "/"}]
        assert document["info"]["license"]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if method in ("get", "post", "delete"):
                    assert "security" in operation, (path, method)
