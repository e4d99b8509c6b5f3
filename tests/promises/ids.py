"""One id of one tenant: what requests, tasks, polls and deletions under it may be told.

    absent ──submit──▶ live ──the run ends──▶ kept            a task
      ▲ ▲               │ │                    │
      │ └── DELETE ─────┘─┼────────────────────┘
      │                   │
      └── answered ◀── held ◀── the run ends                  a request whose client waits

While it is live, every other submission is a conflict. While a task's outcome is kept, the same text gets that outcome, and
another one is misuse. A submission without a definite answer may vanish at any time while it is live; a task with its 202
may not.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.promises.operation import Kind, Operation
from tests.promises.search import CALLED, DONE, Step

SUBMITTED, ENDED, SEEN = "submitted", "ended", "seen"


class Standing(NamedTuple):
    """State of an id: `absent`, `live`, `held` (the run has ended, and its gateway has not answered yet), or `kept`.

    `owner` is the number of the submission that may vanish, 0 for none. The outcome that is kept is empty as long as
    nobody was told. It is `settled` once the gateway of a task knows that it has ended.
    """

    stage: str
    owner: int = 0
    text: str = ""
    task: bool = False
    outcome: str = ""
    settled: bool = False


ABSENT = Standing("absent")


class Id:
    """See Object."""

    initial = ABSENT

    def __init__(self, operations: Sequence[Operation]) -> None:
        asked = [one for one in operations if one.kind in (Kind.ASK, Kind.TASK)]
        self._texts = sorted({one.what for one in asked if one.kind is Kind.TASK})
        self._doubtful = {one.number for one in operations if any(_held(other, one) for other in asked)}
        """Operations at a gateway that has another submission at hand and does not know yet what becomes of it: it is in the
        way of others until then, and pends if it is a task."""

    def turns(self, state: Standing) -> Iterator[Standing]:
        if state.stage == "live" and state.task:
            yield Standing("kept", 0, state.text, True)
        elif state.stage == "kept" and not state.settled:
            yield state._replace(settled=True)

    def steps(self, state: Standing, operation: Operation, progress: str) -> Iterable[Step[Standing]]:
        match operation.kind:
            case Kind.LOSS:
                return self._lose(state)
            case Kind.POLL:
                return self._poll(state, operation)
            case Kind.FORGET:
                return self._forget(state, operation, progress)
            case _ if progress == CALLED:
                return self._submit(state, operation)
            case _:
                return self._wait(state, operation, progress)

    def _lose(self, state: Standing) -> Iterator[Step[Standing]]:
        yield state, DONE
        yield ABSENT, CALLED
        for text in self._texts:
            yield Standing("live", 0, text, True), CALLED

    def _poll(self, state: Standing, poll: Operation) -> Iterator[Step[Standing]]:
        known = state.task and state.stage in ("live", "kept")
        if poll.ends is None or poll.status not in (200, 404):
            yield state, DONE
        elif poll.status == 404:
            if not known:
                yield state, DONE
        elif not poll.outcome:
            if (known and state.stage == "live") or poll.number in self._doubtful:
                yield state, DONE
        elif state.stage == "kept" and state.outcome in ("", poll.outcome):
            yield state._replace(outcome=poll.outcome), DONE

    def _forget(self, state: Standing, forget: Operation, progress: str) -> Iterator[Step[Standing]]:
        """Deleting looks first, and acts then."""
        known = state.task and state.stage in ("live", "kept")
        open_ = forget.ends is None
        if progress == CALLED:
            if known and (open_ or forget.status == 204):
                yield state, SEEN
            if (not known and forget.status == 404) or forget.status not in (200, 204, 404):
                yield state, DONE
            elif forget.status == 204 and forget.number in self._doubtful:
                yield state, DONE  # It took back what was about to be refused.
        else:
            yield ABSENT if known else state, DONE

    def _submit(self, state: Standing, asked: Operation) -> Iterator[Step[Standing]]:
        """Steps of a submission at its arrival."""
        status, open_ = asked.status, asked.ends is None
        if open_ or (400 <= status < 500 and status not in (404, 409, 422)):
            yield state, DONE  # It was refused, or never arrived.
        if status == 404 and (asked.wanted or asked.model):
            yield state, DONE  # Its version, or its model, is not there.
        if status == 422 and asked.code == "IDEMPOTENCY_CONFLICT" and asked.key:
            yield state, DONE  # The key's history tells whether that is right.
        if status == 409 and asked.number in self._doubtful:
            yield state, DONE
        if state.stage in ("absent", "held"):
            if asked.turned_down:
                yield state, DONE
            if status not in (409, 422) or asked.outcome:
                yield Standing("live", asked.number, asked.what, asked.kind is Kind.TASK), SUBMITTED
            elif state.stage == "held" and status == 409:
                yield state, DONE
        elif state.stage == "live" or not state.settled:
            if status == 409:
                yield state, DONE
        elif state.text != asked.what:
            if status == 422 and asked.code == "IDEMPOTENCY_CONFLICT":
                yield state, DONE
        elif asked.kind is Kind.TASK and status == 202:
            yield state._replace(settled=False), DONE  # Its own gateway has yet to hear the outcome.
        elif asked.outcome and not asked.turned_down and state.outcome in ("", asked.outcome):
            yield state._replace(outcome=asked.outcome), DONE

    def _wait(self, state: Standing, asked: Operation, progress: str) -> Iterator[Step[Standing]]:
        """Steps of a submission that is or was the id's."""
        own = state.owner == asked.number
        if asked.kind is Kind.ASK:
            yield from self._wait_for_answer(state, asked, progress, own)
        elif own and state.stage == "live":
            if asked.status == 202:
                yield state._replace(owner=0), DONE
            elif not asked.outcome and asked.status != 404:
                yield ABSENT, DONE
        elif asked.outcome:
            if state.stage == "kept" and state.text == asked.what and state.outcome in ("", asked.outcome):
                yield state._replace(outcome=asked.outcome), DONE
        else:
            yield state, DONE  # It has ended, was deleted or was lost; whoever waited for it heard what it heard.

    def _wait_for_answer(self, state: Standing, asked: Operation, progress: str, own: bool) -> Iterator[Step[Standing]]:
        if asked.status == 404:
            return  # Only a task can be deleted.
        if asked.ends is None or not asked.outcome:  # Left, refused late, or out of time: it goes when it goes.
            yield ABSENT if own else state, DONE
        elif progress == SUBMITTED and own:
            yield state._replace(stage="held"), ENDED
        else:
            yield ABSENT if own else state, DONE


def _held(asked: Operation, meanwhile: Operation) -> bool:
    """Whether a gateway that is asked for something may be about to find out whether it takes a submission."""
    if asked is meanwhile or asked.gateway != meanwhile.gateway:
        return False
    if meanwhile.kind in (Kind.POLL, Kind.FORGET) and asked.kind is not Kind.TASK:
        return False
    return asked.called < (meanwhile.returned or 0.0) and (asked.ends is None or asked.ends > meanwhile.called)
