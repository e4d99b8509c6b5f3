"""Log of failed batches that reports each bad input only once.

The search for the input that makes a batch fail causes further failures. Two of them are logged as warnings: the first one,
with its traceback, and the one where the input ran alone, with its request id. The others are logged at debug level."""

from __future__ import annotations

from headway.core.trace_context import trace_field
from headway.errors import TargetError
from headway.model import BatchFailure, Cause, Lease
from headway.runtime.logger import get_logger

log = get_logger(__name__)

REMEMBERED = 10_000  # Upper bound on remembered entries.


class FailureLog:
    """Log of the failed batches of one process, whose slots search together for bad inputs."""

    def __init__(self, gpu_timeout: float) -> None:
        self._gpu_timeout = gpu_timeout
        # Last logged failure of each entry, by tenant and id: its cause, and True if the entry ran alone.
        self._logged: dict[tuple[str, str], tuple[Cause, bool]] = {}
        self._logged_start = ""

    def not_started(self, worker: str, error: TargetError) -> None:
        """Log an exception that user code raised when a worker started. Logged once, not for each worker and attempt."""
        if error.trace and error.trace != self._logged_start:
            self._logged_start = error.trace
            log.error("the target raised while it started", worker=worker, error=str(error), exception=error.trace)

    def failed(self, worker: str, lease: Lease, failure: BatchFailure, trace: str = "") -> None:
        """Log a failed batch. `trace` is the traceback if user code raised an exception."""
        alone = len(lease.entries) == 1
        story = (failure.cause, alone)
        known = [self._logged.get((entry.tenant, entry.id)) for entry in lease.entries]
        again = all(before is not None and before[0] is story[0] and before[1] >= alone for before in known)
        fields: dict[str, object] = {"cause": failure.cause.value, "error": failure.message, "size": len(lease.entries)}
        fields |= {"version": lease.slot.runs.version, "batch_id": lease.batch_id}
        if alone:
            fields["request_id"] = f"req_{lease.entries[0].id}"
        fields |= trace_field(next((entry.trace for entry in lease.entries if entry.trace), b""))
        if failure.cause is Cause.TIMEOUT:
            hint = f"raise --gpu-timeout-ms ({self._gpu_timeout * 1000:g}) if the model needs longer"
            fields["hint"] = hint if alone else f"{hint}, or lower --max-batch-size"
        if again:
            log.debug("batch failed again", worker=worker, **fields, reason=lease.reason)
            return
        for entry in lease.entries:
            self._logged[entry.tenant, entry.id] = story
        while len(self._logged) > REMEMBERED:
            del self._logged[next(iter(self._logged))]
        if trace and not any(known):
            fields["exception"] = trace
        log.warning("batch failed", worker=worker, **fields, reason=lease.reason)
