"""The access log: what a line says, and how many there are."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.gateway.pending import NOBODY, Ending, PendingRequest
from headway.gateway.request_log import AccessLog
from headway.model import BatchRun, DedupKind, Entry, Failure, Principal, Reply, RequestOptions
from tests.services.calls import several
from tests.services.fake_backend import FakeBackend
from tests.services.stand import Stand
from tests.virtual_time import Clock, run

ID = "0189f7a4-1111-7222-8333-444455556666"
ENTRY = Entry("7", "m", "a secret input", 1, "acme", "alice", 4.0, 2.0)
REPLY = Reply("7", "acme", "a secret output", ran=BatchRun("gpu-0", 12, 0.1, 0.0, "7"), queued=0.05, attempts=1)


def logged(
    reply: Reply = REPLY,
    ending: Ending = Ending.REPLIED,
    share: float = 1.0,
    dice: tuple[float, ...] = (0.5,),
    entry: Entry = ENTRY,
) -> list[Any]:
    log = AccessLog(share, ("enterprise", "paid", "free"), iter(dice).__next__)
    principal = Principal("alice", "acme", 1)
    requests = [PendingRequest(NOBODY, principal, entry, 10.0, 14.0, None, reply=reply) for _ in dice]
    with capture_logs() as logs:
        log.finished(requests, ending, 10.16)
    return logs


def test_a_line_says_how_a_request_ended_and_what_took_how_long() -> None:
    [line] = logged()
    assert line == {
        "event": "request", "log_level": "info", "request_id": "req_7", "status": 200, "error": "",
        "latency_ms": 160.0, "queue_ms": 50.0, "batch_ms": 100.0, "batch_size": 12, "worker": "gpu-0", "attempts": 1,
        "batch_id": "gpu-0@0.000000", "version": "7", "shared": None, "task": False, "inputs": 1, "model": "m", "tier": "paid", "tenant": "acme", "user": "alice",
    }  # fmt: skip
    assert "secret" not in str(line)


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [(errors.DEADLINE_EXCEEDED, 504, "DEADLINE_EXCEEDED"), (errors.IDEMPOTENCY_MISUSE, 422, "IDEMPOTENCY_CONFLICT")],
)
def test_a_failure_is_logged_as_the_client_reads_it(code: str, status: int, shown: str) -> None:
    [line] = logged(Reply("7", "acme", failure=Failure(code, "why")), Ending.TIMED_OUT)
    assert (line["status"], line["error"], line["worker"]) == (status, shown, None)


def test_a_client_that_left_and_an_answer_that_another_request_brought_say_so() -> None:
    [line] = logged(Reply("7", "acme", failure=Failure(errors.CANCELLED, "the client left")), Ending.LEFT)
    assert (line["status"], line["error"]) == (499, "CANCELLED")
    assert logged(Reply("7", "acme", "x", shared=DedupKind.KEY))[0]["shared"] == "joined"
    assert logged(Reply("7", "acme", "x", shared=DedupKind.KEY, kept=True))[0]["shared"] == "kept"


def test_a_name_that_a_client_made_up_is_shortened_and_a_share_of_requests_logged() -> None:
    for name in ("M" * 1_000_000, "\x85" * 300_000):
        [line] = logged(entry=msgspec.structs.replace(ENTRY, model=name))
        assert name.startswith(line["model"].removesuffix("…"))
        assert len(json.dumps(line)) < 600
    assert len(logged(share=0.25, dice=(0.1, 0.3, 0.249, 0.25, 0.9))) == 2
    assert len(logged(share=1.0, dice=(0.0, 0.999))) == 2


def logged_fan_out(model: str, count: int, leave_after: float | None = None, **settings: object) -> list[Any]:
    """Lines of the access log of one request with `count` inputs, over a real gateway and one worker on virtual time."""
    log = AccessLog(1.0, ("enterprise", "paid", "free"), lambda: 0.5)

    async def main(clock: Clock) -> None:
        stand = Stand(clock, FakeBackend(0.1), **settings)  # type: ignore[arg-type]
        stand.gateway._observers = (log,)
        await stand.service.start()
        inputs = [f"text {number}" for number in range(count)]
        whole, ended = several(stand.gateway, inputs, options=RequestOptions(30.0, 1), id=ID, model=model)
        if leave_after is None:
            await ended
        else:
            await asyncio.sleep(leave_after)
            whole.abandon()
        await asyncio.sleep(5.0)
        await stand.service.drain()
        await stand.service.stop()

    with capture_logs() as logs:
        run(main)
    return [line for line in logs if line["event"] == "request"]


@pytest.mark.parametrize(
    ("model", "leave_after", "settings", "status"),
    [("m", None, {}, 200), ("other", None, {}, 404), ("m", None, {"max_queue": 10}, 503), ("m", 0.15, {}, 499)],
)
def test_many_inputs_log_once(model: str, leave_after: float | None, settings: dict[str, object], status: int) -> None:
    [line] = logged_fan_out(model, 150, leave_after, **settings)
    assert (line["request_id"], line["status"], line["inputs"]) == (f"req_{ID}", status, 150)
