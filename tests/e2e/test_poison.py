"""One bad input among 32: the others get their answers, and it alone is turned down and kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server import Server, serving

UNHAPPY = {"batch failed", "worker process ended"}


def crowd(server: Server, culprit: str) -> list[Any]:
    """Ask for `culprit` among 31 others."""
    texts = [f"innocent {number}" for number in range(31)]
    texts.insert(13, culprit)
    return [server.ask(text) for text in texts]


def check(server: Server, asked: list[Any], culprit: str, cause: str) -> str:
    """Only the culprit is turned down; returns the error it is kept with."""
    for one in asked:
        if one.text == culprit:
            assert one.refusal() == "REJECTED_BY_MODEL"
        else:
            one.output()
    metrics = server.metrics()
    large = metrics.value("batch_size_bucket", le="+Inf") - metrics.value("batch_size_bucket", le="24.0")
    assert large == (1 if cause == "raised" else 2), (
        "all 32 ran together once, and once more if it may be nobody's fault"
    )
    assert metrics.value("retries_total", cause=cause) >= 32
    [letter] = server.letters()
    assert letter["cause"] == cause
    assert server.admin(f"/internal/dlq/{letter['id']}").json["input"] == culprit
    return str(letter["error"])


@pytest.mark.parametrize(
    ("culprit", "cause", "error"), [("raise", "raised", "what is\nthis"), ("segfault", "crashed", "SIGSEGV")]
)
def test_an_input_that_raises_or_crashes_is_isolated(tmp_path: Any, culprit: str, cause: str, error: str) -> None:
    with serving(tmp_path) as server:
        server.expected = UNHAPPY
        with server.held_back():
            asked = crowd(server, culprit)
        assert error in check(server, asked, culprit, cause)
