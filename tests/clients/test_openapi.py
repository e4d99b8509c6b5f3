"""The contract of the public port, judged by a validator that others made."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from headway.config import Settings
from headway.http import openapi
from headway.model import ValueKind
from tests.clients.environments import run_client


def documents() -> list[dict[str, Any]]:
    """Contracts of services with and without keys, and of models of all kinds."""
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
