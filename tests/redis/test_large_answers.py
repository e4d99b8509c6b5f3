"""Large answers of a server, in whatever pieces they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from redis.exceptions import InvalidResponse, ResponseError

from headway.brokers.redis import link
from headway.brokers.redis.link import BulkAnswer


def fed(*pieces: bytes) -> Any:
    """What comes of these pieces; all but the last leave it open."""
    answer = BulkAnswer()
    *ahead, last = pieces
    for piece in ahead:
        assert answer.feed(piece) is link._MORE
    return answer.feed(last)


@pytest.mark.parametrize("content", [b"", b"x", b"\r", b"\r\n", b"abc\r\ndef"])
def test_an_answer_is_whole_wherever_it_is_cut(content: bytes) -> None:
    told = b"$%d\r\n%b\r\n" % (len(content), content)
    assert fed(told) == content
    assert fed(*(told[at : at + 1] for at in range(len(told)))) == content
    for first in range(1, len(told)):
        assert fed(told[:first], told[first:]) == content
        for second in range(first + 1, len(told)):
            assert fed(told[:first], told[first:second], told[second:]) == content


@pytest.mark.parametrize(("told", "answer"), [(b"$-1\r\n", None), (b"+OK\r\n", b"OK"), (b"-ERR no\r\n", "ERR no")])
def test_short_answers_are_told_apart(told: bytes, answer: object) -> None:
    assert fed(told) == answer
    assert fed(told[:3], told[3:]) == answer


@pytest.mark.parametrize("told", [b"*1\r\n$1\r\na\r\n", b"$x\r\n", b"$1\r\nab\r\nc", b"$2\r\nab\r\n+OK\r\n"])
def test_anything_else_is_no_answer(told: bytes) -> None:
    with pytest.raises(InvalidResponse):
        fed(told)


class _Transport:
    """Transport to a server that answers each command with the next of these pieces, one by one."""

    def __init__(self, answers: list[list[bytes]], received: Callable[[bytes], None]) -> None:
        self.aborted = False
        self._answers, self._received = answers, received

    def write(self, command: bytes) -> None:
        for piece in self._answers.pop(0):
            asyncio.get_running_loop().call_soon(self._received, piece)

    def abort(self) -> None:
        self.aborted = True


async def test_a_link_reads_large_answers_and_goes_on_with_others() -> None:
    parser = SimpleNamespace(parse_error=ResponseError)
    made = link.Link(SimpleNamespace(_parser=parser))
    made._answers = hiredis.Reader(notEnoughData=link._MORE)
    answers = [[b"$4\r\nab", b"cd\r\n"], [b"+PONG\r\n"], [b"-ERR no\r\n"], [b"$-1\r\n"], [b"?\r\n"]]
    transport: Any = _Transport(answers, made.data_received)
    made._transport = transport
    assert await made.ask_large(("GETRANGE", "key", 0, 3)) == b"abcd"
    assert await made.ask(b"PING") == b"PONG"
    with pytest.raises(ResponseError, match="ERR no"):
        await made.ask_large(("GETRANGE", "key", 0, 3))
    assert not transport.aborted
    assert await made.ask_large(("GETRANGE", "key", 0, 3)) is None
    with pytest.raises(InvalidResponse):
        await made.ask_large(("GETRANGE", "key", 0, 3))
    assert transport.aborted
