"""The checker itself: histories that are allowed, and one of each kind that is not."""

from collections.abc import Callable, Iterator

import pytest

from tests.promises.checker import check
from tests.promises.histories import (
    ACCEPTED,
    CONFLICT,
    FAILED,
    FORGOTTEN,
    KNOWN,
    LATE,
    LEFT,
    MISUSE,
    PENDING,
    REJECTED,
    UNKNOWN,
    Scribe,
)
from tests.promises.operation import Job

Story = Callable[[Scribe], None]
REFUSED: list[tuple[str, Story]] = []


@pytest.fixture
def it() -> Iterator[Scribe]:
    """Writes a history that may be."""
    scribe = Scribe()
    yield scribe
    assert check(scribe.history) == []


def refused(promise: str) -> Callable[[Story], Story]:
    """A story in which this promise is broken."""

    def note(story: Story) -> Story:
        REFUSED.append((promise, story))
        return story

    return note


@pytest.mark.parametrize(("promise", "story"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_history_that_breaks_a_promise_is_found_out(promise: str, story: Story) -> None:
    scribe = Scribe()
    story(scribe)
    assert {violation.promise for violation in check(scribe.history)} == {promise}


@pytest.mark.parametrize(("promise", "story"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_no_loss_of_data_before_or_long_after_excuses(promise: str, story: Story) -> None:
    scribe = Scribe()
    scribe.fault("redis emptied", at=(-99.0, -98.0))
    story(scribe)
    scribe.fault("redis emptied", at=(999.0, 999.0))
    assert {violation.promise for violation in check(scribe.history)} == {promise}


def test_many_losses_at_once_are_judged_as_one(it: Scribe) -> None:
    for number in range(40):
        it.fault("redis emptied", at=(number / 10.0, number / 10.0))
    for number in range(7):
        it.task((float(number), number + 0.5), "a", "t", **ACCEPTED)


# What may be.


def test_a_request_is_answered(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)


def test_a_task_from_its_start_to_its_being_forgotten(it: Scribe) -> None:
    [output] = it.run("a", at=(2.0, 4.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((1.0, 3.0), "t", **PENDING)
    it.poll((3.0, 5.0), "t", output=output)
    it.task((5.0, 6.0), "a", "t", **ACCEPTED)
    it.task((5.0, 6.0), "b", "t", **MISUSE)
    it.ask((5.0, 6.0), "a", "t", output=output)
    it.forget((7.0, 8.0), "t", **FORGOTTEN)
    it.poll((8.5, 9.0), "t", **UNKNOWN)


def test_a_task_that_is_sent_again_at_a_gateway_that_has_yet_to_hear_its_outcome(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.task((3.0, 4.0), "a", "t", **ACCEPTED)
    it.task((4.0, 5.0), "a", "t", **CONFLICT)
    it.poll((6.0, 7.0), "t", output=output)


def test_a_key_is_forgotten_with_its_task_that_is_deleted_while_it_runs(it: Scribe) -> None:
    it.run("a", at=(1.0, 3.0))
    [output] = it.run("a", at=(3.5, 4.5))
    it.task((0.0, 1.0), "a", "t", key="k", **ACCEPTED)
    it.forget((1.0, 2.0), "t", **FORGOTTEN)
    it.ask((3.0, 5.0), "a", key="k", output=output)


def test_two_that_use_one_id_meet_in_any_order(it: Scribe) -> None:
    [output] = it.run("b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", "t", **CONFLICT)
    it.ask((0.5, 3.5), "b", "t", output=output)
    it.run("reject c", at=(4.5, 4.8))
    it.ask((4.0, 5.0), "reject c", "t", **REJECTED)


def test_who_left_may_be_there_or_not(it: Scribe) -> None:
    it.task((0.0, None), "a", "t", **LEFT)
    it.poll((1.0, 2.0), "t", **PENDING)
    it.poll((3.0, 4.0), "t", **UNKNOWN)
    it.ask((5.0, None), "b", "u", **LEFT)
    it.ask((6.0, 7.0), "c", "u", **CONFLICT)


def test_a_deadline_that_passed_frees_the_id_sooner_or_later(it: Scribe) -> None:
    [output] = it.run("c", at=(3.5, 3.6))
    it.ask((0.0, 1.0), "a", "t", timeout=1.0, **LATE)
    it.ask((1.0, 2.0), "b", "t", **CONFLICT)
    it.ask((3.0, 4.0), "c", "t", output=output)


def test_a_task_that_was_late_says_so_for_good(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", **FAILED)
    it.poll((3.0, 4.0), "t", **FAILED)


def test_who_asks_by_the_id_of_a_task_that_was_late_hears_that_at_once(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", timeout=2.0, **ACCEPTED)
    it.ask((4.0, 4.1), "a", "t", **LATE)


@refused("late long before its deadline")
def a_request_that_is_late_when_its_time_has_hardly_begun(it: Scribe) -> None:
    it.ask((0.0, 1.0), "a", **LATE)


def test_a_key_is_one_run_for_all(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, None), "a", key="k", **LEFT)
    it.ask((0.5, 3.0), "a", key="k", output=output)
    it.ask((1.5, 3.0), "b", key="k", **MISUSE)
    it.ask((9.0, 9.5), "a", key="k", output=output)


def test_a_key_whose_run_failed_runs_again(it: Scribe) -> None:
    it.run("a", at=(1.0, None))
    it.fault("gpu killed", at=(1.5, 1.5))
    [output] = it.run("a", at=(5.0, 6.0))
    it.ask((0.0, 3.0), "a", key="k", status=502, code="BACKEND_ERROR")
    it.ask((4.0, 7.0), "a", key="k", output=output)


def test_tenants_have_ids_and_keys_of_their_own(it: Scribe) -> None:
    mine, yours = it.run("a", "a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", "t", key="k", output=mine)
    it.ask((0.0, 3.0), "a", "t", key="k", tenant="globex", output=yours)
    it.poll((4.0, 5.0), "t", tenant="globex", **UNKNOWN)


def test_what_an_emptied_redis_forgot(it: Scribe) -> None:
    first, second = it.run("a", at=(1.0, 2.0)) + it.run("a", at=(12.0, 13.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.ask((0.0, 2.5), "a", "u", key="k", output=first)
    it.fault("redis emptied", at=(10.0, 10.0))
    it.poll((11.0, 12.0), "t", **UNKNOWN)
    it.ask((11.5, 14.0), "a", "w", key="k", output=second)


def test_two_deletions_at_once_may_both_have_found_it(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.forget((2.0, 4.0), "t", **FORGOTTEN)
    it.forget((3.0, 5.0), "t", **FORGOTTEN)


def test_a_deletion_without_an_answer_may_come_late(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.forget((2.0, 3.0), "t", status=503, code="SERVICE_OVERLOADED")
    it.poll((4.0, 5.0), "t", **PENDING)
    it.poll((6.0, 7.0), "t", **UNKNOWN)


def test_a_gateway_that_does_not_know_yet_says_pending(it: Scribe) -> None:
    it.ask((0.0, None), "a", "t", **LEFT)
    it.task((1.0, 3.0), "a", "t", **CONFLICT)
    it.poll((1.5, 2.0), "t", **PENDING)
    it.poll((4.0, 5.0), "t", **UNKNOWN)


def test_a_gateway_that_does_not_know_yet_lets_no_other_under_the_id(it: Scribe) -> None:
    [output] = it.run("b", at=(1.0, 1.5))
    it.ask((0.0, 2.0), "b", key="k", output=output)
    it.ask((3.0, 6.0), "a", "t", key="k", **MISUSE)
    it.task((4.0, 5.0), "a", "t", key="k", **CONFLICT)


def test_a_deletion_of_what_is_about_to_be_refused(it: Scribe) -> None:
    [output] = it.run("b", at=(1.0, 1.5))
    it.ask((0.0, 2.0), "b", "t", output=output)
    it.task((0.5, 1.8), "a", "t", **CONFLICT)
    it.forget((0.6, 1.0), "t", **FORGOTTEN)


def test_an_id_that_is_used_again_after_its_deletion(it: Scribe) -> None:
    [output] = it.run("b", at=(6.0, 7.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.forget((2.0, 3.0), "t", **FORGOTTEN)
    it.task((4.0, 5.0), "b", "t", **ACCEPTED)
    it.poll((8.0, 9.0), "t", output=output)


def test_what_was_running_when_a_worker_died_runs_again(it: Scribe) -> None:
    it.run("a", at=(1.0, 2.0))
    [output] = it.run("a", at=(6.0, 7.0))
    it.fault("worker paused", at=(1.5, 5.0))
    it.ask((0.0, 8.0), "a", key="k", output=output)


def test_a_rejection_under_a_key_is_replayed(it: Scribe) -> None:
    it.run("poison", "a", at=(1.0, None))
    it.run("poison", at=(2.0, None))
    it.ask((0.0, 3.0), "poison", key="k", **REJECTED)
    it.ask((4.0, 5.0), "poison", key="k", **REJECTED)
    it.ask((4.0, 5.0), "a", key="k", **MISUSE)
    it.task((6.0, 7.0), "poison", "t", **KNOWN)
    it.poll((8.0, 9.0), "t", **UNKNOWN)


def test_a_key_is_bound_to_nothing_by_what_is_turned_down_under_it(it: Scribe) -> None:
    it.run("poison", at=(1.0, None))
    [output] = it.run("a", at=(6.0, 7.0))
    it.ask((0.0, 2.0), "poison", **REJECTED)
    it.ask((3.0, 4.0), "poison", key="k", **KNOWN)
    it.ask((5.0, 8.0), "a", key="k", output=output)


def test_what_was_turned_down_runs_later(it: Scribe) -> None:
    it.run("poison", at=(1.0, None))
    it.ask((0.0, 2.0), "poison", **REJECTED)
    it.ask((3.0, 4.0), "poison", "t", **KNOWN)
    it.run("poison", at=(205.0, None))
    it.task((200.0, 201.0), "poison", "t", **ACCEPTED)
    it.poll((206.0, 207.0), "t", status=200, code="REJECTED_BY_MODEL")


# What may not be.


@refused("a good input is rejected")
def a_rejection_of_what_rode_with_a_culprit(it: Scribe) -> None:
    it.run("poison", "a", at=(1.0, None))
    it.ask((0.0, 2.0), "a", **REJECTED)


@refused("a good input is rejected")
def a_task_that_is_rejected_for_another(it: Scribe) -> None:
    it.run("poison", "a", at=(1.0, None))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", status=200, code="REJECTED_BY_MODEL")


@refused("a good input failed")
def a_good_input_whose_retries_others_spent(it: Scribe) -> None:
    it.run("poison", "a", at=(1.0, None))
    it.ask((0.0, 2.0), "a", status=502, code="BACKEND_ERROR")


@refused("output of an input that the model rejects")
def an_output_of_what_is_rejected(it: Scribe) -> None:
    [output] = it.run("poison", at=(1.0, None))
    it.ask((0.0, 2.0), "poison", output=output)


@refused("rejected without any run")
def a_rejection_that_no_run_explains(it: Scribe) -> None:
    it.ask((0.0, 2.0), "poison", **KNOWN)
    it.run("poison", at=(3.0, None))


@refused("turned down in place of what is kept")
def a_rejection_that_is_kept_and_told_otherwise(it: Scribe) -> None:
    it.run("poison", at=(1.0, None))
    it.ask((0.0, 2.0), "poison", key="k", **REJECTED)
    it.ask((3.0, 4.0), "poison", key="k", **KNOWN)


@refused("turned down in place of what is kept")
def a_key_that_is_misused_for_what_is_known(it: Scribe) -> None:
    [_, output] = it.run("poison", "a", at=(1.0, None))
    it.ask((0.0, 2.0), "a", key="k", output=output)
    it.ask((3.0, 4.0), "poison", key="k", **KNOWN)


@refused("turned down in place of what is kept")
def a_task_that_was_rejected_and_is_turned_down(it: Scribe) -> None:
    it.run("poison", at=(1.0, None))
    it.task((0.0, 1.0), "poison", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", status=200, code="REJECTED_BY_MODEL")
    it.task((4.0, 5.0), "poison", "t", **KNOWN)


@refused("answer to another request")
def the_output_of_another_text(it: Scribe) -> None:
    [output, _] = it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)
    it.ask((0.0, 3.0), "b", output=output)


@refused("answer to another request")
def one_run_for_two_that_have_nothing_in_common(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)
    it.ask((0.0, 3.0), "a", output=output)


@refused("answer of another tenant")
def one_run_for_two_tenants(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=output)
    it.ask((0.0, 3.0), "a", tenant="globex", output=output)


@refused("a task of nobody, or of another tenant")
def a_task_that_a_foreign_tenant_sees(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", tenant="globex", **PENDING)


@refused("output of no run")
def an_output_that_nothing_made(it: Scribe) -> None:
    it.ask((0.0, 1.0), "a", output="A|run7.0")


@refused("output of a run at another time")
def an_output_of_old(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((3.0, 4.0), "a", output=output)


@refused("two outcomes")
def a_task_with_two_outcomes(it: Scribe) -> None:
    first, second = it.run("a", at=(1.0, 2.0)) + it.run("a", at=(3.0, 4.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", output=first)
    it.poll((5.0, 6.0), "t", output=second)


@refused("not allowed by its history")
def a_task_that_pends_after_its_outcome(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", output=output)
    it.poll((5.0, 6.0), "t", **PENDING)


@refused("a task that lives is unknown (404)")
def a_task_that_was_accepted_and_is_lost(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", **UNKNOWN)


@refused("a task that lives is unknown (404)")
def a_task_that_another_submission_took_away(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((2.0, 3.0), "t", output=output)
    it.task((4.0, None), "a", "t", **LEFT)
    it.poll((5.0, 6.0), "t", **UNKNOWN)


@refused("a task that lives is unknown (404)")
def a_request_that_is_answered_with_404(it: Scribe) -> None:
    it.ask((0.0, 3.0), "a", "t", **UNKNOWN)
    it.ask((1.0, 2.0), "b", "t", **CONFLICT)


@refused("known after its DELETE")
def a_deleted_task_that_is_there(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.forget((2.0, 3.0), "t", **FORGOTTEN)
    it.poll((4.0, 5.0), "t", **PENDING)


@refused("run of a deleted task")
def a_deleted_task_that_runs(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.forget((2.0, 3.0), "t", **FORGOTTEN)
    it.run("a", at=(5.0, 6.0))


@refused("run of a request that was never sent whole")
def a_torn_request_that_runs(it: Scribe) -> None:
    it.ask((0.0, None), "a", lost="torn")
    it.run("a", at=(4.0, 5.0))


@refused("second run under a key")
def a_second_run_under_a_key_after_the_first_client_left(it: Scribe) -> None:
    it.run("a", at=(0.5, 1.5))
    [output] = it.run("a", at=(2.0, 3.0))
    it.ask((0.0, None), "a", key="k", **LEFT)
    it.ask((1.0, 4.0), "a", key="k", output=output)


@refused("second run under a key")
def a_third_run_under_a_key_of_which_one_task_was_deleted(it: Scribe) -> None:
    it.run("a", at=(1.0, 3.0))
    it.run("a", at=(3.5, 4.5))
    [output] = it.run("a", at=(5.0, 6.0))
    it.task((0.0, 1.0), "a", "t", key="k", **ACCEPTED)
    it.forget((1.0, 2.0), "t", **FORGOTTEN)
    it.ask((3.0, None), "a", key="k", **LEFT)
    it.ask((4.0, 6.0), "a", key="k", output=output)


@refused("two outcomes")
def a_key_with_two_outcomes(it: Scribe) -> None:
    first, second = it.run("a", "a", at=(1.0, None))
    it.ask((0.0, 2.0), "a", key="k", output=first)
    it.ask((3.0, 4.0), "a", key="k", output=second)


@refused("not allowed by its history")
def another_text_under_a_key(it: Scribe) -> None:
    first, second = it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", key="k", output=first)
    it.ask((0.0, 3.0), "b", key="k", output=second)


@refused("a conflict with nothing")
def misuse_of_a_key_that_nobody_used(it: Scribe) -> None:
    it.ask((0.0, 1.0), "a", key="k", **MISUSE)


@refused("a conflict with nothing")
def a_conflict_after_the_answer(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", "t", output=output)
    it.ask((4.0, 5.0), "b", "t", **CONFLICT)


@refused("not allowed by its history")
def a_second_submission_that_takes_a_live_id(it: Scribe) -> None:
    [output] = it.run("b", at=(2.5, 3.0))
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.ask((2.0, 4.0), "b", "t", output=output)
    it.poll((5.0, 6.0), "t", **PENDING)


@refused("no answer")
def a_connection_that_is_closed_instead_of_an_answer(it: Scribe) -> None:
    it.ask((0.0, None), "a", lost="cut")


@refused("error of the service itself")
def an_error_of_the_service(it: Scribe) -> None:
    it.ask((0.0, 1.0), "a", status=500, code="INTERNAL")


@refused("a task without an end")
def a_task_that_pends_for_ever(it: Scribe) -> None:
    it.task((0.0, 1.0), "a", "t", **ACCEPTED)
    it.poll((50.0, 51.0), "t", **PENDING)


@pytest.mark.parametrize(("began", "kept"), [(2.0, True), (0.5, False)])
def test_who_asks_anew_gets_no_earlier_answer_and_its_own_is_for_others(began: float, kept: bool) -> None:
    scribe = Scribe(shares=True)
    [output] = scribe.run("a", at=(began, began + 0.1))
    for at, fresh in ((0.0, False), (1.0, True), (3.0, False)):
        told = {"output": output, "fresh": fresh} if at else {"lost": "left"}
        scribe.ask((at, at + 2.0 if at else None), text="a", **told)
    promises = {violation.promise for violation in check(scribe.history)}
    assert promises == (set() if kept else {"output of a run at another time"})


# Parameters of a call.


def test_requests_whose_parameters_are_equal_ride_together(it: Scribe) -> None:
    outputs = it.run("a", "b", at=(1.0, 2.0), parameters='{"t": 1}')
    it.ask((0.0, 3.0), "a", output=outputs[0], parameters='{"t": 1}')
    it.ask((0.0, 3.0), "b", output=outputs[1], parameters='{"t": 1.0}')


@refused("other parameters in one call")
def requests_with_other_parameters_ride_together(it: Scribe) -> None:
    it.run("a", "b", at=(1.0, 2.0), parameters='{"t": 1}')
    it.ask((0.0, None), "a", parameters='{"t": 1}', **LEFT)
    it.ask((0.0, None), "b", parameters='{"t": 2}', **LEFT)


@refused("other parameters in one call")
def a_request_without_parameters_rides_with_one_that_has_some(it: Scribe) -> None:
    it.run("a", "b", at=(1.0, 2.0))
    it.ask((0.0, None), "a", **LEFT)
    it.ask((0.0, None), "b", parameters='{"t": null}', **LEFT)


@refused("other parameters in one call")
def a_bulk_line_rides_with_a_request_with_other_parameters(it: Scribe) -> None:
    outputs = it.run("a", "bulk b", at=(1.0, 2.0), parameters='{"t": 1}')
    it.ask((0.0, None), "a", parameters='{"t": 2}', **LEFT)
    job = Job("acme", "batch_1", 0.0, {"1": ("bulk b",)}, {"1": '{"t": 1}'}, status="completed")
    job.counts, job.answers = {"total": 1, "completed": 1, "failed": 0}, [("1", (outputs[1],))]
    it.history.jobs.append(job)


@refused("a call with parameters that its requests have not")
def a_request_that_nobody_waits_for_runs_with_other_parameters(it: Scribe) -> None:
    it.run("a", at=(1.0, 2.0), parameters='{"t": 2}')
    it.ask((0.0, None), "a", parameters='{"t": 1}', **LEFT)


@refused("answer of a call with other parameters")
def a_text_that_is_asked_twice_gets_the_answer_for_other_parameters(it: Scribe) -> None:
    mine, yours = it.run("a", at=(1.0, 2.0), parameters='{"t": 1}') + it.run("a", at=(1.0, 2.0), parameters='{"t": 2}')
    it.ask((0.0, 3.0), "a", output=yours, parameters='{"t": 1}')
    it.ask((0.0, 3.0), "a", output=mine, parameters='{"t": 2}')


def test_other_parameters_under_a_key_are_another_request(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0), parameters='{"t": 1}')
    it.ask((0.0, 3.0), "a", key="k", output=output, parameters='{"t": 1}')
    it.ask((4.0, 5.0), "a", key="k", parameters='{"t": 2}', **MISUSE)
    it.ask((4.0, 5.0), "a", key="k", **MISUSE)


@refused("a conflict with nothing")
def equal_parameters_under_a_key_are_refused(it: Scribe) -> None:
    [output] = it.run("a", at=(1.0, 2.0), parameters='{"t": 1}')
    it.ask((0.0, 3.0), "a", key="k", output=output, parameters='{"t": 1}')
    it.ask((4.0, 5.0), "a", key="k", parameters='{"t": 1}', **MISUSE)


def test_identical_requests_share_an_answer_only_where_their_parameters_are_equal() -> None:
    scribe = Scribe(shares=True)
    [output] = scribe.run("a", at=(1.0, 2.0), parameters='{"t": 1}')
    scribe.ask((0.0, 3.0), "a", output=output, parameters='{"t": 1}')
    scribe.ask((0.0, 3.0), "a", output=output, parameters='{"t": 1}')
    assert check(scribe.history) == []
    scribe.ask((0.0, 3.0), "a", output=output, parameters='{"t": 2}')
    promises = {violation.promise for violation in check(scribe.history)}
    assert promises == {"answer of a call with other parameters", "answer to another request"}


def test_calls_of_a_batch_of_which_a_later_one_raised_run_again(it: Scribe) -> None:
    for number, text in enumerate(("a", "b")):
        it.run(text, at=(1.0 + number, 1.5 + number), name=f"1.1.{number}")
    it.run("poison c", at=(3.0, None), name="1.1.2")
    a, b = it.run("a", "b", at=(4.0, 5.0), name="1.1.3")
    it.ask((0.0, 6.0), "a", output=a)
    it.ask((0.0, 6.0), "b", key="k", output=b)
    it.ask((0.0, 6.0), "poison c", status=422, code="REJECTED_BY_MODEL")


@refused("second run of a request")
def a_call_that_cannot_be_of_the_batch_that_raised_runs_again(it: Scribe) -> None:
    for number, text in enumerate("abcd"):
        it.run(text, at=(1.0 + number, 1.5 + number), name=f"1.1.{number}")
    it.run("poison e", at=(6.0, None), name="1.1.4")
    [output] = it.run("a", at=(7.0, 8.0), name="1.1.5")
    it.ask((0.0, 9.0), "a", output=output)


@refused("second run of a request")
def a_call_of_an_earlier_batch_with_other_parameters_runs_again(it: Scribe) -> None:
    it.run("a", at=(1.0, 1.5), name="1.1.0", parameters='{"t": 1}')
    it.run("b", at=(2.0, 2.5), name="1.1.1", parameters='{"t": 2}')
    it.run("poison c", at=(3.0, None), name="1.1.2", parameters='{"t": 1}')
    [output] = it.run("a", at=(4.0, 5.0), name="1.1.3", parameters='{"t": 1}')
    it.ask((0.0, 6.0), "a", output=output, parameters='{"t": 1}')
    it.ask((0.0, 6.0), "poison c", parameters='{"t": 1}', **REJECTED)
