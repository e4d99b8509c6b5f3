"""One idempotency key of one tenant: one text, one run, one outcome.

    absent ──first request──▶ in flight ──output, or rejected by the model──▶ kept
      ▲                          │
      └── failed otherwise, or expired in the queue ──┘

The same text joins the flight or gets what is kept; another text is misuse. A text that is known to fail may be turned down
while nothing is kept, which binds the key to nothing. How often the text ran is judged by the checker, which knows the runs.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.promises.operation import Kind, Operation
from tests.promises.search import CALLED, DONE, Step

JOINED = "joined"
KEPT = ("=", "!REJECTED_BY_MODEL")
"""Beginnings of outcomes that are kept under a key."""


class Flight(NamedTuple):
    """State of a key: `absent`, `flying` or `kept`; the text that it is bound to; the outcome once somebody was told."""

    stage: str
    text: str = ""
    outcome: str = ""


FREE = Flight("absent")


class Key:
    """See Object."""

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
        elif state.stage == "absent":  # The flight that it joined came to nothing: it is offered anew.
            yield Flight("flying", asked.what), JOINED
        elif state.stage == "kept" and state.text == asked.what and state.outcome in ("", asked.outcome):
            yield state._replace(outcome=asked.outcome), DONE
