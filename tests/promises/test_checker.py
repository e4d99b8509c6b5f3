"""The checker itself: allowed histories, and broken ones of each kind. `Scribe.write` explains the notation."""

import pytest

from tests.promises.checker import check
from tests.promises.faults import Fault
from tests.promises.histories import Scribe
from tests.promises.operation import Job

ALLOWED = {
    "a request is answered": "1-2 run a; 0-3 ask a: run0.0",
    "a task from its start to its being forgotten": (
        "2-4 run a; 0-1 task a id=t: accepted; 1-3 poll t: pending; 3-5 poll t: run0.0; 5-6 task a id=t: accepted; "
        "5-6 task b id=t: misuse; 5-6 ask a id=t: run0.0; 7-8 forget t: forgotten; 8.5-9 poll t: unknown"
    ),
    "a task that is sent again at a gateway that has yet to hear its outcome": (
        "1-2 run a; 0-1 task a id=t: accepted; 3-4 task a id=t: accepted; 4-5 task a id=t: conflict; 6-7 poll t: run0.0"
    ),
    "a key is forgotten with its task that is deleted while it runs": (
        "1-3 run a; 3.5-4.5 run a; 0-1 task a id=t key=k: accepted; 1-2 forget t: forgotten; 3-5 ask a key=k: run1.0"
    ),
    "two that use one id meet in any order": (
        "1-2 run b; 0-3 ask a id=t: conflict; 0.5-3.5 ask b id=t: run0.0; 4.5-4.8 run reject_c; "
        "4-5 ask reject_c id=t: rejected"
    ),
    "who left may be there or not": (
        "0- task a id=t: left; 1-2 poll t: pending; 3-4 poll t: unknown; 5- ask b id=u: left; 6-7 ask c id=u: conflict"
    ),
    "a deadline that passed frees the id sooner or later": (
        "3.5-3.6 run c; 0-1 ask a id=t timeout=1: late; 1-2 ask b id=t: conflict; 3-4 ask c id=t: run0.0"
    ),
    "a task that was late says so for good": "0-1 task a id=t: accepted; 2-3 poll t: failed; 3-4 poll t: failed",
    "who asks by the id of a task that was late hears that at once": (
        "0-1 task a id=t timeout=2: accepted; 4-4.1 ask a id=t: late"
    ),
    "a key is one run for all": (
        "1-2 run a; 0- ask a key=k: left; 0.5-3 ask a key=k: run0.0; 1.5-3 ask b key=k: misuse; "
        "9-9.5 ask a key=k: run0.0"
    ),
    "a key whose run failed runs again": (
        "1- run a; 1.5-1.5 fault gpu killed; 5-6 run a; 0-3 ask a key=k: 502 BACKEND_ERROR; 4-7 ask a key=k: run1.0"
    ),
    "tenants have ids and keys of their own": (
        "1-2 run a a; 0-3 ask a id=t key=k: run0.0; 0-3 ask a id=t tenant=globex key=k: run0.1; "
        "4-5 poll t tenant=globex: unknown"
    ),
    "what an emptied redis forgot": (
        "1-2 run a; 12-13 run a; 0-1 task a id=t: accepted; 0-2.5 ask a id=u key=k: run0.0; 10-10 fault redis emptied; "
        "11-12 poll t: unknown; 11.5-14 ask a id=w key=k: run1.0"
    ),
    "two deletions at once may both have found it": (
        "0-1 task a id=t: accepted; 2-4 forget t: forgotten; 3-5 forget t: forgotten"
    ),
    "a deletion without an answer may come late": (
        "0-1 task a id=t: accepted; 2-3 forget t: 503 SERVICE_OVERLOADED; 4-5 poll t: pending; 6-7 poll t: unknown"
    ),
    "a gateway that does not know yet says pending": (
        "0- ask a id=t: left; 1-3 task a id=t: conflict; 1.5-2 poll t: pending; 4-5 poll t: unknown"
    ),
    "a gateway that does not know yet lets no other under the id": (
        "1-1.5 run b; 0-2 ask b key=k: run0.0; 3-6 ask a id=t key=k: misuse; 4-5 task a id=t key=k: conflict"
    ),
    "a deletion of what is about to be refused": (
        "1-1.5 run b; 0-2 ask b id=t: run0.0; 0.5-1.8 task a id=t: conflict; 0.6-1 forget t: forgotten"
    ),
    "an id that is used again after its deletion": (
        "6-7 run b; 0-1 task a id=t: accepted; 2-3 forget t: forgotten; 4-5 task b id=t: accepted; 8-9 poll t: run0.0"
    ),
    "what was running when a worker died runs again": (
        "1-2 run a; 6-7 run a; 1.5-5 fault worker paused; 0-8 ask a key=k: run1.0"
    ),
    "a rejection under a key is replayed": (
        "1- run poison a; 2- run poison; 0-3 ask poison key=k: rejected; 4-5 ask poison key=k: rejected; "
        "4-5 ask a key=k: misuse; 6-7 task poison id=t: known; 8-9 poll t: unknown"
    ),
    "a key is bound to nothing by what is turned down under it": (
        "1- run poison; 6-7 run a; 0-2 ask poison: rejected; 3-4 ask poison key=k: known; 5-8 ask a key=k: run1.0"
    ),
    "what was turned down runs later": (
        "1- run poison; 0-2 ask poison: rejected; 3-4 ask poison id=t: known; 205- run poison; "
        "200-201 task poison id=t: accepted; 206-207 poll t: 200 REJECTED_BY_MODEL"
    ),
    "requests whose parameters are equal ride together": (
        "1-2 run a b t=1; 0-3 ask a t=1: run0.0; 0-3 ask b t=1.0: run0.1"
    ),
    "other parameters under a key are another request": (
        "1-2 run a t=1; 0-3 ask a key=k t=1: run0.0; 4-5 ask a key=k t=2: misuse; 4-5 ask a key=k: misuse"
    ),
    "calls of a batch of which a later one raised run again": (
        "1-1.5 run a name=1.1.0; 2-2.5 run b name=1.1.1; 3- run poison_c name=1.1.2; 4-5 run a b name=1.1.3; "
        "0-6 ask a: 1.1.3.0; 0-6 ask b key=k: 1.1.3.1; 0-6 ask poison_c: rejected"
    ),
    "several inputs are answered each for itself, whatever run they were in": (
        "1-2 run a; 1-2 run b c; 0-3 ask a b c: run0.0 run1.0 run1.1"
    ),
    "the first failure is that of the request, and the other inputs may have run or not": (
        "1-2 run a reject_b; 0-3 ask a reject_b c blamed=1: rejected; 4-5 ask d reject_b: known; 4- ask e f: left"
    ),
    "an input runs twice as a worker was killed": (
        "1-2 run a b; 1.5-2.5 run b; 1-1.2 fault worker killed; 0-3 ask a b: run0.0 run0.1"
    ),
    "inputs under a key run once and are answered alike": (
        "1-2 run a b; 0-3 ask a b key=k: run0.0 run0.1; 4-5 ask a b key=k: run0.0 run0.1"
    ),
    "a text that a request under a key has twice runs twice": (
        "1-2 run a; 1-2 run a; 0-3 ask a a key=k: run0.0 run1.0"
    ),
    "rows of a request run together and in their order": "1-2 run x a b y; 0-3 ask a b rows=1: run0.1 run0.2",
    "an array of one row under a key is another request than its text": (
        "1-2 run a; 0-3 ask a key=k: run0.0; 4-5 ask a key=k rows=1: misuse"
    ),
}

BROKEN = {
    "late long before its deadline": {"a request that is late when its time has hardly begun": "0-1 ask a: late"},
    "a good input is rejected": {
        "a failure that names a good input": "1-2 run a reject_b; 0-3 ask a reject_b blamed=0: rejected",
        "a rejection of what rode with a culprit": "1- run poison a; 0-2 ask a: rejected",
        "a task that is rejected for another": (
            "1- run poison a; 0-1 task a id=t: accepted; 2-3 poll t: 200 REJECTED_BY_MODEL"
        ),
    },
    "a good input failed": {"a good input whose retries others spent": "1- run poison a; 0-2 ask a: 502 BACKEND_ERROR"},
    "output of an input that the model rejects": {
        "outputs in spite of an input that fails": "1-2 run a reject_b; 0-3 ask a reject_b: run0.0 run0.1",
        "an output of what is rejected": "1- run poison; 0-2 ask poison: run0.0",
    },
    "rejected without any run": {"a rejection that no run explains": "0-2 ask poison: known; 3- run poison"},
    "turned down in place of what is kept": {
        "a rejection that is kept and told otherwise": (
            "1- run poison; 0-2 ask poison key=k: rejected; 3-4 ask poison key=k: known"
        ),
        "a key that is misused for what is known": (
            "1- run poison a; 0-2 ask a key=k: run0.1; 3-4 ask poison key=k: known"
        ),
        "a task that was rejected and is turned down": (
            "1- run poison; 0-1 task poison id=t: accepted; 2-3 poll t: 200 REJECTED_BY_MODEL; "
            "4-5 task poison id=t: known"
        ),
    },
    "answer to another request": {
        "the output of a neighbour with the same text": (
            "1-2 run a; 1-2 run b; 1-2 run a; 0-3 ask a b: run0.0 run1.0; 0-3 ask a: run0.0"
        ),
        "an output too few": "1-2 run a b; 0-3 ask a b: run0.0",
        "an output of another request": "1-2 run a b c; 0-3 ask a b: run0.0 run0.2; 0-3 ask c: run0.2",
        "the output of another text": "1-2 run a b; 0-3 ask a: run0.0; 0-3 ask b: run0.0",
        "one run for two that have nothing in common": "1-2 run a; 0-3 ask a: run0.0; 0-3 ask a: run0.0",
    },
    "answer of another tenant": {
        "one run for two tenants": "1-2 run a; 0-3 ask a: run0.0; 0-3 ask a tenant=globex: run0.0"
    },
    "a task of nobody, or of another tenant": {
        "a task that a foreign tenant sees": "0-1 task a id=t: accepted; 2-3 poll t tenant=globex: pending"
    },
    "output of no run": {"an output that nothing made": "0-1 ask a: A|run7.0"},
    "output of a run at another time": {"an output of old": "1-2 run a; 3-4 ask a: run0.0"},
    "two outcomes": {
        "a task with two outcomes": (
            "1-2 run a; 3-4 run a; 0-1 task a id=t: accepted; 2-3 poll t: run0.0; 5-6 poll t: run1.0"
        ),
        "a key with two outcomes": "1- run a a; 0-2 ask a key=k: run0.0; 3-4 ask a key=k: run0.1",
    },
    "not allowed by its history": {
        "a task that pends after its outcome": (
            "1-2 run a; 0-1 task a id=t: accepted; 2-3 poll t: run0.0; 5-6 poll t: pending"
        ),
        "another text under a key": "1-2 run a b; 0-3 ask a key=k: run0.0; 0-3 ask b key=k: run0.1",
        "a second submission that takes a live id": (
            "2.5-3 run b; 0-1 task a id=t: accepted; 2-4 ask b id=t: run0.0; 5-6 poll t: pending"
        ),
    },
    "a task that lives is unknown (404)": {
        "a task that was accepted and is lost": "0-1 task a id=t: accepted; 2-3 poll t: unknown",
        "a task that another submission took away": (
            "1-2 run a; 0-1 task a id=t: accepted; 2-3 poll t: run0.0; 4- task a id=t: left; 5-6 poll t: unknown"
        ),
        "a request that is answered with 404": "0-3 ask a id=t: unknown; 1-2 ask b id=t: conflict",
    },
    "known after its DELETE": {
        "a deleted task that is there": "0-1 task a id=t: accepted; 2-3 forget t: forgotten; 4-5 poll t: pending"
    },
    "run of a deleted task": {
        "a deleted task that runs": "0-1 task a id=t: accepted; 2-3 forget t: forgotten; 5-6 run a"
    },
    "run of a request that was never sent whole": {"a torn request that runs": "0- ask a: torn; 4-5 run a"},
    "second run under a key": {
        "a third run of a text that a request under a key has twice": (
            "1-2 run a; 1-2 run a; 4-5 run a; 0-3 ask a a key=k: run0.0 run1.0"
        ),
        "a second run under a key after the first client left": (
            "0.5-1.5 run a; 2-3 run a; 0- ask a key=k: left; 1-4 ask a key=k: run1.0"
        ),
        "a third run under a key of which one task was deleted": (
            "1-3 run a; 3.5-4.5 run a; 5-6 run a; 0-1 task a id=t key=k: accepted; 1-2 forget t: forgotten; "
            "3- ask a key=k: left; 4-6 ask a key=k: run2.0"
        ),
    },
    "a conflict with nothing": {
        "misuse of a key that nobody used": "0-1 ask a key=k: misuse",
        "a conflict after the answer": "1-2 run a; 0-3 ask a id=t: run0.0; 4-5 ask b id=t: conflict",
        "equal parameters under a key are refused": (
            "1-2 run a t=1; 0-3 ask a key=k t=1: run0.0; 4-5 ask a key=k t=1: misuse"
        ),
    },
    "no answer": {"a connection that is closed instead of an answer": "0- ask a: cut"},
    "error of the service itself": {"an error of the service": "0-1 ask a: 500 INTERNAL"},
    "a task without an end": {"a task that pends for ever": "0-1 task a id=t: accepted; 50-51 poll t: pending"},
    "other parameters in one call": {
        "requests with other parameters ride together": "1-2 run a b t=1; 0- ask a t=1: left; 0- ask b t=2: left",
        "a request without parameters rides with one that has some": (
            "1-2 run a b; 0- ask a: left; 0- ask b t=null: left"
        ),
    },
    "a call with parameters that its requests have not": {
        "a request that nobody waits for runs with other parameters": "1-2 run a t=2; 0- ask a t=1: left"
    },
    "answer of a call with other parameters": {
        "a text that is asked twice gets the answer for other parameters": (
            "1-2 run a t=1; 1-2 run a t=2; 0-3 ask a t=1: run1.0; 0-3 ask a t=2: run0.0"
        )
    },
    "second run of a request": {
        "an input that runs twice": "1-2 run a b; 1.5-2.5 run b; 0-3 ask a b: run0.0 run0.1",
        "a call that cannot be of the batch that raised runs again": (
            "1-1.5 run a name=1.1.0; 2-2.5 run b name=1.1.1; 3-3.5 run c name=1.1.2; 4-4.5 run d name=1.1.3; "
            "6- run poison_e name=1.1.4; 7-8 run a name=1.1.5; 0-9 ask a: 1.1.5.0"
        ),
        "a call of an earlier batch with other parameters runs again": (
            "1-1.5 run a name=1.1.0 t=1; 2-2.5 run b name=1.1.1 t=2; 3- run poison_c name=1.1.2 t=1; "
            "4-5 run a name=1.1.3 t=1; 0-6 ask a t=1: 1.1.3.0; 0-6 ask poison_c t=1: rejected"
        ),
    },
    "answers in another order": {"outputs in another order than the inputs": "1-2 run a b; 0-3 ask a b: run0.1 run0.0"},
    "rows of a request that did not run together": {
        "rows that ran apart": "1-2 run a; 1-2 run b; 0-3 ask a b rows=1: run0.0 run1.0",
        "rows with another between them": "1-2 run a c b; 0-3 ask a b rows=1: run0.0 run0.2",
    },
    "two outcomes; second run under a key": {
        "inputs under a key of which one runs again": (
            "1-2 run a b; 6.5-7 run b; 0-3 ask a b key=k: run0.0 run0.1; 6-8 ask a b key=k: run0.0 run1.0"
        )
    },
}
"""Histories that break these promises and no others."""
ROWS = [(set(promises.split("; ")), story, name) for promises, rows in BROKEN.items() for name, story in rows.items()]


@pytest.mark.parametrize("story", ALLOWED.values(), ids=ALLOWED)
def test_a_history_may_be(story: str) -> None:
    assert check(Scribe(story).history) == []


@pytest.mark.parametrize(("promises", "story"), [row[:2] for row in ROWS], ids=[name for *_, name in ROWS])
def test_a_history_that_breaks_a_promise_is_found_out_whatever_was_lost_long_before_or_after(
    promises: set[str], story: str
) -> None:
    it = Scribe(story)
    assert it.broken == promises
    it.history.faults += [Fault("redis emptied", at, at + 1.0) for at in (-99.0, 999.0)]
    assert it.broken == promises


def test_many_losses_at_once_are_judged_as_one() -> None:
    it = Scribe("".join(f"{number}-{number}.5 task a id=t: accepted;" for number in range(7)))
    it.history.faults += [Fault("redis emptied", number / 10.0, number / 10.0) for number in range(40)]
    assert not it.broken


@pytest.mark.parametrize(("began", "kept"), [(2.0, True), (0.5, False)])
def test_who_asks_anew_gets_no_earlier_answer_and_its_own_is_for_others(began: float, kept: bool) -> None:
    it = Scribe(f"{began}-2.6 run a; 0- ask a: left; 1-3 ask a fresh=1: run0.0; 3-5 ask a: run0.0", shares=True)
    assert it.broken == (set() if kept else {"output of a run at another time"})


def test_identical_requests_share_an_answer_only_where_their_parameters_are_equal() -> None:
    it = Scribe("1-2 run a t=1; 0-3 ask a t=1: run0.0; 0-3 ask a t=1: run0.0", shares=True)
    assert not it.broken
    it.write("0-3 ask a t=2: run0.0")
    assert it.broken == {"answer of a call with other parameters", "answer to another request"}


def test_a_bulk_line_that_rides_with_a_request_with_other_parameters_is_found_out() -> None:
    it = Scribe("1-2 run a bulk_b t=1; 0- ask a t=2: left")
    job = Job("acme", "batch_1", 0.0, {"1": ("bulk b",)}, {"1": '{"t": 1}'}, status="completed")
    job.counts, job.answers = {"total": 1, "completed": 1, "failed": 0}, [("1", ("BULK B|run0.1",))]
    it.history.jobs.append(job)
    assert it.broken == {"other parameters in one call"}


BEYOND, WITHIN = "let in beyond its limit", "refused within its limit"
LIMIT = {("acme", None): (1.0, 3.0)}
FOUR = (
    "0.2-0.4 run a b c d model={0}; 0-1 ask a model={0}: run0.0; 0-1 ask b model={0}: run0.1; "
    "0-1 ask c model={0}: run0.2; 0-1 ask d model={0}: run0.3"
)


def limits(all_models: float, second: float) -> dict[tuple[str, str | None], tuple[float, float]]:
    """Return a tenant's bursts on all models and on one of them."""
    return {("acme", None): (0.0, all_models), ("acme", "second"): (0.0, second)}


@pytest.mark.parametrize(
    ("limits", "story", "promise"),
    [
        (LIMIT, "0.2-0.4 run a b; 0-1 ask a b: run0.0 run0.1; 1-1.5 ask c d e: limited", ""),
        (
            LIMIT,
            "0.2-0.4 run a b c d e f; 0-1 ask a b c: run0.0 run0.1 run0.2; 0-1 ask d e f: run0.3 run0.4 run0.5",
            BEYOND,
        ),
        (LIMIT, "0-1 ask a b c: limited", WITHIN),
        (limits(9.0, 3.0), FOUR.format("second"), BEYOND),
        (limits(9.0, 3.0), FOUR.format(""), ""),
        (limits(3.0, 3.0), FOUR.format(""), BEYOND),
        (limits(9.0, 2.0), "1-1.5 ask c d model=second: limited; 0-1 ask b model=second timeout=1: late", ""),
        (limits(9.0, 3.0), "1-1.5 ask c d model=second: limited; 0-1 ask b model=second timeout=1: late", WITHIN),
    ],
)
def test_a_limit_counts_each_input_and_one_to_a_model_counts_that_alone(
    limits: dict[tuple[str, str | None], tuple[float, float]], story: str, promise: str
) -> None:
    it = Scribe(story)
    it.history.limits |= limits
    assert it.broken == ({promise} if promise else set())
