"""A GPU whose figures a test sets, for tests of the loops that go by them."""

from msgspec.structs import replace

from headway.model import GpuFigures

LOST = "Xid 79, it has fallen off the bus"


class FakeGpu:
    """Tells `read`; a look reads `now` first."""

    def __init__(self) -> None:
        self.now = self.read = GpuFigures(uuid="GPU-aa01", memory_used=50, memory_total=100)
        self.settled = 0.0
        self.loads = 0

    def use(self, memory: int) -> None:
        self.now = self.read = replace(self.now, memory_used=memory)

    def lose(self, *, read: bool = True) -> None:
        """Be lost; with `read` that has been read already."""
        self.now = replace(self.now, lost=LOST)
        self.read = self.now if read else self.read

    def figures(self) -> GpuFigures | None:
        return self.read

    async def look(self) -> GpuFigures | None:
        self.read = self.now
        return self.read

    def loaded(self) -> None:
        self.loads += 1
