"""The examples that stand in for a GPU and for a remote API, served as a user would."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headway.backends.http import HttpBackend
from headway.backends.process.backend import ProcessBackend
from headway.config.target import FileTarget, RemoteTarget
from headway.dialects.table import reach
from headway.errors import BatchRaised, RemoteRefused
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.recorder import Recorder

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = 30.0


@pytest.mark.processes
async def test_the_emulated_gpu_enforces_the_rules_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_MS", "1")
    monkeypatch.setenv("EMULATED_MAX", "3")
    target = FileTarget(EXAMPLES / "emulated_gpu.py", "EmulatedGPU")
    backend = ProcessBackend(target, worker="cpu-0", device="cpu", start_timeout=LONG, log=Recorder())
    assert await backend.start() >= 0.001
    try:
        assert await backend.run(batch("a", "b", "c"), LONG) == [ItemResult("A"), ItemResult("B"), ItemResult("C")]
        with pytest.raises(BatchRaised, match="a batch of 4; this GPU takes 1 to 3"):
            await backend.run(batch("a", "b", "c", "d"), LONG)
    finally:
        await backend.stop()


@asynccontextmanager
async def remote_api(*options: str) -> AsyncIterator[RemoteTarget]:
    program = [sys.executable, str(EXAMPLES / "remote_api.py"), "--port", "0", *options]
    process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if b"Running on " in line:
                yield RemoteTarget(line.split(b"Running on ")[1].split()[0].decode() + "/batch")
                break
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.processes
async def test_the_remote_api_takes_both_formats_and_refuses_too_many() -> None:
    async with remote_api("--ms", "1", "--max", "2") as target:
        for format_ in ("list", "inputs"):
            backend = HttpBackend(target, remote=reach(target.url, format_), start_timeout=LONG)
            await backend.start()
            try:
                assert await backend.run(batch("a", "b"), LONG) == [ItemResult("A"), ItemResult("B")]
                with pytest.raises(RemoteRefused, match="HTTP 422"):
                    await backend.run(batch("a", "b", "c"), LONG)
            finally:
                await backend.stop()
