import errno
import io
import json
import re
import sys
from pathlib import Path

import pytest

from headway.simulator import day, engine, planner
from headway.simulator.scenario import POLICIES
from tests.cli.command import code_of

MODEL = ["--rate", "500", "--batch-ms", "20", "--max-batch-size", "32"]
SIMULATE = ["simulate", *MODEL, "--workers", "2", "--duration", "1"]
PLAN = ["plan", *MODEL]


@pytest.fixture
def short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEEDS", 2), ("SETTLING", 5.0), ("MEASURED", 5.0), ("MEASURED_REQUESTS", 500)):
        monkeypatch.setattr(planner, name, value)
    monkeypatch.setattr(planner, "RATE_STEPS", 1)


class TestSimulate:
    def test_simulate_prints_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of(SIMULATE) == 0
        out = capsys.readouterr().out
        for part in ("on 2 GPUs", "variation of gaps", "p95", "left because"):
            assert part in out

    def test_compares_all_policies(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of([*SIMULATE, "--compare", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [report["policy"] for report in found["reports"]] == list(POLICIES)
        assert len({report["total"]["requests"] for report in found["reports"]}) == 1
        assert found["scenario"]["seed"] == 0

    def test_takes_a_trace_and_a_mix(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = tmp_path / "trace.csv"
        trace.write_text("TIMESTAMP\n" + "\n".join(f"2026-01-01 00:00:{second:02}.5" for second in range(60)))
        assert code_of([*SIMULATE, "--trace", str(trace), "--mix", "usual", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["scenario"]["trace"] == 60
        assert found["reports"][0]["arrivals_cv"] < 0.01
        assert list(found["reports"][0]["tiers"]) == ["enterprise", "paid", "free"]

    def test_cuts_the_queue_into_shards(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--workers", "8", "--shards", "2", "--gateways", "3", "--gather-ms", "2"]
        assert code_of([*SIMULATE, *options, "--json"]) == 0
        batches = json.loads(capsys.readouterr().out)["reports"][0]["batches"]
        assert batches["shard_gap_cv"] < batches["gap_cv"]
        assert code_of([*SIMULATE, *options]) == 0
        assert "in a shard" in capsys.readouterr().out

    @pytest.mark.processes
    def test_simulate_draws_a_picture(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        picture = tmp_path / "run.svg"
        assert code_of([*SIMULATE, "--compare", "--promise", "50", "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"<?xml")

    def test_it_says_what_to_install(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert code_of([*SIMULATE, "--plot", "run.png"]) == 3
        assert "pip install 'matplotlib>=" in capsys.readouterr().err

    @pytest.mark.parametrize("path", ["run", "run.txt", "/no/such/folder/x.png", "{folder}/there.png"])
    def test_simulate_refuses_a_path_of_no_picture_before_it_runs(
        self, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "there.png").mkdir()
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setattr(engine, "simulate", None)
        assert code_of([*SIMULATE, "--plot", path.format(folder=tmp_path)]) == 3
        told = capsys.readouterr().err
        assert "--plot" in told and "matplotlib" not in told

    @pytest.mark.parametrize(
        ("option", "shown"),
        [
            (["--workers", "3"], "--workers = 3"),
            (["--duration", "30"], "--duration = 30.0"),
            (["--policy", "paced"], "--policy = 'paced'"),
            (["--kill", "3=1"], "--kill = '3=1'"),
            (["--plot", "x.png"], "--plot = 'x.png'"),
            (["--batch-times", "x"], "--batch-times = 'x'"),
        ],
    )
    def test_a_day_refuses_a_void_one(self, option: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of(["simulate", "--autoscale", *MODEL, *option]) == 3
        told = " ".join(capsys.readouterr().err.split())
        assert f"{shown}: has no effect on a day under the autoscaler. Leave it out, or leave out --autoscale." in told

    def test_a_day_shows_zeros_cost(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(day, "DAY", 1200)
        options = ["--rate", "0.001", "--scale-to-zero-after-s", "300", "--request-timeout-ms", "9000"]
        assert code_of(["simulate", "--autoscale", *MODEL, *options]) == 0
        told = capsys.readouterr().out
        assert "at zero  starts  held  503" in told
        assert re.search(r"plan, to zero +0\.2 +0\.55 .* 0\.2 h +1 +0 +1", told), told
        assert code_of(["simulate", "--autoscale", *MODEL, "--request-timeout-ms", "9000"]) == 3
        assert "has no effect on a day under the autoscaler" in capsys.readouterr().err

    def test_a_day_without_a_batch_time_says_what_is_missing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of(["simulate", "--autoscale"]) == 3
        told = capsys.readouterr().err
        assert "--batch-ms" in told and "None" not in told and "for example 100" in told

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            (["--policy", "pased"], ("--policy = 'pased'", "Use paced")),
            (["--rate", "0"], ("--rate = 0.0", "between")),
            (["--rate", "nan"], ("--rate = nan",)),
            (["--cold-start-s", "5"], ("--cold-start-s = 5.0: has no effect without --autoscale",)),
            (["--workers", "0"], ("--workers = 0",)),
            (["--batch-ms", "-5"], ("--batch-ms = -5",)),
            (["--max-batch-size", "0"], ("--max-batch-size = 0", "between 1 and 4096")),
            (["--warmup", "2"], ("--warmup = 2", "--duration")),
            (["--mix", "gold"], ("--mix = 'gold'", "enterprise=5")),
            (["--trace", "/no/such/file"], ("--trace = '/no/such/file'", "No such file")),
            (["--kill", "0.5"], ("--kill = '0.5'", "SECONDS=NUMBER")),
            (["--kill", "0.5=9"], ("--kill = 9", "between 1 and 2 workers")),
            (["--step", "0.5=x"], ("--step = '0.5=x'",)),
            (["--step", "0.7=5", "--step", "0.5=5"], ("--step", "not in order of time")),
            (["--poison", "2"], ("--poison = 2",)),
            (["--slow", "0"], ("--slow = 0",)),
            (["--gateways", "0"], ("--gateways = 0",)),
            (["--gather-ms", "-1"], ("--gather-ms = -1",)),
            (["--shards", "1000"], ("--shards = 1000", "between 1 and 256")),
            (["--plot", "/no/such/folder/x.png"], ("--plot", "cannot be written")),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_bad_setting_says_which_and_why(
        self, options: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert code_of([*SIMULATE, *options]) == 3
        err = capsys.readouterr().err
        assert all(part in err for part in parts), err

    @pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP\n5\n", "TIMESTAMP\n5\n4\n", "\xff\xfe"])
    def test_a_bad_trace_says_what_is_bad(self, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = tmp_path / "trace.csv"
        trace.write_bytes(text.encode("latin-1"))
        assert code_of([*SIMULATE, "--trace", str(trace)]) == 3
        assert "--trace" in capsys.readouterr().err


@pytest.mark.usefixtures("short_plans")
class TestPlan:
    def test_a_full_disk_is_one_line(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        class Full(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("sys.stdout", Full())
        assert code_of([*PLAN, "--p95", "100"]) == 1
        assert capsys.readouterr().err == "headway: the output cannot be written: No space left on device\n"

    def test_prints_the_number_of_gpus(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of([*PLAN, "--p95", "100", "--gpu-hour-cost", "2"]) == 0
        out = capsys.readouterr().out
        for part in ("1 GPU for 500 requests/s", "p95", "±", "headroom", "could not carry the load", "an hour"):
            assert part in out

    def test_plan_prints_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert code_of([*PLAN, "--p95", "30", "--p99", "40", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["gpus"] >= 2
        assert found["p95_ms"] <= 30
        assert found["one_less"]["gpus"] == found["gpus"] - 1

    def test_a_plan_says_other_days_may_be_burstier(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = tmp_path / "monday.csv"
        trace.write_text("\n".join(str(number * 0.01) for number in range(500)))
        assert code_of([*PLAN, "--p95", "100", "--trace", str(trace)]) == 0
        out = capsys.readouterr().out
        assert "monday.csv" in out
        assert "other days may be burstier" in out
