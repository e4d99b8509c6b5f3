import asyncio
from collections.abc import Callable, Sequence

from headway.core.values import shown
from headway.errors import BackendError, TargetError
from headway.model import CostLine, Entry, ItemResult, Principal, Signature, Value

ANYBODY = Principal("anonymous", "default", 0)


class FakeBackend:
    """A backend on virtual time: sleeps `seconds` per batch, then answers `input.upper()`.
    `script` is called for each batch and may return an error to raise instead. `starts` counts starts, which take
    `start_seconds`. `cost` is the reported cost of a batch."""

    def __init__(self, seconds: float = 0.1, script: Callable[[Sequence[Entry]], BackendError | None] | None = None):
        self.seconds = seconds
        self.script = script or (lambda entries: None)
        self.batches: list[list[str]] = []
        self.starts = 0
        self.start_seconds = 0.0
        self.stops = 0
        self.warm_up: Sequence[tuple[int, float]] = ()
        self.refuse_start = 0
        self.refusal = TargetError("does not load")
        self.busy = False
        self.cost: CostLine | None = None
        self.dead = asyncio.Event()

    @property
    def pid(self) -> int:
        return 4242

    @property
    def signature(self) -> Signature:
        return Signature(cost=self.cost)

    async def start(self) -> float:
        if self.refuse_start:
            self.refuse_start -= 1
            raise self.refusal
        await asyncio.sleep(self.start_seconds)
        self.starts += 1
        self.dead.clear()
        return self.seconds

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        assert not self.busy, "two batches at once"
        self.busy = True
        try:
            self.batches.append([shown(entry.input) for entry in entries])
            error = self.script(entries)
            await asyncio.sleep(self.seconds)
            if error is not None:
                raise error
            return [ItemResult(_answer(entry.input)) for entry in entries]
        finally:
            self.busy = False

    async def gone(self) -> None:
        await self.dead.wait()

    async def stop(self) -> None:
        self.stops += 1


def _answer(input: Value) -> Value:
    return input.upper() if isinstance(input, str) else input
