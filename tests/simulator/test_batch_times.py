"""Recorded run times of batches: what is drawn from them, and invalid files."""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.simulated import fit
from headway.cli.trial import batches_to_record
from headway.errors import SettingError
from headway.model import Signature
from headway.simulator import planner
from headway.simulator.batch_times import BatchTimes, RecordedBatch, read_batch_times
from headway.simulator.engine import simulate
from headway.simulator.planner import Goal, make_plan
from headway.simulator.report import describe
from headway.simulator.scenario import QueueRules, Scenario
from headway.simulator.traffic import read_weights
from tests.cli.command import code_of
from tests.simulator.test_numbers import p95

Formula = Callable[[Sequence[int]], float]
RNG = random.Random(3)
LENGTHS = [round(RNG.lognormvariate(5.0, 0.9)) + 1 for _ in range(400)]


def by_longest(weights: Sequence[int]) -> float:
    return 0.02 + 0.0002 * max(weights)


def padded(weights: Sequence[int]) -> float:
    """Inputs are padded to the longest in blocks of 64, and batches to 1, 2, 4, 8, … inputs."""
    return 0.01 + 1e-6 * (1 << (len(weights) - 1).bit_length()) * (-(-max(weights) // 64) * 64)


class Exact(BatchTimes):
    """Run times from a formula."""

    def __init__(self, formula: Formula) -> None:
        self.formula, self.largest, self.heaviest = formula, 64, max(LENGTHS)
        self.padded = BatchTimes(recorded(formula)).padded

    def __len__(self) -> int:
        return 1

    def draw(self, weights: Sequence[int], rng: Callable[[], float]) -> float:
        return self.formula(weights)


def recorded(formula: Formula, repeats: int = 3) -> list[RecordedBatch]:
    """Return the record of a target whose run times follow the formula."""
    texts = ["x" * length for length in LENGTHS]
    batches = batches_to_record(texts, 64, repeats, Signature())
    return [RecordedBatch(weights := list(map(len, batch)), formula(weights)) for batch in batches]


def scenario(times: BatchTimes) -> Scenario:
    return Scenario(
        rate=350.0, workers=2, max_batch=64, times=times, weights=tuple(LENGTHS), duration=20.0, warmup=3.0, seed=2
    )


def test_p95_is_what_the_model_would_give() -> None:
    truth, record = (p95(simulate(scenario(times))) for times in (Exact(padded), BatchTimes(recorded(padded))))
    assert record == pytest.approx(truth, rel=0.05)


def test_what_varies_by_chance_varies_as_much_when_drawn() -> None:
    noise = random.Random(5)
    times = BatchTimes(recorded(lambda weights: by_longest(weights) * noise.lognormvariate(-0.02, 0.2), repeats=10))
    drawn = [times.draw([200] * 64, noise.random) / by_longest([200] * 64) for _ in range(1000)]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.2)
    assert 0.05 < statistics.stdev(drawn) < 0.35
    assert times.error() > 0.05


def test_a_time_that_the_formula_tells_is_drawn_exactly() -> None:
    times = BatchTimes(recorded(by_longest, repeats=1))
    assert times.draw([900, 4, 30], RNG.random) == pytest.approx(by_longest([900]))
    assert times.error() == pytest.approx(0.0, abs=1e-6)
    assert times.mean(1, (100,), 0) == pytest.approx(by_longest([100]))
    assert times.mean(64, (100,), 250) == times.mean(2, (100,), 0)


def test_a_record_has_inputs_as_they_come_and_full_batches() -> None:
    batches = recorded(by_longest)
    weights = [weight for batch in batches for weight in batch.weights]
    assert statistics.fmean(weights) == pytest.approx(statistics.fmean(LENGTHS), rel=0.1)
    sizes = {len(batch.weights) for batch in batches}
    assert min(sizes) == 1 and max(sizes) == 64 and len(sizes) > 30
    assert sum(len(batch.weights) == 64 for batch in batches) >= len(batches) // 4
    assert all(batch == ["a"] for batch in list(batches_to_record(["a"], 1, 1, Signature())))


class TestFile:
    def write(self, path: Path, lines: Sequence[object]) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def test_a_file_is_read_as_written(self, tmp_path: Path) -> None:
        batches = recorded(by_longest, repeats=1)
        path = self.write(tmp_path / "times", [msgspec.to_builtins(batch) for batch in batches])
        weights = [weight for batch in batches for weight in batch.weights]
        assert len(read_batch_times(path)) == len(batches)
        assert sorted(read_batch_times(path).weights) == sorted(weights)
        assert read_weights(str(path)) == tuple(weights)

    @pytest.mark.parametrize(
        ("lines", "part"),
        [
            ([], "has 0 batches"),
            ([{"weights": [3], "seconds": 0.1}] * 3, "has 3 batches"),
            ([{"weights": [3], "seconds": 0.1}, {"weights": [], "seconds": 0.1}], "line 2 is not a recorded batch"),
            ([{"weights": [0], "seconds": 0.1}], "line 1"),
            ([{"weights": [1.5], "seconds": 0.1}], "line 1"),
            ([{"weights": [1], "seconds": 0}], "line 1"),
            ([{"weights": [1]}], "seconds"),
            (["text"], "line 1"),
        ],
        ids=str,
    )
    def test_another_file_is_refused(self, lines: list[object], part: str, tmp_path: Path) -> None:
        path = self.write(tmp_path / "times", lines)
        with pytest.raises(SettingError, match="--batch-times") as refused:
            read_batch_times(path)
        assert part in str(refused.value) and "--record" in str(refused.value)

    def test_no_file_and_octets_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingError, match="No such file"):
            read_batch_times(tmp_path / "none")
        (tmp_path / "octets").write_bytes(b"\xff\xfe\n")
        with pytest.raises(SettingError, match="line 1"):
            read_batch_times(tmp_path / "octets")


class TestScenario:
    TIMES = BatchTimes(recorded(by_longest, repeats=1))

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"max_batch": 65}, "--max-batch-size"),
            ({"weights": ()}, "--weights"),
            ({"weights": (10_000,)}, "no recorded input is heavier"),
            ({"alpha": 0.1}, "--batch-ms"),
            ({"jitter": 0.1}, "--jitter"),
        ],
    )
    def test_what_a_record_does_not_tell_is_refused(self, changes: dict[str, object], part: str) -> None:
        given: dict[str, object] = {"rate": 9.0, "workers": 1, "max_batch": 64, "weights": (9,), "times": self.TIMES}
        with pytest.raises(SettingError, match=part):
            Scenario(**{**given, **changes})  # type: ignore[arg-type]

    def test_capacity_is_that_of_recorded_full_batches(self) -> None:
        service = replace(scenario(self.TIMES), first_come=True)
        full = statistics.fmean(by_longest(RNG.choices(LENGTHS, k=64)) for _ in range(2000))
        assert service.capacity == pytest.approx(2 * 64 / (full + service.overhead), rel=0.05)
        assert describe(replace(service, weights=(5,)))["times"] == len(self.TIMES)


def test_commands_take_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, recorded(by_longest, repeats=1))))
    service = ["--batch-times", str(path), "--max-batch-size", "64", "--rate", "100"]
    assert code_of(["simulate", *service, "--workers", "2", "--duration", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["times"] == 72
    for command in (["simulate", "--workers", "2"], ["plan", "--p95", "500"]):
        assert code_of([*command, "--rate", "100"]) == 3
        assert "--batch-times FILE" in capsys.readouterr().err
    assert code_of(["simulate", *service, "--workers", "2", "--batch-ms", "10"]) == 3
    assert "--batch-times" in capsys.readouterr().err


MIXED = tuple([2_000] + [100] * 9)
"""Lengths of which nearly each full batch has a long one."""
ALPHA, BETA = 0.008, 1e-6
MODEL = ["--rate", "900", "--batch-ms", "8", "--beta-ms", "0.001", "--padded", "--lengths", "100-2000"]


def padding(rate: float) -> Scenario:
    return Scenario(
        rate=rate, workers=2, alpha=ALPHA, beta=BETA, max_batch=32, weights=MIXED, padded=True, warmup=4.0, duration=8.0,
        queue=QueueRules(queue_timeout=30.0, timeout=30.0, max_queue=100_000),
    )  # fmt: skip


def test_a_fleet_that_starts_with_more_than_first_come_carries_finds_out_that_the_model_pads() -> None:
    asked = padding(1_500.0)
    assert asked.capacity > 1_500.0 > replace(asked, first_come=True).capacity
    assert p95(simulate(asked)) < 0.2 * p95(simulate(replace(asked, first_come=True)))


def test_nobody_waits_longer_than_first_come() -> None:
    name, kind, load, share, drawn = fit.draw(11, 3, {})
    row = fit.compared((name, kind, load, share, replace(drawn, duration=drawn.warmup + 2_000 / drawn.rate)))
    assert row.worst <= 1.0, row


def test_a_plan_says_how_many_gpus_first_come_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEEDS", 1), ("MEASURED_REQUESTS", 2_000), ("RATE_STEPS", 1), ("RATE_SEEDS", 1)):
        monkeypatch.setattr(planner, name, value)
    plan = make_plan(Goal(scenario=padding(1_800.0), p95=0.2))
    assert plan.first_come is not None
    assert 1.5 * plan.gpus <= plan.first_come


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--padded"], ("--padded", "needs the lengths of inputs", "--lengths")),
        (["--lengths", "1-9"], ("--lengths = '1-9'", "for models that pad", "--padded")),
        (["--padded", "--lengths", "1-9", "--weights", "1-9"], ("--lengths = '1-9'", "Leave --weights out")),
        (["--padded", "--lengths", "/no/such"], ("--lengths = '/no/such'", "No such file")),
    ],
    ids=" ".join,
)
def test_bad_lengths_are_told(options: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["simulate", "--rate", "10", "--workers", "1", "--batch-ms", "8", *options]) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert all(part in err for part in parts), err


def test_simulate_takes_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["simulate", *MODEL, "--workers", "2", "--duration", "2"]) == 0
    assert "on 2 GPUs" in capsys.readouterr().out
