"""What the log says of a remote API that comes back, and of its credentials."""

from __future__ import annotations

import contextlib
from pathlib import Path

from structlog.testing import capture_logs

from headway.backends.remote.credentials import Credentials
from headway.errors import RemoteError
from tests.backends.entries import batch
from tests.backends.test_grpc_remote import LONG, Api, Status, aborts


async def test_the_log_says_once_that_the_api_is_back() -> None:
    now = 100.0
    with capture_logs() as logged:
        async with Api(aborts(Status.UNAVAILABLE)).against(clock=lambda: now) as backend:
            for text in ("wrong", "wrong", "b", "b"):
                with contextlib.suppress(RemoteError):
                    await backend.run(batch(text), LONG)
                now += 2.0
    again = [line for line in logged if line["event"] == "the remote API answers again"]
    assert [line["away_s"] for line in again] == [4.0]


def test_header_fields_that_have_changed_are_logged_once_without_their_values(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("X-Team: blue\n")
    credentials = Credentials(file=str(file))
    with capture_logs() as logged:
        credentials.current()
        file.write_text("X-Team: canary\n")
        assert credentials.current() == credentials.current() == {"X-Team": "canary"}
    [line] = logged
    assert (line["event"], line["log_level"]) == ("header fields for the remote API were read again", "info")
    assert "canary" not in str(line)
