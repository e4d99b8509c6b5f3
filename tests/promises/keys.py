"""A tenant's idempotency key: one input, one run, one outcome.

    absent ──first request──▶ in flight ──output, or rejected by the model──▶ kept
      ▲                          │
      └── failed otherwise, or expired in the queue ──┘

The same input joins the run in flight or gets the kept outcome; any other input is misuse. While nothing is kept, an
input that is known to fail may be refused, which doesn't bind the key. The checker, which knows the runs, judges how
often the input ran.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.promises.operation import Kind, Operation
from tests.promises.search import CALLED, DONE, Step

JOINED = "joined"
KEPT = ("=", "!REJECTED_BY_MODEL")
"""Prefixes of outcomes that are kept under a key."""


class Flight(NamedTuple):
    """State of a key: `absent`, `flying` or `kept`; the input it is bound to; the outcome once a client got it."""

    stage: str
    text: str = ""
    outcome: str = ""


FREE = Flight("absent")


class Key:
    initial = FREE

    def turns(self, state: Flight) -> Iterator[Flight]:
        if state.stage == "flying":
            yield Flight("kept", state.text)
            yield FREE

    def steps(self, state: Flight, operation: Operation, progress: str) -> Iterable[Step[Flight]]:
        if operation.kind is Kind.LOSS:
            return [(state, DONE), (FREE, CALLED)]
        return self._meet(state, operation) if progress == CALLED else self._end(state, operation)

    def _meet(self, state: Flight, asked: Operation) -> Iterator[Step[Flight]]:
        misused = asked.status == 422 and asked.code == "IDEMPOTENCY_CONFLICT"
        if asked.ends is None or (400 <= asked.status < 500 and asked.status != 422) or (misused and asked.chosen):
            yield state, DONE  # It was refused for another reason, such as its id, or never arrived.
        if state.stage == "absent":
            if asked.turned_down:
                yield state, DONE
            if not misused:
                yield Flight("flying", asked.what), JOINED
        elif state.text == asked.what:
            if not misused and not (asked.turned_down and state.stage == "kept"):
                yield state, JOINED
        elif misused:
            yield state, DONE

    def _end(self, state: Flight, asked: Operation) -> Iterator[Step[Flight]]:
        if asked.ends is None or not asked.outcome.startswith(KEPT):
            yield state, DONE
        elif state.stage == "absent":  # The run that it joined failed, so it is submitted again.
            yield Flight("flying", asked.what), JOINED
        elif state.stage == "kept" and state.text == asked.what and state.outcome in ("", asked.outcome):
            yield state._replace(outcome=asked.outcome), DONE
