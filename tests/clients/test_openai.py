"""OpenAI's client, the newest and the one before, and LangChain, towards a running service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import run_client
from tests.e2e.server import launched
from tests.identity.writing import entry, key_of

TARGET = "tests.clients.targets:answer"
CHAT = "USER: HELLO\nASSISTANT:"
ERRORS = {
    "tokens": ["BadRequestError", 400, "bad_request", "prompt"],
    "image": ["BadRequestError", 400, "bad_request", "messages"],
    "key": ["AuthenticationError", 401, "invalid_api_key", None],
    "forbidden": ["PermissionDeniedError", 403, "permission_denied", None],
    "model": ["NotFoundError", 404, "model_not_found", "model"],
    "slash": ["NotFoundError", 404, "model_not_found", "model"],
    "path": ["NotFoundError", 404, "unknown_url", None],
    "input": ["UnprocessableEntityError", 422, "rejected_by_model", None],
    "output": ["InternalServerError", 502, "backend_error", None],
    "late": ["InternalServerError", 504, "deadline_exceeded", None],
    "rate": ["RateLimitError", 429, "rate_limit_exceeded", None],
    "large": ["APIStatusError", 413, "payload_too_large", None],
}
"""Class, status, code and param of each error."""


@pytest.mark.parametrize(("environment", "version"), [("openai", "3."), ("openai1", "1.")])
def test_openais_client_works_unchanged(environment: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(
        entry("client", more="rate = 1\nburst = 70") + entry("elsewhere", more='models = ["elsewhere"]')
    )
    with launched(tmp_path, "--keys", "keys.toml", target=TARGET) as server:
        server.ready()
        url = f"http://127.0.0.1:{server.port}"
        seen = run_client(environment, "openai_program.py", url, key_of("client"), key_of("elsewhere"))
        assert seen.pop("version").startswith(version)
        assert seen.pop("errors") == ERRORS
        assert seen == {
            "texts": ["A", "A", "B", "B"],
            "usage": [0, True],
            "chat": [CHAT, "stop"],
            "chunks": [[CHAT], [CHAT], []],
            "stream": ["HELLO"],
            "packed": [[3.0, 0.5, -1.0], [4.0, 0.5, -1.0]],
            "plain": [[3.0, 0.5, -1.0]],
            "counted": 0,
            "models": ["default"],
            "model": "default",
        }
        assert server.metrics().value("client_retries_total") == 0, "nothing hopeless was sent again"
        server.signal()
        server.check_end()


def test_langchain_works_unchanged(tmp_path: Path) -> None:
    with launched(tmp_path, target=TARGET) as server:
        server.ready()
        seen = run_client("openai", "langchain_program.py", f"http://127.0.0.1:{server.port}", "any key")
        assert seen == {
            "chat": CHAT,
            "stream": [CHAT],
            "batch": ["USER: A\nASSISTANT:", "USER: B\nASSISTANT:"],
            "text": "HELLO",
            "embeddings": [[3.0, 0.5, -1.0], [4.0, 0.5, -1.0]],
        }
        server.signal()
        server.check_end()
