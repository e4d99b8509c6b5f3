"""Advice to whoever starts a remote API whose first batch fails: one thing to look at, by what the API says."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from headway.backends.http.backend import HttpBackend
from headway.backends.remote.backend import advice, asked_for
from headway.config.target import RemoteTarget
from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteAbsent, RemoteError, RemoteRefused, TargetError
from tests.backends.remote import served


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RemoteError("x"), 401, "HEADWAY_REMOTE_TOKEN"),
        (RemoteError("x"), 403, "--remote-model"),
        (RemoteError("x"), 404, "check the path"),
        (RemoteError("x"), 307, "name the URL to which it leads"),
        (RemoteError("x"), 429, "--remote-rate"),
        (RemoteError("x"), 503, "in trouble itself"),
        (RemoteRefused("x"), 413, "--max-batch-size"),
        (RemoteRefused("x"), 422, "check --remote-format"),
        (RemoteAbsent("x"), 0, "host and port"),
        (BatchTimeout("x"), 0, "--start-timeout-ms"),
        (BadOutput("x"), 0, "another form"),
        (RemoteError("x"), 0, "Check the URL, --remote-format"),
    ],
)
def test_each_failure_has_advice_of_its_own(error: BackendError, status: int, says: str) -> None:
    told = advice(error, status, b"")
    assert says in told
    assert ("Check the URL, --remote-format" in told) is (says == "Check the URL, --remote-format")


@pytest.mark.parametrize(
    ("body", "format"),
    [
        (b'{"detail": [{"loc": ["body", "inputs"], "msg": "field required"}]}', "inputs"),
        (b'{"error": {"message": "you must provide a `prompt`"}}', "openai-completions"),
        (b'{"error": "\'input\' is a required property"}', "openai-embeddings"),
        (b'{"error": "datatype of inputs is missing"}', "oip"),
        (b"bad request", ""),
        (b"\xff" * 9000 + b"inputs", ""),
    ],
)
def test_an_answer_that_names_a_member_names_the_format(body: bytes, format: str) -> None:
    assert asked_for(body) == format


def test_a_start_that_fails_tells_the_one_advice() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"detail": "field `inputs` is required"}, status=400)

    async def main() -> str:
        async with served(handle) as url:
            with pytest.raises(TargetError) as caught:
                await HttpBackend(RemoteTarget(url), start_timeout=30.0).start()
            return str(caught.value)

    assert (
        "HTTP 400. It turned the request down for its form: its answer names what --remote-format inputs"
        in asyncio.run(main())
    )
