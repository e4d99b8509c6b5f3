"""Text of a failed run that a client may read: the end of the run and the error of the client's own input.

It names no worker, and quotes nothing that the worker wrote, which may be about others.
"""

from __future__ import annotations

import asyncio

import pytest

from headway.backends.process.backend import ProcessBackend
from headway.config.target import ModuleTarget
from headway.errors import BackendError, BatchRaised, BatchTimeout, WorkerCrashed
from tests.backends.entries import batch
from tests.backends.recorder import Recorder

pytestmark = pytest.mark.processes


def fails_with(word: str, kind: type[BackendError], timeout: float) -> BackendError:
    """Error of a batch of this word."""

    async def main() -> BackendError:
        target = ModuleTarget("tests.targets.faults", "answer")
        backend = ProcessBackend(target, worker="host-7/gpu-0", device="cpu", start_timeout=60.0, log=Recorder())
        await backend.start()
        try:
            with pytest.raises(kind) as caught:
                await backend.run(batch(word), timeout)
        finally:
            await backend.stop()
        return caught.value

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("word", "kind", "timeout", "told", "shown"),
    [
        ("last-words", WorkerCrashed, 60.0, "out of", "the worker's process ended with exit code 9"),
        ("hang", BatchTimeout, 0.1, "it was killed", "the model took longer than the GPU deadline of 100 ms"),
        ("forge", WorkerCrashed, 60.0, "", "the worker's process answered something else than it was asked"),
        ("raise", BatchRaised, 60.0, "what is", "ValueError: what is\nthis"),
    ],
)
def test_a_client_reads_how_its_run_ended(
    word: str, kind: type[BackendError], timeout: float, told: str, shown: str
) -> None:
    error = fails_with(word, kind, timeout)
    assert error.shown == shown
    assert told in str(error)
    assert ("host-7/gpu-0" in str(error)) == (kind is not BatchRaised)
