from msgspec.structs import replace

from headway.model import GpuFigures

LOST = "Xid 79, it has fallen off the bus"


class FakeGpu:
    """A GPU whose figures a test sets. `figures` returns `read`; `look` updates it from `now` first."""

    def __init__(self) -> None:
        self.now = self.read = GpuFigures(uuid="GPU-aa01", memory_used=50, memory_total=100)
        self.settled = 0.0
        self.loads = 0

    def use(self, memory: int) -> None:
        self.now = self.read = replace(self.now, memory_used=memory)

    def lose(self, *, read: bool = True) -> None:
        """Lose the GPU. With `read`, the loss has already been read."""
        self.now = replace(self.now, lost=LOST)
        self.read = self.now if read else self.read

    def figures(self) -> GpuFigures | None:
        return self.read

    async def look(self) -> GpuFigures | None:
        self.read = self.now
        return self.read

    def loaded(self) -> None:
        self.loads += 1
