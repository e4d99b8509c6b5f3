"""End of a request whose inputs are submitted one by one, for those who count requests and not inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headway.core import dedup, values
from headway.core.parameters import canonical
from headway.model import BatchRun, DedupKind, Failure, QueueName, Reply, Value

if TYPE_CHECKING:
    from headway.gateway.input_gate import Judgement
    from headway.gateway.pending import PendingRequest
    from headway.gateway.request_traces import RequestTrace

PART = "\x01"
"""Sign between the idempotency key of a request and the number of its part, in the keys of the parts but the first."""


class WholeOutcome(msgspec.Struct, eq=False):
    """Outcome of a request with several inputs, as its client gets it; there are no inputs and outputs in it.

    Attributes:
        id: id of the request.
        seconds: seconds from the request to its outcome; negative while it has none.
        failure: why it failed; None when it did not.
        ran: run of the batch that the failure, or the first output, came from; None when it came from none.
        shared: kind of the dedup key by which all of it came from another request.
        failed_part: id of the input for which it failed, if that is another than the first.
    """

    id: str
    seconds: float = -1.0
    failure: Failure | None = None
    ran: BatchRun | None = None
    shared: DedupKind | None = None
    failed_part: str = ""

    @property
    def ended(self) -> bool:
        """Whether the request has its outcome."""
        return self.seconds >= 0.0

    def end(self, reply: Reply, seconds: float, failed_part: str = "") -> None:
        """Note the outcome, unless there is one."""
        if not self.ended:
            self.seconds, self.failed_part = max(seconds, 0.0), failed_part
            self.failure, self.ran, self.shared = reply.failure, reply.ran, reply.shared


class SeveralInputs:
    """Request with several inputs, of which each is submitted, and ends, by itself.

    Arguments:
        id: id of the request.
        inputs: values for the model, at least one.
        parameters: parameters of every input; text of a JSON object, or empty.

    Attributes:
        count: number of its inputs.
        inspected: whether the input policy has been through all of them.
        judgement: verdict that all of them wait for; None for none.
        entered: whether the first of them has been made an entry.
        version: version of the model that was drawn for all of them; None as long as none was.
        trace: trace of the request; None unless it is sampled.
        whole: outcome of the request.
        payer: nonce of the input that pays for all; 0 while none does.
        ahead: whether the first goes ahead, and the others wait until the broker has it.
        equal: inputs of which only the first is submitted, by what they have in common, until the request ends; see `EqualInputs`.

    A prompt of which several choices are asked is there as often, as the same object. It is read once, or a small body would
    cost as much as one that is 128 times larger.
    """

    __slots__ = (
        "_asked", "_missing", "ahead", "count", "entered", "equal", "id", "inputs", "inspected", "judgement", "parameters", "payer",
        "trace", "version", "whole",
    )  # fmt: skip

    def __init__(self, id: str, inputs: Sequence[Value], parameters: bytes) -> None:
        self.id, self.count = id, len(inputs)
        self.inputs, self.parameters = inputs, parameters
        self.inspected = False
        self.judgement: Judgement | None = None
        self.entered = False
        self.trace: RequestTrace | None = None
        self.version: str | None = None
        self.whole = WholeOutcome(id)
        self.payer = 0
        self.ahead = False
        self.equal: dict[str, list[PendingRequest]] = {}
        self._missing = len(inputs)
        self._asked: tuple[Value, bytes] | None = None

    def take_inspected(self, inputs: Sequence[Value], parameters: bytes, judgement: Judgement | None) -> None:
        """Take inputs and parameters as the input policy leaves them."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, queue: QueueName) -> bytes:
        """SHA-256 of the whole request, however its parameters are written. `queue` names the model, with the version that is asked for."""
        hashed = hashlib.sha256()
        for part in (str(queue).encode(), canonical(self.parameters)):
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
        before, found = None, b""
        for input in self.inputs:
            if input is not before:
                before, found = input, hashlib.sha256(values.canonical(input)).digest()
            hashed.update(found)
        return hashed.digest()

    def digest_of(self, model: str, version: str, input: Value) -> bytes:
        """SHA-256 of one of the inputs with the parameters, as dedup keys have it. `version` is what the client asks for."""
        if self._asked is None or self._asked[0] is not input:
            self._asked = input, dedup.digest(model, version, input, self.parameters)
        return self._asked[1]

    def forget_equal(self) -> None:
        """Forget which inputs are equal: none gets the outcome of another any more."""
        for those in self.equal.values():
            del those[1:]
        self.equal.clear()

    def ends(self, failed: bool) -> bool:
        """Note that an input has its outcome. True, once, when the request ends with it: the first failure or the last output."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended
