"""`headway.testing`: a test gets from a target what a service's client would."""

from __future__ import annotations

import asyncio
import base64
import functools
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.client import BadRequest, ModelFailed, RejectedByModel
from headway.errors import SettingError, TargetError
from headway.testing import batched


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Model:
    def __init__(self, end: str = "") -> None:
        self.end = end
        self.device = "none"

    def setup(self, device: str) -> None:
        self.device = device

    def __call__(self, inputs: list[str]) -> list[str]:
        return [f"{text}{self.end} {self.device}" for text in inputs]


async def slowly(inputs: list[str]) -> list[str]:
    await asyncio.sleep(0)
    return upper(inputs)


def cut(inputs: list[str], parameters: list[dict[str, Any]]) -> list[str]:
    return [text[: given.get("length", 1)] for text, given in zip(inputs, parameters, strict=True)]


def raising(inputs: list[str]) -> list[str]:
    if "bad" in inputs:
        raise ValueError("a bad one")
    return inputs


def test_inputs_that_come_together_make_full_batches() -> None:
    with batched(upper, max_batch_size=8) as run:
        assert run("a") == "A"
        assert run.many(f"n{number}" for number in range(20)) == [f"N{number}" for number in range(20)]
        assert [len(batch) for batch in run.batches] == [1, 8, 8, 4]
        assert run.batches[1] == [f"n{number}" for number in range(8)]
        assert run.many([]) == []


@pytest.mark.parametrize(
    ("target", "output"),
    [
        (upper, "AB"),
        (lambda inputs: [text * 2 for text in inputs], "abab"),
        (functools.partial(upper), "AB"),
        (Model, "ab cpu"),
        (Model("!"), "ab! none"),
        (functools.partial(Model, end="?"), "ab? cpu"),
        (functools.partial(Model, "?"), "ab? cpu"),
        (slowly, "AB"),
        (cut, "a"),
    ],
)
def test_whatever_can_be_called_is_a_target(target: Any, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with batched(target) as run:
        assert run("ab") == output


def lengths(inputs: list[dict[str, Any]]) -> list[Any]:
    return [[len(one["text"]), one.get("more")] for one in inputs]


def backwards(inputs: list[bytes]) -> list[bytes]:
    return [octets[::-1] for octets in inputs]


def test_values_are_what_the_target_says_that_they_are() -> None:
    with batched(lengths, max_batch_size=2) as run:
        inputs = [{"text": "ab", "more": None}, {"text": "ü", "more": [1.5]}, {"text": ""}]
        assert run.many(inputs) == [[2, None], [1, [1.5]], [0, None]]
        assert run.batches == [inputs[:2], inputs[2:]]
        with pytest.raises(RejectedByModel):
            run("text")
    with batched(backwards) as run:
        assert base64.b64decode(run(base64.b64encode(b"abc").decode())) == b"cba"
        with pytest.raises(TypeError, match="base64"):
            run(b"abc")


def test_the_culprit_of_a_batch_is_found_and_the_others_are_answered() -> None:
    with batched(raising, max_batch_size=4) as run:
        first, second, culprit, last = run.many(["a", "b", "bad", "c"], return_errors=True)
        assert (first, second, last) == ("a", "b", "c")
        assert isinstance(culprit, RejectedByModel) and culprit.message == "ValueError: a bad one"
        assert run.batches[0] == ["a", "b", "bad", "c"] and ["bad"] in run.batches
        with pytest.raises(RejectedByModel):
            run.many(["a", "bad"])


def test_inputs_outputs_and_parameters_are_checked_and_passed_as_in_service() -> None:
    with batched(cut) as run:
        assert run("abcd", {"length": 3}) == "abc"
        assert run.many(["abcd", "efgh"], {"length": 2}) == ["ab", "ef"]
    with batched(lambda inputs: inputs if inputs == ["warm-up"] else []) as run:
        with pytest.raises(BadRequest, match=r"U\+0000"):
            run("\0")
        assert run.batches == []
        with pytest.raises(ModelFailed) as raised:
            run("a")
    assert "the target returned 0 outputs for 1 inputs" in raised.value.message


def test_a_hanging_batch_meets_its_deadline_and_another_thread_takes_over() -> None:
    release = threading.Event()

    def hang(inputs: list[str]) -> list[str]:
        if "hang" in inputs:
            release.wait(30.0)
        return inputs

    try:
        with batched(hang, gpu_timeout_ms=500) as run:
            with pytest.raises(RejectedByModel):
                run("hang")
            assert run("a") == "a"
    finally:
        release.set()


@pytest.mark.parametrize(
    ("target", "how", "part"),
    [
        (lambda inputs: 1 / 0, {}, "the warm-up batch ['warm-up'] failed: ZeroDivisionError"),
        (lambda: None, {}, "its signature is ()"),
        (3, {}, "target int: it cannot be called"),
        (lambda inputs: inputs, {"process": True}, "has no name by which workers could import it"),
        ("http://127.0.0.1:1/", {}, "it is a remote API"),
        ("nowhere.py:f", {}, "there is no file nowhere.py"),
    ],
)
def test_a_target_that_cannot_be_served_says_why(target: Any, how: dict[str, Any], part: str) -> None:
    with pytest.raises(TargetError) as raised, batched(target, **how):
        raise AssertionError("it was up")
    assert part in str(raised.value)
    assert len(raised.traceback) <= 3 or "warm-up" not in part, "the frames of the service are left out"
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(("name", "value"), [("max_batch_size", 0), ("maxbatch", 1), ("queue_timeout_ms", "x")])
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(SettingError) as raised:
        batched(upper, **{name: value})
    assert raised.value.setting == name


def test_only_arguments_count_and_nothing_is_taken_or_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = threading.active_count()
    monkeypatch.setenv("HEADWAY_MAX_BATCH_SIZE", "nonsense")
    monkeypatch.chdir(tmp_path)
    Path("headway.toml").write_text("nonsense = 1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with batched(upper, port=port, admin_port=0) as run, batched(slowly, port=0, admin_port=port) as other:
            assert (run("a"), other("b")) == ("A", "B")
            monkeypatch.setattr(f"{__name__}.upper", lambda inputs: ["replaced"] * len(inputs))
            assert other("c") == "replaced", "a test can replace what its target uses"
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="has ended"):
        run("a")


@pytest.mark.processes
def test_a_worker_process_runs_what_it_imports() -> None:
    with batched(functools.partial(Model, end="!"), process=True, devices="cpu", max_batch_size=2) as run:
        assert run.many(["a", "b", "c"]) == ["a! cpu", "b! cpu", "c! cpu"]
        assert [len(batch) for batch in run.batches] == [2, 1]
    with batched("tests.targets.faults:answer") as run, pytest.raises(RejectedByModel):
        run("exception")


UNGUARDED = """
from headway.testing import batched

def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]

with batched(upper, process=True) as run:
    print(run("a"))
"""


@pytest.mark.processes
def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    [*_, last] = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert "headway.testing.batched was called in a worker process" in last
    assert 'Put the call under: if __name__ == "__main__":' in last
