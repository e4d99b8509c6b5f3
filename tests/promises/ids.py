"""A tenant's id: the answers allowed for requests, tasks, polls and deletions that use it.

    absent ──submit──▶ live ──the run ends──▶ kept            a task
      ▲ ▲               │ │                    │
      │ └── DELETE ─────┘─┼────────────────────┘
      │                   │
      └── answered ◀── held ◀── the run ends                  a request whose client waits

While it is live, every other submission is a conflict. While a task's outcome is kept, the same input gets that
outcome, and any other input is misuse. A live submission without a definite answer may vanish at any time, but a task
that returned 202 may not.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.promises.operation import Kind, Operation
from tests.promises.search import CALLED, DONE, Step

SUBMITTED, ENDED, SEEN = "submitted", "ended", "seen"


class Standing(NamedTuple):
    """State of an id: `absent`, `live`, `held` (the run has ended, but its gateway has not answered yet), or `kept`.
    `owner` is the number of the submission that may vanish, or 0. `outcome` is empty until a client has got it. It is
    `settled` once the task's gateway knows that the task has ended."""

    stage: str
    owner: int = 0
    text: str = ""
    task: bool = False
    outcome: str = ""
    settled: bool = False


ABSENT = Standing("absent")


class Id:
    initial = ABSENT

    def __init__(self, operations: Sequence[Operation]) -> None:
        asked = [one for one in operations if one.kind in (Kind.ASK, Kind.TASK)]
        self._texts = sorted({one.what for one in asked if one.kind is Kind.TASK})
        self._doubtful = {one.number for one in operations if any(_held(other, one) for other in asked)}
        """Operations at a gateway that has another submission and doesn't yet know its fate. Until then that submission
        blocks others, and is pending if it is a task."""

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
        """Deleting checks first, then acts."""
        known = state.task and state.stage in ("live", "kept")
        open_ = forget.ends is None
        if progress == CALLED:
            if known and (open_ or forget.status == 204):
                yield state, SEEN
            if (not known and forget.status == 404) or forget.status not in (200, 204, 404):
                yield state, DONE
            elif forget.status == 204 and forget.number in self._doubtful:
                yield state, DONE  # It took back a submission that was about to be refused.
        else:
            yield ABSENT if known else state, DONE

    def _submit(self, state: Standing, asked: Operation) -> Iterator[Step[Standing]]:
        """Yield the steps of a submission when it arrives."""
        status, open_ = asked.status, asked.ends is None
        if open_ or (400 <= status < 500 and status not in (404, 409, 422)):
            yield state, DONE  # It was refused, or never arrived.
        if status == 404 and (asked.wanted or asked.model):
            yield state, DONE  # Its version or model doesn't exist.
        if status == 422 and asked.code == "IDEMPOTENCY_CONFLICT" and asked.key:
            yield state, DONE  # The key's history decides whether that is right.
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
            yield state._replace(settled=False), DONE  # Its own gateway doesn't know the outcome yet.
        elif asked.outcome and not asked.turned_down and state.outcome in ("", asked.outcome):
            yield state._replace(outcome=asked.outcome), DONE

    def _wait(self, state: Standing, asked: Operation, progress: str) -> Iterator[Step[Standing]]:
        """Yield the steps of a submission that owns, or owned, the id."""
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
            yield state, DONE  # It has ended, was deleted or was lost; waiting clients may have got any answer.

    def _wait_for_answer(self, state: Standing, asked: Operation, progress: str, own: bool) -> Iterator[Step[Standing]]:
        if asked.status == 404:
            return  # Only a task can be deleted.
        if asked.ends is None or not asked.outcome:  # Left, refused late, or timed out: it ends at any time.
            yield ABSENT if own else state, DONE
        elif progress == SUBMITTED and own:
            yield state._replace(stage="held"), ENDED
        else:
            yield ABSENT if own else state, DONE


def _held(asked: Operation, meanwhile: Operation) -> bool:
    """Return True if a gateway may not yet know if it accepts `asked` while `meanwhile` is in progress."""
    if asked is meanwhile or asked.gateway != meanwhile.gateway:
        return False
    if meanwhile.kind in (Kind.POLL, Kind.FORGET) and asked.kind is not Kind.TASK:
        return False
    return asked.called < (meanwhile.returned or 0.0) and (asked.ends is None or asked.ends > meanwhile.called)
