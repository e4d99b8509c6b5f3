import asyncio
import math
import socket
import struct
from time import perf_counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.load.generator import Generator
from tests.load.scripted import Call, Script, Scripted, load, outcomes, response

ALL = 50


def right(call: Call) -> None:
    call.answer()


def test_every_request_is_sent_once_all_different_and_checked() -> None:
    record, server = load(right)
    assert outcomes(record) == {"ok": ALL}
    assert (record.sent, record.mismatches) == ([ALL], 0)
    assert len({call.input for call in server.calls}) == ALL
    assert [round(due, 9) for due in record.dues] == [number / 1000 for number in range(ALL)]
    assert all(lag >= 0 for lag in record.lags)
    assert len(record.lags) == ALL
    assert all("post /v1/inference http/1.1\r\nhost: 127.0.0.1:" in call.head for call in server.calls)


def test_nothing_is_sent_before_it_is_due() -> None:
    received: list[float] = []
    generators: list[Generator] = []

    def note(call: Call) -> None:
        received.append(perf_counter())
        call.answer()

    record, _ = load(note, start=lambda server, generator: generators.append(generator), connections=1)
    for due, instant in zip(record.dues, received, strict=True):
        assert instant - generators[0].started_at >= due


def test_sends_go_on_while_no_answer_comes() -> None:
    held: list[Call] = []

    def hold_until_all_are_here(call: Call) -> None:
        held.append(call)
        if len(held) == ALL:
            for waiting in held:
                waiting.answer()

    record, _ = load(hold_until_all_are_here)
    assert outcomes(record) == {"ok": ALL}
    assert record.peak >= ALL
    waited = sorted(record.streams[0].answered, reverse=True)
    for number, latency in enumerate(waited):
        assert latency >= (ALL - 1 - number) / 1000


def test_a_stall_is_in_the_latency_of_every_request_that_fell_due_in_it() -> None:
    stall = 0.08

    def stall_once(call: Call) -> None:
        if call.number:
            call.answer()
        else:
            asyncio.get_running_loop().call_later(stall, call.answer)

    # Latencies measured from sending instead of from the due time would show one slow request and 49 fast ones.
    record, _ = load(stall_once, connections=1)
    assert outcomes(record) == {"ok": ALL}
    assert record.waited >= 1
    assert record.peak == 1
    clock_step = 0.002
    for due, latency in zip(record.dues, record.streams[0].answered, strict=True):
        assert latency >= stall - due - clock_step


def test_wrong_answers_are_counted_and_shown() -> None:
    def swap(call: Call) -> None:
        call.answer("someone else's" if call.number % 5 == 0 else None)

    record, _ = load(swap)
    assert outcomes(record) == {"ok": ALL}
    assert record.mismatches == ALL / 5
    assert len(record.mismatched) == 3
    assert "someone else's" in record.mismatched[0]


def test_answers_are_not_looked_at_when_nothing_is_expected() -> None:
    record, _ = load(lambda call: call.send(response(b"whatever")), expect="none")
    assert (outcomes(record), record.mismatches) == ({"ok": ALL}, 0)


def test_the_mix_is_kept_and_told_to_the_server() -> None:
    record, server = load(
        right, rate=4000.0, mix={"enterprise": 1.0, "free": 3.0}, keys={"enterprise": "secret"}, seed=5
    )
    enterprise, free = record.sent
    assert enterprise + free == 200
    assert 25 <= enterprise <= 80
    with_key = [call for call in server.calls if "authorization: bearer secret" in call.head]
    assert len(with_key) == enterprise
    assert not any("x-request-tier" in call.head for call in with_key)
    assert sum("x-request-tier: free" in call.head for call in server.calls) == free
    assert [len(stream.answered) for stream in record.streams] == record.sent


def test_the_same_seed_gives_the_same_load() -> None:
    def shape(seed: int) -> tuple[list[float], list[str]]:
        record, server = load(right, seed=seed, arrivals="poisson", mix={"a": 1.0, "b": 1.0}, connections=1)
        return [round(due, 9) for due in record.dues], [call.head.rpartition(": ")[2] for call in server.calls]

    assert shape(1) == shape(1)
    assert shape(1) != shape(2)


def test_refusals_are_told_apart_with_their_latency_and_retry_after() -> None:
    def refuse(call: Call) -> None:
        match call.number % 5:
            case 0:
                call.answer()
            case 1:
                call.answer(status=503, headers="Retry-After: 1\r\n", error="SERVICE_OVERLOADED")
            case 2:
                call.answer(status=429, error={"message": "slow down", "type": "requests", "code": "rate_limit"})
            case 3:
                call.answer(status=504, error="DEADLINE_EXCEEDED")
            case _:
                call.send(response(b'{"error": "\\u001b[2J"}', 500))

    record, _ = load(refuse)
    tenth = ALL // 5
    assert outcomes(record) == {
        "ok": tenth,
        "503 SERVICE_OVERLOADED": tenth,
        "429 rate_limit": tenth,
        "504 DEADLINE_EXCEEDED": tenth,
        "500 �[2J": tenth,
    }
    (stream,) = record.streams
    assert len(stream.refused) == 2 * tenth
    assert stream.refused_without_retry_after == tenth


def _said_to_close(call: Call) -> None:
    call.answer(headers="connection:close\r\n")


def _reset(call: Call) -> None:
    transport = call.connection.transport
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _cut_short(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
    call.close()


def _nonsense(call: Call) -> None:
    call.send(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


def _two_answers(call: Call) -> None:
    call.send(response(b"{}") * 2)


def _nothing(call: Call) -> None:
    pass


ENDS: dict[str, Script] = {"closed": Call.close, "reset": _reset, "truncated": _cut_short, "malformed": _nonsense}


def test_what_could_not_be_sent_in_time_times_out_too() -> None:
    record, server = load(_nothing, connections=1, timeout=0.03, rate=10_000.0, duration=0.005)
    found = outcomes(record)
    assert found.keys() == {"timeout", "timeout before it was sent"}
    assert sum(found.values()) == ALL
    assert len({call.input for call in server.calls}) == len(server.calls) <= found["timeout"]


def test_a_server_that_goes_away_fails_what_comes_after() -> None:
    def last_words(call: Call) -> None:
        call.server.stop_listening()
        call.answer(headers="Connection: close\r\n")

    record, server = load(last_words, connections=1)
    assert outcomes(record) == {"ok": 1, "connect ECONNREFUSED": ALL - 1}
    assert len(server.calls) == 1


def test_a_server_that_hangs_up_on_every_connection_fails_every_request() -> None:
    record, server = load(right, hang_up=True)
    found = outcomes(record)
    assert found.keys() <= {"closed", "reset"}
    assert sum(found.values()) == ALL
    assert server.calls == []


def test_stopping_ends_the_load_with_an_outcome_for_every_request_sent() -> None:
    def stop_at_the_tenth(server: Scripted, generator: Generator) -> None:
        def answer_some(call: Call) -> None:
            if call.number % 2:
                call.answer()
            if call.number == 10:
                asyncio.get_running_loop().call_soon(generator.stop)

        server.script = answer_some

    record, _ = load(right, start=stop_at_the_tenth, duration=60.0)
    found = outcomes(record)
    assert record.interrupted
    assert found["interrupted"] >= 6
    assert sum(found.values()) == sum(record.sent) < 60_000


def _until_closed(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    call.close()


FATES: list[Script] = [
    right,
    _said_to_close,
    _until_closed,
    *ENDS.values(),
    _two_answers,
    _nothing,
    lambda call: call.answer(status=503, error="BUSY"),
]


@settings(max_examples=15)
@given(st.lists(st.sampled_from(range(len(FATES))), min_size=1, max_size=20), st.sampled_from([None, 1, 4]))
def test_whatever_happens_each_request_has_one_outcome(fates: list[int], connections: int | None) -> None:
    record, server = load(
        lambda call: FATES[fates[call.number % len(fates)]](call), connections=connections, timeout=0.02, duration=0.03
    )
    assert sum(outcomes(record).values()) == sum(record.sent) == 30
    assert math.isfinite(record.elapsed)
    assert record.peak <= (connections or math.inf)
    assert len({call.input for call in server.calls}) == len(server.calls) <= 30
