"""LangChain and two versions of OpenAI's client, the newest and the one before, against a running service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import run_client
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of

TARGET = "tests.clients.targets:answer"
CHAT = "USER: HELLO\nASSISTANT:"
ERRORS = {
    "tokens": ["BadRequestError", 400, "bad_request", "prompt", 1],
    "image": ["BadRequestError", 400, "bad_request", "messages", 1],
    "key": ["AuthenticationError", 401, "invalid_api_key", None, 1],
    "forbidden": ["PermissionDeniedError", 403, "permission_denied", None, 1],
    "model": ["NotFoundError", 404, "model_not_found", "model", 1],
    "slash": ["NotFoundError", 404, "model_not_found", "model", 1],
    "path": ["NotFoundError", 404, "unknown_url", None, 1],
    "stored": ["BadRequestError", 400, "bad_request", "previous_response_id", 1],
    "tools": ["BadRequestError", 400, "bad_request", "tools", 1],
    "conflict": ["ConflictError", 409, "idempotency_conflict", None, 2],
    "large": ["APIStatusError", 413, "payload_too_large", None, 1],
    "input": ["UnprocessableEntityError", 422, "rejected_by_model", None, 1],
    "rate": ["RateLimitError", 429, "rate_limit_exceeded", None, 1],
    "output": ["BadRequestError", 400, "bad_request", None, 1],
    "fault": ["InternalServerError", 502, "backend_error", None, 1],
    "late": ["InternalServerError", 504, "deadline_exceeded", None, 1],
    "impatient": ["APITimeoutError", 2],
    "nobody": ["APIConnectionError", 2],
}
"""Class, status, code and param of each error, and how often its request was sent."""


@pytest.mark.parametrize(("environment", "version"), [("openai", "3."), ("openai1", "1.")])
def test_openais_client_works_unchanged(environment: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(
        entry("client", more="rate = 1\nburst = 75")
        + entry("elsewhere", more='models = ["elsewhere"]')
        + entry("slow", more="rate = 300\nburst = 1")
        + entry("many", more="rate = 0")
    )
    with launched(tmp_path, "--keys", "keys.toml", target=TARGET) as server:
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        seen = run_client(environment, "openai_program.py", url, *map(key_of, ("client", "elsewhere", "slow", "many")))
        assert seen.pop("version").startswith(version)
        assert seen.pop("errors") == ERRORS
        assert seen.pop("patient") == {"texts": ["HELLO"] * 3, "refused": True, "as told": True}
        assert seen == {
            "texts": ["A", "A", "B", "B"],
            "usage": [0, True],
            "chat": [CHAT, "stop"],
            "chunks": [[CHAT], [CHAT], []],
            "stream": ["HELLO"],
            "packed": [[3.0, 0.5, -1.0], [4.0, 0.5, -1.0]],
            "plain": [[3.0, 0.5, -1.0]],
            "counted": 0,
            "many": [2048, [6.0, 0.5, -1.0]],
            "responses": {
                "whole": [f"SYSTEM: BE BRIEF\n{CHAT}", "completed", "be brief", 0.5, None],
                "streamed": ["response.created", "response.completed", CHAT],
                "gathered": CHAT,
            },
            "models": ["default"],
            "model": "default",
        }
        server.signal()
        server.check_end()


@pytest.fixture(scope="module")
def open_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with launched(tmp_path_factory.mktemp("open"), target=TARGET) as server:
        server.ready()
        yield f"http://127.0.0.1:{server.port}"
        server.signal()
        server.check_end()


def test_openais_client_for_node_works_unchanged(open_url: str) -> None:
    seen = run_client("openai-js", "openai_js.js", open_url, "any key")
    assert seen == {
        "response": [f"SYSTEM: BE BRIEF\n{CHAT}", "completed", None, "be brief"],
        "events": [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done", "completed",
        ],
        "streamed": CHAT,
        "gathered": CHAT,
        "embeddings": [2048, [3.0, 0.5, -1.0], [6.0, 0.5, -1.0]],
        "errors": {
            "tools": ["BadRequestError", 400, "bad_request", "tools"],
            "stored": ["BadRequestError", 400, "bad_request", "previous_response_id"],
            "files": ["NotFoundError", 404, "unknown_url", None],
            "base": ["NotFoundError", 404, "unknown_url", None],
        },
    }  # fmt: skip


def test_langchain_works_unchanged(open_url: str) -> None:
    seen = run_client("openai", "langchain_program.py", open_url, "any key")
    assert seen == {
        "chat": CHAT,
        "stream": [CHAT],
        "batch": ["USER: A\nASSISTANT:", "USER: B\nASSISTANT:"],
        "text": "HELLO",
        "errors": {
            "chat": ["OpenAIModelNotFoundError", "model_not_found"],
            "stream": ["OpenAIModelNotFoundError", "model_not_found"],
            "text": ["UnprocessableEntityError", "rejected_by_model"],
            "embeddings": ["BadRequestError", "bad_request"],
        },
        "embeddings": [[3.0, 0.5, -1.0], [4.0, 0.5, -1.0]],
    }


def test_openais_client_runs_batches_unchanged(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("client", more="rate = 0") + entry("other", tenant="globex"))
    with launched(tmp_path, "--keys", "keys.toml", "--bulk-dir", "bulk", target=TARGET) as server:
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        seen = run_client("openai", "openai_bulk_program.py", url, key_of("client"), key_of("other"))
        assert seen == {
            "completions": ["completed", [3, 1, 2], "HELLO", 400],
            "chat": "USER: HI\nASSISTANT:",
            "embeddings": [[[2.0, 0.5, -1.0]] * count for count in (1, 3)],
            "files": [3, 7, "batch_output"],
            "batches": [2, 3, {"k": "v"}],
            "file": True,
            "deleted": True,
            "gone": "not_found",
            "foreign file": "not_found",
            "foreign batch": "not_found",
            "cancelled": ["cancelled", True],
        }
        server.signal()
        server.check_end()
