import msgspec
import pytest

from headway import errors
from headway.core import ledger_records
from headway.core.ledger_records import MINUTE, NAME_LENGTH, RefusalCounts, record_of, size_of
from headway.core.tensors import Tensor, TensorHead, pack
from headway.errors import CANCELLED, NOT_FOUND, RATE_LIMITED
from headway.model import BatchRun, DedupKind, Entry, Failure, LedgerRecord, Principal, Reply

TIERS = ("enterprise", "paid", "free")
CALLER = Principal("somebody", "acme", 0)
ENTRY = Entry("id-1", "m", "what is asked", 1, "acme", "g", 2.0, 4.0)
RAN = BatchRun("gpu-1", 8, 0.1, 5.0, "7")


def record(reply: Reply, *, caller: Principal = CALLER, entry: Entry = ENTRY, content: bool = False) -> LedgerRecord:
    return record_of(caller, entry, 0.25, reply, 1000.0, TIERS, content)


def test_of_an_answered_request_who_asked_when_and_where_it_ran() -> None:
    assert record(Reply("id-1", "acme", "WHAT", ran=RAN)) == LedgerRecord(
        id="id-1", user="somebody", tenant="acme", tier="paid", model="m", status="completed", created_at=999.75,
        completed_at=1000.0, latency_ms=250.0, batch_size=8, worker="gpu-1", version="7", error="",
        batch_id="gpu-1@5.000000", input=None, output=None,
    )  # fmt: skip


def test_of_one_that_never_ran_no_worker_and_the_code_that_the_client_read() -> None:
    found = record(Reply("id-1", "acme", None, Failure(errors.SHED, "full")))
    assert (found.status, found.error, found.batch_size, found.worker) == ("failed", errors.SHED, 0, "")
    found = record(Reply("id-1", "acme", None, Failure(errors.IDEMPOTENCY_MISUSE, "used")))
    assert found.error == errors.IDEMPOTENCY_CONFLICT


def test_who_had_anothers_answer_ran_nowhere_and_has_the_version_that_gave_it() -> None:
    found = record(Reply("id-1", "acme", "WHAT", ran=RAN, shared=DedupKind.SAME))
    assert (found.batch_size, found.worker, found.version, found.batch_id) == (0, "", "7", "")


def test_of_a_failed_run_its_version_and_of_none_the_one_that_it_waited_for() -> None:
    ran = record(Reply("id-1", "acme", None, Failure(errors.REJECTED_BY_MODEL, "no"), RAN))
    assert (ran.status, ran.version, ran.batch_id) == ("failed", "7", "gpu-1@5.000000")
    entry = msgspec.structs.replace(ENTRY, version="8")
    late = record(Reply("id-1", "acme", None, Failure(errors.DEADLINE_EXCEEDED, "late")), entry=entry)
    assert (late.version, late.batch_id) == ("8", "")


class TestContent:
    def test_is_kept_only_when_asked_for_and_of_a_failed_request_is_its_input(self) -> None:
        answered = Reply("id-1", "acme", "WHAT")
        assert (record(answered).input, record(answered).output) == (None, None)
        kept = record(answered, content=True)
        assert (kept.input, kept.output) == ("what is asked", "WHAT")
        kept = record(Reply("id-1", "acme", None, Failure(errors.SHED, "full")), content=True)
        assert (kept.input, kept.output) == ("what is asked", None)

    def test_that_no_database_takes_is_escaped(self) -> None:
        entry = Entry("id-1", "m", "a\0b\ud800c", 1, "acme", "g", 2.0, 4.0)
        kept = record(Reply("id-1", "acme", "\0é☃"), entry=entry, content=True)
        assert (kept.input, kept.output) == ("a\\x00b\\ud800c", "\\x00é☃")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("x" * NAME_LENGTH, "x" * NAME_LENGTH),
        ("x" * (NAME_LENGTH + 1), "x" * NAME_LENGTH),
        ("a\0b", "a\\x00b"),
        ("a\nb", "a\nb"),
    ],
)
def test_names_are_cut_and_escaped(name: str, kept: str) -> None:
    entry = Entry("id-1", name, "", 1, "acme", "g", 2.0, 4.0)
    found = record(Reply("id-1", "acme", "WHAT"), caller=Principal(name, name, 0), entry=entry)
    assert (found.user, found.tenant, found.model) == (kept, kept, kept)


def test_its_size_is_that_of_input_and_output() -> None:
    answered = Reply("id-1", "acme", "WHAT")
    assert size_of(record(answered)) == 0
    assert size_of(record(answered, content=True)) == len("what is asked") + len("WHAT")


def test_of_tensors_it_keeps_the_shapes_and_no_number() -> None:
    value = pack(
        [Tensor(TensorHead("x", "FP32", (2, 1)), b"numbers!"), Tensor(TensorHead("n", "BYTES", (2,)), bytes(8))]
    )
    found = record(Reply("id-1", "acme", value), entry=msgspec.structs.replace(ENTRY, input=value), content=True)
    assert found.input == found.output == "tensors: `x`, FP32 of shape [2, 1]; `n`, BYTES of shape [2]"


PLAIN = LedgerRecord(
    id="first", user="alice", tenant="acme", tier="paid", model="m", status="failed", created_at=10.0, completed_at=10.5,
    latency_ms=500.0, error=RATE_LIMITED, input="in", output="out",
)  # fmt: skip


def refused(**changes: object) -> LedgerRecord:
    return msgspec.structs.replace(PLAIN, **changes)


def test_the_first_has_a_record_of_its_own_and_the_next_ones_one_together() -> None:
    it = RefusalCounts()
    assert not it.count(refused(), 0.0)
    assert it.count(refused(id="second", created_at=20.0, completed_at=20.1), 1.0)
    assert it.count(refused(id="third", completed_at=30.0, latency_ms=900.0), MINUTE + 1.0)
    assert list(it.ended(MINUTE - 0.001)) == []
    [together] = it.ended(MINUTE)
    assert (together.id, together.requests, together.model) == ("second", 2, "m")
    assert (together.input, together.output) == (None, None)
    assert (together.created_at, together.completed_at, together.latency_ms) == (20.0, 30.0, 900.0)
    assert not it.count(refused(), MINUTE)
    assert list(it.ended()) == []


@pytest.mark.parametrize("other", [{"user": "bob"}, {"tenant": "globex"}, {"tier": "free"}, {"error": NOT_FOUND}])
def test_callers_tiers_and_codes_are_counted_apart(other: dict[str, str]) -> None:
    it = RefusalCounts()
    assert not it.count(refused(), 0.0)
    assert not it.count(refused(**other), 0.0)
    assert it.count(refused(model="another"), 0.0)


@pytest.mark.parametrize("ended", [{"error": ""}, {"error": CANCELLED}, {"batch_size": 3}])
def test_what_was_taken_in_is_not_counted(ended: dict[str, object]) -> None:
    it = RefusalCounts()
    assert not any(it.count(refused(**ended), 0.0) for _ in range(3))
    assert list(it.ended()) == []


def test_the_model_is_told_only_when_all_asked_the_same() -> None:
    it = RefusalCounts()
    for model in ("m", "m", "m", "other"):
        it.count(refused(model=model), 0.0)
    [together] = it.ended()
    assert (together.model, together.requests) == ("", 3)


def test_no_more_are_counted_at_a_time_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_records, "MOST_COUNTED", 2)
    it = RefusalCounts()
    for user in ("a", "b", "c"):
        assert [it.count(refused(user=user), 0.0) for _ in range(2)] == [False, True]
    assert [early.user for early in it.ended(0.0)] == ["a"]
    assert [rest.user for rest in it.ended()] == ["b", "c"]
