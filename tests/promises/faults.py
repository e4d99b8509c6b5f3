"""What each fault may cost. A promise that no cost excuses must hold in spite of the fault.

A fault never excuses an answer that belongs to another request or another tenant.
"""

from dataclasses import dataclass

REDO_SECONDS = 5.0
"""Seconds after a broker returns within which gateways have resubmitted what they hold."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fault may cost, with an explanation. If it `loses` acknowledged state, a task may become unknown (404) or
    pending again, a key or kept answer may be forgotten, and a deleted task may reappear if a gateway still held it. If
    it `reruns`, an input that ran may run again, even under an idempotency key."""

    loses: bool
    reruns: bool
    says: str


COSTS = {
    "redis stalled": Cost(False, False, "all is as before once it goes on; stalls are shorter than a lease"),
    "redis paused": Cost(False, True, "a lease may end before the worker is heard again"),
    "redis killed, durable": Cost(False, True, "all it acknowledged is on disk; leases may end meanwhile"),
    "redis killed, memory only": Cost(True, True, "it is empty when it is back; gateways offer again what they hold"),
    "redis killed, synced each second": Cost(True, True, "what it acknowledged in the last seconds may be lost"),
    "redis emptied": Cost(True, True, "as above, without an interruption"),
    "service killed": Cost(True, True, "the broker in memory ends with its process"),
    "service ended": Cost(True, True, "tasks and keys of the broker in memory end with its process"),
    "service paused": Cost(False, True, "a lease may end before its own worker is heard again"),
    "gateway killed": Cost(False, False, "its clients are cut off; what they asked may run, or not"),
    "gateway paused": Cost(False, False, "its clients wait"),
    "gateway ended": Cost(False, False, "it answers what it holds first"),
    "worker killed": Cost(False, True, "its batch runs again when the lease ends"),
    "worker paused": Cost(False, True, "its batch may run elsewhere when the lease ends, and its own go on"),
    "worker ended": Cost(False, False, "it ends its batch first"),
    "gpu killed": Cost(False, True, "its batch runs again"),
    "gpu paused": Cost(False, True, "it may be killed at the GPU deadline, or its lease end"),
    "worker drained": Cost(False, False, "it ends its batch, and claims nothing until it is undrained"),
    "service drained": Cost(False, False, "as above; what its process loses is lost with it"),
    "controller killed": Cost(False, False, "requests do not notice"),
    "controller paused": Cost(False, False, "requests do not notice"),
    "controller ended": Cost(False, False, "requests do not notice"),
    "ledger killed": Cost(False, False, "rows wait in their gateways until it is back"),
    "ledger paused": Cost(False, False, "as above"),
    "connections cut": Cost(False, True, "calls are repeated; a worker that is cut off may lose its lease"),
    "connections slow": Cost(False, True, "as above"),
}
"""Costs by name of the fault."""


@dataclass(slots=True)
class Fault:
    """A fault (one of COSTS), its time span, which may still be open, and the name of the process."""

    what: str
    began: float
    ended: float | None = None
    whom: str = ""

    @property
    def cost(self) -> Cost:
        return COSTS[self.what]


@dataclass(slots=True)
class Drained(Fault):
    """A drain of a process, or of one of its workers, by an operator. Not a fault, but code for faults must handle it.

    `pid` is the process of the one worker's function, or 0 if all are drained. `told` is when all drained workers had
    reported it and ran nothing, `undrained` is when undraining was ordered, and `back` is when all were healthy again
    or gone. None means not yet, or not in time.
    """

    pid: int = 0
    told: float | None = None
    undrained: float | None = None
    back: float | None = None
