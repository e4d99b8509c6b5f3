"""The spans that services record for requests and batches."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs

from headway.core.trace_context import read_carried
from headway.errors import BatchRaised, BatchTimeout
from headway.gateway.request_log import AccessLog
from headway.model import Entry, Principal, Reply, RequestOptions, TraceContext
from headway.runtime.race import end
from headway.runtime.spans import RUN
from tests.http.test_admin import Port
from tests.servers.collector import CLIENT, CONSUMER, INTERNAL, PRODUCER, SERVER, Received
from tests.services.calls import several
from tests.services.fake_backend import FakeBackend
from tests.services.requests import request
from tests.services.stand import Stand
from tests.services.tracing import CLIENT_SPAN, EPOCH, Recorded
from tests.virtual_time import Clock, run

WAY = "POST /v1/inference"
CALLER = Principal("alice", "acme", 1)


def by_name(spans: Sequence[Received]) -> dict[str, list[Received]]:
    found: dict[str, list[Received]] = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


def told(
    main: Callable[[Stand], object], *backends: FakeBackend, ratio: float = 1.0, **settings: object
) -> list[Received]:
    """Return the spans that are recorded while `main` runs against a running service."""

    async def whole(clock: Clock) -> list[Received]:
        recorded = Recorded(clock, ratio)
        async with Stand(clock, *(backends or (FakeBackend(0.1),)), recorder=recorded.recorder, **settings) as stand:  # type: ignore[arg-type]
            await main(stand)  # type: ignore[misc]
            return recorded.spans()

    return run(whole)


def options(**how: object) -> RequestOptions:
    return RequestOptions(4.0, 1, way=WAY, **{"trace": CLIENT_SPAN, **how})  # type: ignore[arg-type]


async def ask(stand: Stand, text: str = "a", **how: object) -> Reply:
    return await stand.gateway.ask(request(text, CALLER, options(**how)))


def test_a_request_has_one_unbroken_trace_and_its_batch_another_that_is_linked() -> None:
    async def main(stand: Stand) -> None:
        await ask(stand)
        counts = stand.counters.gateway
        [(value, trace, at)] = counts.request_seconds["m", "paid"].exemplars.values()
        assert value == pytest.approx(0.1, abs=0.02)
        assert trace == CLIENT_SPAN.trace_id.hex()
        assert at >= EPOCH
        assert len(counts.queue_seconds["m", "paid"].exemplars) == 1

    carried: list[bytes] = []
    spans = by_name(told(main, FakeBackend(0.1, lambda entries: carried.append(entries[0].trace))))
    [asked], [sent], [poll] = spans[WAY], spans["send m"], spans["poll m"]
    own, of_batch = sorted(spans["process m"], key=lambda span: span.trace != CLIENT_SPAN.trace_id.hex())
    assert (asked.kind, sent.kind, own.kind, poll.kind) == (SERVER, PRODUCER, CONSUMER, CLIENT)
    assert {one.trace for one in (asked, sent, own)} == {CLIENT_SPAN.trace_id.hex()}
    assert {one.state for one in (asked, sent, own)} == {"vendor=1"}
    assert (asked.parent, sent.parent, own.parent) == (CLIENT_SPAN.span_id.hex(), asked.span, sent.span)
    assert (asked.flags, sent.flags, own.flags) == (0x300, 0x100, 0x300)
    assert (of_batch.trace, of_batch.parent, poll.parent) == (poll.trace, poll.span, "")
    assert poll.trace != asked.trace
    [link] = poll.links
    assert (link.trace, link.span) == (sent.trace, sent.span)
    assert link.attributes == {"messaging.message.id": asked.attributes["headway.request_id"]}
    assert [(back.trace, back.span) for back in own.links] == [(poll.trace, poll.span)]
    assert asked.attributes.items() >= {
        ("http.request.method", "POST"), ("http.route", "/v1/inference"), ("http.response.status_code", 200),
        ("headway.tenant", "acme"), ("headway.tier", "paid"), ("headway.model", "m"),
    }  # fmt: skip
    assert own.attributes.items() >= {
        ("messaging.system", "headway"), ("messaging.destination.name", "m"), ("messaging.operation.type", "process"),
        ("headway.attempt", 1), ("headway.worker", "gpu-0"), ("messaging.batch.message_count", 1),
    }  # fmt: skip
    assert poll.attributes["messaging.operation.type"] == "receive"
    assert own.attributes["headway.queue_seconds"] < 0.1
    assert (own.ended - own.begun) / 1e9 == pytest.approx(0.1, abs=1e-3)
    assert asked.begun >= EPOCH * 1e9 and asked.begun <= sent.begun <= own.begun <= own.ended <= asked.ended
    assert [one.error for one in (asked, sent, own, poll)] == [None] * 4
    of_entry = read_carried(carried[0])
    assert of_entry is not None and of_entry.context.span_id.hex() == sent.span


def test_a_batch_has_a_link_for_each_sampled_member() -> None:
    async def main(stand: Stand) -> None:
        plain = TraceContext(CLIENT_SPAN.trace_id, CLIENT_SPAN.span_id, 0)
        first = asyncio.ensure_future(ask(stand, "first", trace=plain))
        await asyncio.sleep(0.05)
        rest = [asyncio.ensure_future(ask(stand, f"{n}", trace=plain if n % 2 else CLIENT_SPAN)) for n in range(64)]
        await asyncio.gather(first, *rest)

    [poll] = by_name(spans := told(main, max_batch=64))["poll m"]
    assert (len(poll.links), poll.attributes["messaging.batch.message_count"]) == (32, 64)
    sent = {one.span: one.attributes["messaging.message.id"] for one in spans if one.name == "send m"}
    assert {link.span: link.attributes["messaging.message.id"] for link in poll.links} == sent
    assert sum(one.name == "process m" for one in spans) == 33


def test_a_retry_is_another_batch_that_is_linked_to_the_same_request() -> None:
    failures = [BatchTimeout("late", "late")]
    backend = FakeBackend(0.1, lambda entries: failures.pop() if failures else None)
    spans = by_name(told(ask, backend))
    [asked], [sent], polls = spans[WAY], spans["send m"], spans["poll m"]
    assert [poll.attributes["headway.attempt"] for poll in polls] == [1, 2]
    assert len({poll.trace for poll in polls}) == 2
    assert [[link.span for link in poll.links] for poll in polls] == [[sent.span]] * 2
    runs = [one for one in spans["process m"] if one.trace == asked.trace]
    assert [(one.parent, one.error, one.attributes.get("error.type")) for one in runs] == [
        (sent.span, "late", "timeout"), (sent.span, None, None),
    ]  # fmt: skip
    assert [one.links[0].span for one in runs] == [poll.span for poll in polls]
    assert asked.error is None


def test_a_replayed_dead_letter_begins_a_trace_that_is_linked_to_the_one_that_died() -> None:
    failures = [BatchRaised("bad input")] * 3

    async def main(stand: Stand) -> None:
        died = await ask(stand)
        assert died.failure is not None
        failures.clear()
        assert (await Port(stand).ask("POST", f"/internal/dlq/req_{died.id}/replay")).status == 200

    backend = FakeBackend(0.1, lambda entries: failures[0] if failures else None)
    spans = by_name(told(main, backend, ratio=0.0))
    dead, replayed = spans["send m"]
    [request] = spans["replay"]
    assert replayed.parent == request.span and request.parent == ""
    assert request.trace != dead.trace == CLIENT_SPAN.trace_id.hex()
    assert [(link.trace, link.span) for link in request.links] == [(dead.trace, dead.span)]
    assert any(one.trace == request.trace for one in spans["process m"])


def test_a_request_without_an_output_ends_its_span_with_what_the_client_reads() -> None:
    async def late(stand: Stand) -> None:
        await stand.gateway.ask(request("a", CALLER, timeout=0.05, way=WAY))

    async def unknown(stand: Stand) -> None:
        await stand.gateway.ask(request("a", CALLER, options(), model="unknown"))

    async def leaves(stand: Stand) -> None:
        asking = asyncio.ensure_future(ask(stand))
        await asyncio.sleep(0.01)
        await end(asking)

    spans = [by_name(told(main)) for main in (late, unknown, leaves)]
    spans.append(by_name(told(ask, FakeBackend(0.1, lambda entries: BatchRaised("bad input")))))
    asked = [names[WAY][0] for names in spans]
    assert [one.attributes["http.response.status_code"] for one in asked] == [504, 404, 499, 422]
    assert [one.parent for one in asked] == ["", *[CLIENT_SPAN.span_id.hex()] * 3]
    assert asked[0].error is not None and "deadline" in asked[0].error, "that is a fault of the server"
    assert (asked[3].error, asked[3].attributes["error.type"]) == (None, "REJECTED_BY_MODEL"), "and that the client's"
    assert all(one.error for one in spans[3]["process m"])
    assert spans[1].keys() == {WAY}, "what is refused at once was never sent"


@pytest.mark.parametrize("flags", [0, 2])
def test_what_a_client_does_not_sample_leaves_nothing(flags: int) -> None:
    async def main(stand: Stand) -> None:
        await ask(stand, trace=TraceContext(CLIENT_SPAN.trace_id, CLIENT_SPAN.span_id, flags))

    backend = FakeBackend(0.1, lambda entries: entries[0].trace or RUN.get())  # type: ignore[arg-type,return-value]
    assert told(main, backend) == []


def test_a_task_ends_its_clients_span_when_the_client_has_its_id() -> None:
    async def main(stand: Stand) -> None:
        task = request("a", CALLER, options(task=True))
        asking = asyncio.ensure_future(stand.gateway.ask(task))
        await asyncio.sleep(0.02)
        stand.gateway.detach("acme", task.id)
        await asyncio.sleep(1.0)
        asking.cancel()

    spans = by_name(told(main))
    [asked], [sent] = spans[WAY], spans["send m"]
    assert asked.attributes["http.response.status_code"] == 202
    assert (asked.ended - asked.begun) / 1e9 == pytest.approx(0.02, abs=2e-3)
    assert len(spans["process m"]) == 2 and sent.parent == asked.span


def test_a_request_with_several_inputs_has_one_span_above_all_of_them() -> None:
    async def main(stand: Stand) -> None:
        await several(stand.gateway, ["a", "b", "c"], options=options())[1]

    spans = by_name(told(main))
    [asked] = spans[WAY]
    assert [one.parent for one in spans["send m"]] == [asked.span] * 3
    assert sum(one.trace == asked.trace for one in spans["process m"]) == 3


def test_the_run_in_the_workers_process_is_told_by_that() -> None:
    def script(entries: Sequence[Entry]) -> None:
        run, now = RUN.get(), asyncio.get_running_loop().time()
        assert run is not None
        run.ran(now, now)
        run.ran(-1e300, now)  # Impossible times are ignored.
        run.ran(now, 1e300)

    spans = by_name(told(ask, FakeBackend(0.1, script)))
    [ran], [poll] = spans["run m"], spans["poll m"]
    [process] = (one for one in spans["process m"] if one.trace == poll.trace)
    assert (ran.kind, ran.parent, ran.trace) == (INTERNAL, process.span, poll.trace)


def test_log_lines_of_a_sampled_request_carry_its_trace_id() -> None:
    async def main(stand: Stand) -> None:
        log = AccessLog(1.0, stand.settings.tier_names, lambda: 0.0)
        stand.gateway._observers = (*stand.gateway._observers, log)
        await ask(stand)

    with capture_logs() as lines:
        told(main, FakeBackend(0.1, lambda entries: BatchRaised("bad")))
    shown = {line["event"]: line.get("trace_id") for line in lines if line["event"] in ("request", "batch failed")}
    assert shown == dict.fromkeys(("request", "batch failed"), CLIENT_SPAN.trace_id.hex())
