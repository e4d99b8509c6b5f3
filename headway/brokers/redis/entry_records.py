"""Single entries of a queue in the server: their state, and the kept outcomes of tasks."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from headway.brokers.redis import wire
from headway.brokers.redis.codes import Standing
from headway.brokers.redis.large_values import LargeValues
from headway.brokers.redis.steps import Steps
from headway.core import failures
from headway.model import EntryState, Reply, Value

_STATES = {Standing.AT_END: None, Standing.WAITING: EntryState.QUEUED, Standing.RUNNING: EntryState.PROCESSING}


class EntryRecords:
    """Records of one queue's entries. The `key` of an entry is `wire.key_of`."""

    def __init__(self, steps: Steps, values: LargeValues, prefix: str) -> None:
        self._steps, self._values, self._prefix = steps, values, prefix

    async def state(self, key: bytes) -> EntryState | None:
        """Return the state of an entry, or None if it has its outcome or is unknown."""
        return _STATES[await self._steps.call("stage", key)]

    async def outcome(self, key: bytes, again: bool = True) -> Reply | EntryState | None:
        """Return the outcome of a task, or its state if it has no outcome yet."""
        standing, *fields = await self._steps.call("recall", key)
        if not fields:
            return _STATES[standing]
        apart = wire.Apart()
        [reply] = wire.read_outcomes(dict(zip(fields[::2], fields[1::2], strict=True)), apart)
        if not apart:
            return reply
        name, length = apart[0]
        output = await self.output(name, length, reply.tenant)
        if output is not None:
            return replace(reply, output=output)
        # Either the outcome was just forgotten, or its output is lost. In the latter case the repeated call makes the server
        # forget the outcome too.
        if again:
            return await self.outcome(key, again=False)
        return replace(reply, failure=failures.lost_output())

    async def knows(self, key: bytes) -> bool:
        standing, *fields = await self._steps.call("recall", key)
        return bool(fields) or _STATES[standing] is not None

    async def output(
        self, name: str, length: int, tenant: str, wanted: Callable[[], bool] = lambda: True
    ) -> Value | None:
        """Read a tenant's output that is stored separately. Return None if it is gone or no longer `wanted`."""
        return await self._values.output_of(self._prefix, name, length, tenant, wanted)
