"""What a client may read of a crash: how it ended, never what the worker wrote, which may be about others."""

from __future__ import annotations

import asyncio

import pytest

from headway.backends.process import ProcessBackend
from headway.errors import WorkerCrashed
from headway.target import ModuleTarget
from tests.backends.entries import batch
from tests.backends.recorder import Recorder


def test_a_crash_is_shown_without_last_words() -> None:
    async def main() -> None:
        target = ModuleTarget("tests.targets.faults", "answer")
        backend = ProcessBackend(target, worker="gpu-0", device="cpu", start_timeout=30.0, log=Recorder())
        await backend.start()
        try:
            with pytest.raises(WorkerCrashed, match="out of") as caught:
                await backend.run(batch("last-words"), 30.0)
        finally:
            await backend.stop()
        assert caught.value.shown == "worker gpu-0: its process ended with exit code 9"

    asyncio.run(main())
