"""`headway check`, and start-up errors of `headway serve`, in real processes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.command import code_of, run
from tests.client.scripted import Asked, Step, scripted

pytestmark = pytest.mark.processes

PATIENT = {"HEADWAY_GPU_TIMEOUT_MS": "30000"}
"""A batch may take long if other tests keep the machine busy."""
TARGETS = """
def upper(inputs):
    return [text.upper() for text in inputs]

def short(inputs):
    return inputs[1:] if len(inputs) > 2 else inputs

def words(text):
    return 2 * len(text.split())

def echo(inputs, parameters):
    return [f"{text} {sorted(given)}" for text, given in zip(inputs, parameters)]
"""


def test_the_text_of_an_exception_steers_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(inputs):\n    raise ValueError('nul \\0, line\\n, \\x1b[31m')\n")
    done = run(["check", "m.py:f"], tmp_path, **PATIENT)
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert last.startswith("headway: ")
    assert r"ValueError: nul \x00, line\n, \x1b[31m" in last


def test_a_good_target_is_fit(tmp_path: Path) -> None:
    (tmp_path / "targets.py").write_text(TARGETS)
    done = run(["check", "targets.py:upper", "--max-batch-size", "8"], tmp_path, **PATIENT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("targets.py:upper: warm-up batch in ")
    assert [line.split()[0] for line in lines[3:7]] == ["1", "2", "4", "8"]
    assert lines[8].split() == ["INPUT", "ANSWER"]
    assert lines[9].split() == ["headway", "check", "0", "HEADWAY", "CHECK", "0"]
    assert any(line.startswith("ℓ(n) = α + βn with α = ") for line in lines)
    assert any("--gpu-timeout-ms 30000: fits" in line for line in lines)
    assert "takes 0 ms" not in done.stdout
    assert lines[-1] == "fit to serve"


def test_a_target_that_breaks_the_rules_is_not_fit(tmp_path: Path) -> None:
    (tmp_path / "targets.py").write_text(TARGETS)
    done = run(["check", "targets.py:short", "--max-batch-size", "4", "--json"], tmp_path, **PATIENT)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert any("a batch of 4 failed: " in fault for fault in found["faults"]), found
    assert found["advice"] == [], "no rates of batches that did not run"


def test_inputs_and_parameters_reach_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "targets.py").write_text(TARGETS)
    arguments = ["check", "targets:echo", "--max-batch-size", "2", "--parameters", '{"top": 1}', "--json"]
    done = run([*arguments, "--input", "a", "--input", "b"], tmp_path, **PATIENT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["notes"] == []
    assert told["answers"] == [{"input": "a", "output": "a ['top']"}, {"input": "b", "output": "b ['top']"}]
    assert code_of(["check", "targets:echo", "--parameters", "[1]"]) == 3
    assert capsys.readouterr().err.startswith("headway: --parameters = '[1]': is not a JSON object")


PADDING = """
import time

def padding(inputs: list[str]) -> list[str]:
    with open("calls", "a") as file:
        print(len(inputs), file=file)
    time.sleep(2e-5 * len(inputs) * max(map(len, inputs)))
    return [text.upper() for text in inputs]
"""


def test_parameters_of_a_call_are_told(tmp_path: Path) -> None:
    target = "def same(inputs, parameters):\n    return inputs\n\nsame.together = ('top', 'seed')\n"
    (tmp_path / "targets.py").write_text(target)
    done = run(["check", "targets:same", "--max-batch-size", "2"], tmp_path, **PATIENT)
    assert "together: a call has one value of seed, top; requests with different values" in done.stdout, done.stderr


def test_a_record_of_batches_is_one_that_simulations_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "targets.py").write_text(TARGETS)
    (tmp_path / "inputs.txt").write_text("short\n\na somewhat longer text\n")
    check = ["check", "targets.py:upper", "--max-batch-size", "4", "--repeats", "1"]
    weighed = ["--inputs", "inputs.txt", "--record", "times.jsonl", "--weight", "words"]
    done = run([*check, *weighed], tmp_path, **PATIENT)
    assert done.returncode == 0, done.stderr
    assert "recorded: 72 batches" in done.stdout and "not your inputs" not in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert {weight for line in lines for weight in line["weights"]} == {2, 8}
    service = ["--batch-times", "times.jsonl", "--max-batch-size", "4", "--rate", "50", "--workers", "1"]
    assert code_of(["simulate", *service, "--duration", "1"]) == 0
    for option, value in (("--record", "none/times"), ("--inputs", "none")):
        assert code_of([*check, option, value]) == 3
        assert capsys.readouterr().err.startswith(f"headway: {option} = ")


def test_check_says_that_the_model_pads_and_runs_each_batch_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "targets.py").write_text(PADDING)
    (tmp_path / "inputs.txt").write_text("".join("x" * (10 + 50 * number) + "\n" for number in range(20)))
    check = ["check", "targets.py:padding", "--max-batch-size", "8", "--repeats", "1", "--inputs", "inputs.txt"]
    says = "a call takes α + β · number × longest: the model pads; mean error of forecasts: "
    for _ in range(4):  # The times are real, and one stall of the machine distorts the fit of 72 batches.
        (tmp_path / "calls").unlink(missing_ok=True)
        done = run([*check, "--record", "times.jsonl"], tmp_path, **PATIENT)
        assert done.returncode == 0, done.stderr
        if says in done.stdout:
            break
    assert says in done.stdout
    assert "--padded --lengths times.jsonl" in done.stdout
    assert " by length, " in done.stdout and "by weight" not in done.stdout, "nobody gave a weight"
    assert done.stdout.count("--beta-ms") == 1, "a model that pads has one slope"
    calls = list(map(int, (tmp_path / "calls").read_text().split()))
    recorded = [len(json.loads(line)["weights"]) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert calls[-len(recorded) :] == recorded


def test_what_inputs_weigh_by_a_function_is_shown(tmp_path: Path) -> None:
    (tmp_path / "targets.py").write_text(TARGETS)
    weighed = ["--max-batch-size", "4", "--weight", "words", "--max-batch-weight", "10", "--input", "one two"]
    done = run(["check", "targets.py:upper", *weighed], tmp_path, **PATIENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  --weight words: 3.9" in done.stdout  # The warm-up input is one word.
    assert "  --max-batch-weight 10: 2 of these inputs a batch" in done.stdout


@pytest.mark.parametrize(
    "command", [["check"], ["serve", "--port", "0", "--admin-port", "0"]], ids=lambda words: words[0]
)
def test_a_target_that_cannot_be_loaded_is_exit_code_4(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "targets.py").write_text(TARGETS)
    done = run([*command, "targets.py:uper"], tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    message = done.stderr.splitlines()[-1]
    assert message.startswith("headway: target targets.py:uper: ")
    assert "upper" in message


def test_a_remote_api_is_checked_too(tmp_path: Path) -> None:
    calls = Counter[bytes]()

    def answer(asked: Asked) -> Step:
        if not isinstance(asked.json, dict) or "inputs" not in asked.json:
            return 400, {}, b'{"detail": "say what"}'
        calls[asked.body] += 1
        if calls[asked.body] == 1:
            return 503, {}, b"{}"
        return 200, {}, json.dumps({"outputs": [text.upper() for text in asked.json["inputs"]]}).encode()

    with scripted(answer) as service:
        url = f"{service.url}/batch"
        auto = run(["check", url, "--max-batch-size", "4"], tmp_path, **PATIENT)
        done = run(["check", url, "--max-batch-size", "4", "--remote-format", "inputs"], tmp_path, **PATIENT)
    assert auto.returncode == 4
    assert "It does respond with --remote-format inputs." in auto.stderr, "the format is recognised"
    assert done.returncode == 0, done.stderr
    assert "calls were repeated because the API failed; the times include this" in done.stdout
    assert done.stdout.endswith("fit to serve\n")
