"""The example remote API, served the way a user would serve it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headway.backends.http import HttpBackend
from headway.config.target import RemoteTarget
from headway.dialects.table import reach
from headway.errors import RemoteRefused
from headway.model import ItemResult
from tests.backends.entries import batch
from tests.backends.worker_process import LONG

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.processes


async def test_the_remote_api_takes_both_formats_and_refuses_too_many() -> None:
    program = [sys.executable, str(EXAMPLES / "remote_api.py"), "--port", "0", "--ms", "1", "--max", "2"]
    process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await anext(line async for line in process.stdout if b"Running on " in line)
        target = RemoteTarget(line.split(b"Running on ")[1].split()[0].decode() + "/batch")
        for format_ in ("list", "inputs"):
            backend = HttpBackend(target, remote=reach(target.url, format_), start_timeout=LONG)
            await backend.start()
            assert await backend.run(batch("a", "b"), LONG) == [ItemResult("A"), ItemResult("B")]
            with pytest.raises(RemoteRefused, match="HTTP 422"):
                await backend.run(batch("a", "b", "c"), LONG)
            await backend.stop()
    finally:
        process.kill()
        await process.communicate()
