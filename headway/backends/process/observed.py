"""Backend of a target under test, which notes the inputs of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from headway.backends.process.backend import ProcessBackend, Spawn
from headway.backends.process.child_process import ChildProcess, Log
from headway.backends.process.group_guard import GroupGuard
from headway.backends.process.thread_child import ThreadChild
from headway.config.target import FileTarget, ModuleTarget, ObservedTarget
from headway.core.weight_estimate import WeightEstimate
from headway.model import Entry, ItemResult


class ObservedBackend(ProcessBackend):
    """Backend that notes each batch, and runs it in a child process or in a thread of this one.

    Arguments:
        target: target; what is no module's and no file's runs in a thread.
        worker, device, start_timeout, log, guard, weights: see ProcessBackend.
    """

    def __init__(
        self,
        target: ObservedTarget,
        worker: str,
        device: str,
        start_timeout: float,
        log: Log,
        guard: GroupGuard | None,
        weights: WeightEstimate | None = None,
    ) -> None:
        subject = target.subject
        if isinstance(subject, ModuleTarget | FileTarget):
            spec: ModuleTarget | FileTarget = subject
            spawn: Spawn = ChildProcess
        else:
            spec, spawn = ModuleTarget("", str(target)), partial(ThreadChild, subject, str(target))
        super().__init__(
            spec,
            worker=worker,
            device=device,
            start_timeout=start_timeout,
            log=log,
            guard=guard,
            weights=weights,
            spawn=spawn,
        )
        self._batches = target.batches

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Note a batch, unless it is a probe, and run it."""
        if entries[0].gateway:
            self._batches.append([_built(entry.input) for entry in entries])
        return await super().run(entries, timeout)


def _built(value: Any) -> Any:
    """Input in Python's own form; what is no text travels as the text of JSON."""
    return msgspec.json.decode(value) if isinstance(value, bytes) else value
