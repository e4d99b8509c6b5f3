"""Large replies are passed on after the small ones, each in a turn of its own."""

from __future__ import annotations

from headway.gateway.reply_turns import LARGE, in_turns
from headway.model import Failure, Octets, Reply


def test_small_replies_go_first_and_together() -> None:
    sizes = {"a": 0, "b": LARGE, "c": 5, "d": LARGE - 1, "e": LARGE + 1}
    replies = [Reply(id, "t", Octets(b"x" * size)) for id, size in sizes.items()]
    replies.append(Reply("f", "t", None, Failure("INTERNAL", "no")))
    assert [[reply.id for reply in turn] for turn in in_turns(replies)] == [["a", "c", "d", "f"], ["b"], ["e"]]
    assert [[reply.id for reply in turn] for turn in in_turns([replies[1]])] == [["b"]]
    assert in_turns(replies[:1]) == [replies[:1]]
