"""`headway.serve` in a script in its own process, and in a thread of the process that sends the requests."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

import headway
from headway.errors import HeadwayError, SettingError, TargetError
from tests.client.asking import CLIENTS, asking
from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import ROOT

SCRIPT = """
import headway

def upper(inputs):
    return [text.upper() for text in inputs]

if __name__ == "__main__":
    headway.serve(upper, port=0, max_batch_size=4)
    print("served")
"""
VALUES = """
from typing import Any

def shaped(inputs: list[Any]) -> list[Any]:
    return [{"got": value} for value in inputs]
"""
UNGUARDED = SCRIPT.replace('if __name__ == "__main__":', "if True:")


def upper(inputs: list[str]) -> list[str]:
    return [text.upper() for text in inputs]


class Shouter:
    def __init__(self, end: str = "") -> None:
        self.end = end

    def __call__(self, inputs: list[str]) -> list[str]:
        return [text + self.end for text in inputs]


def broken(inputs: list[str]) -> list[str]:
    raise RuntimeError("broken")


def environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}, "PYTHONPATH": str(ROOT)}


def test_a_script_serves_until_a_signal_comes_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "app.py").write_text(SCRIPT)
    out = tmp_path / "out"
    with out.open("wb") as stream:
        command, quiet = [sys.executable, "scripts/app.py"], subprocess.DEVNULL
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=stream, stderr=quiet)
    try:
        wait_until(lambda: "Try it:" in out.read_text() or process.poll() is not None)
        address = re.search(r"public +(http://127\.0\.0\.1:\d+)", out.read_text())
        assert address, out.read_text()
        assert "batches  up to 4" in out.read_text()
        with headway.Client(address[1]) as client:
            assert client.infer("hello").output == "HELLO"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert out.read_text().endswith("served\n")
    finally:
        process.kill()
        process.wait()


def test_a_script_without_its_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(UNGUARDED)
    command = [sys.executable, "app.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "TargetError" in last and 'Put the call under: if __name__ == "__main__":' in last
    assert "served" not in ended.stdout


def test_a_service_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Workers can import the target though their working directory differs. A second service runs beside it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "shape.py").write_text(VALUES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path)
    shaped = importlib.import_module("package.shape").shaped
    threshold, reactions = gc.get_threshold(), signal.getsignal(signal.SIGTERM)
    caplog.set_level(logging.INFO)
    with (
        headway.serve(shaped, block=False, port=0) as first,
        headway.serve(functools.partial(Shouter, end="!"), block=False, port=0, host="0.0.0.0") as second,
        headway.Client(second.url) as other,
    ):
        assert second.url.startswith("http://127.0.0.1:")
        assert not first.wait(0)
        with pytest.raises(SettingError) as raised:
            headway.serve(upper, block=False, port=int(first.url.rpartition(":")[2]), admin_port=0)
        assert raised.value.setting == "port"
        for kind in CLIENTS:
            with asking(kind, first.url) as client:
                assert client.infer({"a": [1, None, "ü"]}).output == {"got": {"a": [1, None, "ü"]}}
                answers = client.infer_many([None, 2.5, "x", []])
                assert [answer.output["got"] for answer in answers] == [None, 2.5, "x", []]
                assert client.submit([1]).result().output == {"got": [1]}
        assert other.infer("Hello").output == "Hello!"
        first.stop()
        assert first.wait() and not first.running
        with pytest.raises(headway.client.Unreachable):
            headway.Client(first.url, retries=0).infer("a")
        assert other.infer("Hello").output == "Hello!"
    assert (gc.get_threshold(), signal.getsignal(signal.SIGTERM)) == (threshold, reactions)
    assert not structlog.is_configured() and logging.getLogger("headway").propagate
    with pytest.raises(TargetError, match=r"(?s)broken.*the warm-up batch.*RuntimeError: broken"):
        headway.serve(broken, block=False, port=0)
    assert "worker process ended" in caplog.text


@pytest.mark.parametrize(
    ("target", "settings", "told"),
    [
        (upper, {"max_batch_sise": 8}, "max_batch_sise = 8: there is no such setting. Did you mean max_batch_size?"),
        (upper, {"reload": True}, "reload = True: does not work with block=False"),
        ({}, {}, "target = {}: names no model. Give each model a name and a target"),
    ],
)
def test_settings_are_checked_as_the_commands_are(target: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises((SettingError, TargetError)) as raised:
        headway.serve(target, block=False, **settings)
    assert told in str(raised.value)


def test_a_service_that_blocks_needs_the_main_thread_without_a_loop() -> None:
    async def notebook() -> None:
        headway.serve(upper, port=0)

    with pytest.raises(HeadwayError, match="Use block=False"):
        asyncio.run(notebook())
