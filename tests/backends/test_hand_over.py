"""Outputs on their way from the child: no part of the run of their batch, but not without a bound."""

from collections.abc import Mapping, Sequence

import pytest

from headway.backends.process.backend import HAND_OVER_RATE, HAND_OVER_SECONDS
from headway.backends.process.child_process import Child, Log
from headway.backends.process.frames import Computed, Outputs, Ready
from headway.backends.process.group_guard import GroupGuard
from headway.errors import BatchTimeout
from headway.model import ItemResult, ValueKind
from tests.backends.entries import batch
from tests.backends.recorder import Recorder
from tests.backends.worker_process import FAULTS, build
from tests.virtual_time import Clock, run

SIZE = 32 << 20


class SlowChild(Child):
    """Child that says after `computes` seconds that it has the outputs, and hands them over `hands` seconds later."""

    computes, hands = 0.5, 0.0

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        worker: str,
        log: Log,
        guard: GroupGuard | None = None,
        arena_bytes: int = 0,
    ) -> None:
        super().__init__(worker)
        self.pid = 1
        self._number = 0

    def catch_up(self) -> None:
        pass

    def kill(self, verdict: str = "") -> None:
        self.doomed, self.cause = True, verdict
        self.ended.set()

    hang_up = kill

    def resident_bytes(self) -> int:
        return 0

    def _send(self, content: bytes) -> None:
        if self._number == 0:
            self._loop.call_soon(self._hear, Ready((), ""))
        else:
            self._loop.call_later(self.computes, self._hear, Computed(SIZE))
            told = Outputs(self._number, ValueKind.TEXT, ["x"], {})
            self._loop.call_later(self.computes + self.hands, self._hear, told)
        self._number += 1


@pytest.mark.parametrize(
    ("computes", "hands", "late"),
    [
        (0.5, 2.0, ""),
        (0.5, HAND_OVER_SECONDS + SIZE / HAND_OVER_RATE, ""),
        (0.5, 2 * HAND_OVER_SECONDS + SIZE / HAND_OVER_RATE, f"did not hand over its outputs of {SIZE} bytes"),
        (1.5, 0.0, "took longer than the GPU deadline of 1000 ms"),
    ],
)
def test_outputs_that_were_computed_in_time_are_waited_for(computes: float, hands: float, late: str) -> None:
    async def main(clock: Clock) -> None:
        backend = build(FAULTS, Recorder(), spawn=type("Slow", (SlowChild,), {"computes": computes, "hands": hands}))
        await backend.start()
        if late:
            with pytest.raises(BatchTimeout, match=late):
                await backend.run(batch("a"), 1.0)
        else:
            assert await backend.run(batch("a"), 1.0) == [ItemResult("x")]

    run(main)
