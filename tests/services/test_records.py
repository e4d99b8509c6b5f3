"""Records of requests: lines in the access log, and rows in the ledger while a request waits and after it ends."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headway import errors
from headway.gateway.ledger_writer import INTERVAL, OPEN_AT_ONCE
from headway.gateway.pending import NOBODY, Ending, PendingRequest
from headway.gateway.request_log import AccessLog
from headway.model import BatchRun, DedupKind, Entry, Failure, Principal, Reply
from headway.runtime.race import end
from tests.services.calls import several
from tests.services.fake_backend import FakeBackend
from tests.services.stand import EPOCH, Stand, recorded, served
from tests.virtual_time import Clock

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


@pytest.mark.parametrize(
    ("model", "leave_after", "settings", "status"),
    [("m", None, {}, 200), ("other", None, {}, 404), ("m", None, {"max_queue": 10}, 503), ("m", 0.15, {}, 499)],
)
async def test_many_inputs_log_once(
    model: str, leave_after: float | None, settings: dict[str, Any], status: int, clock: Clock
) -> None:
    with capture_logs() as logs:
        async with served(clock, **settings) as stand:
            stand.gateway._observers = (AccessLog(1.0, stand.settings.tier_names, lambda: 0.5),)
            whole, ended = several(stand.gateway, ["text"] * 150, id=ID, model=model, timeout=30.0)
            if leave_after is None:
                await ended
            else:
                await asyncio.sleep(leave_after)
                whole.abandon()
            await asyncio.sleep(5.0)
    [line] = [line for line in logs if line["event"] == "request"]
    assert (line["request_id"], line["status"], line["inputs"]) == (f"req_{ID}", status, 150)


def scene(clock: Clock, **settings: Any) -> Stand:
    """Return a service that records its requests. Batches take 1 s each."""
    patient: dict[str, Any] = {"ledger_rows": "all", "request_timeout_ms": 60_000.0, "queue_timeout_ms": 60_000.0}
    return Stand(clock, FakeBackend(1.0), max_batch=1, **patient | settings)


async def test_a_request_has_a_row_while_it_waits_and_its_outcome_in_place_of_that(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock)) as ledger:
        begun = clock()
        asked = [stand.asking(text, timeout=30.0) for text in "ab"]
        await asyncio.sleep(2 * INTERVAL)
        assert [one.status for one in ledger.waiting.values()] == ["queued", "queued"]
        for one in ledger.waiting.values():
            assert abs(one.created_at - (EPOCH + begun)) < 0.01
            assert abs(one.completed_at - (EPOCH + begun + 30.0)) < 0.01
            assert (one.tenant, one.user, one.model, one.tier) == ("default", "anonymous", "m", "paid")
        await asked[0]
        await asyncio.sleep(2 * INTERVAL)
        assert len(ledger.waiting) == 1
        await asked[1]
        await asyncio.sleep(2 * INTERVAL)
        assert ledger.waiting == {}
        assert [one.status for one in ledger.records] == ["completed", "completed"]
        assert ledger.noted == 2


@pytest.mark.parametrize("rows", ["all", "ended"])
async def test_what_ends_before_the_next_bulk_costs_one_row_and_by_default_nothing_else_is_written(
    rows: str, clock: Clock
) -> None:
    async with recorded(clock, stand := scene(clock, ledger_rows=rows)) as ledger:
        stand.backends[0].seconds = 0.01
        for number in range(30):
            await stand.ask(str(number))
        if rows == "ended":
            stand.backends[0].seconds = 2.0
            await stand.ask("slow")
        await asyncio.sleep(2 * INTERVAL)
        assert len(ledger.records) >= 30
        assert ledger.noted <= (2 if rows == "all" else 0)


async def test_while_the_ledger_is_away_answers_go_on_and_only_what_still_waits_is_noted_later(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock)) as ledger:
        ledger.away = True
        asked = [stand.asking(str(number), timeout=30.0) for number in range(6)]
        assert (await asked[0]).output == "0"
        assert (await asked[3]).output == "3"
        ledger.away = False
        await asyncio.sleep(1.5)
        assert ledger.noted < 6, "what has ended meanwhile is noted no more"
        await asyncio.gather(*asked)
        await asyncio.sleep(3.0)
        assert ledger.waiting == {}
        assert len(ledger.records) == 6


async def test_more_requests_than_one_call_takes_are_all_noted_and_all_forgotten(clock: Clock) -> None:
    async with recorded(clock, stand := scene(clock, max_queue=100_000)) as ledger:
        count = 2 * OPEN_AT_ONCE + 7
        asked = [stand.asking(str(number), timeout=60.0) for number in range(count)]
        await asyncio.sleep(4 * INTERVAL + 0.1)
        held = stand.gateway.pending
        assert held > OPEN_AT_ONCE
        assert len(ledger.waiting) >= held - 1
        await end(*asked)
        await asyncio.sleep(8 * INTERVAL)
        assert ledger.waiting == {}
