"""End of a request whose inputs are submitted one by one, for those who count requests and not inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.core import values
from headway.model import Value

if TYPE_CHECKING:
    from headway.gateway.input_gate import Judgement


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
    """

    __slots__ = ("_missing", "count", "id", "inputs", "inspected", "judgement", "parameters")

    def __init__(self, id: str, inputs: Sequence[Value], parameters: bytes) -> None:
        self.id, self.count = id, len(inputs)
        self.inputs, self.parameters = inputs, parameters
        self.inspected = False
        self.judgement: Judgement | None = None
        self._missing = len(inputs)

    def take_inspected(self, inputs: Sequence[Value], parameters: bytes, judgement: Judgement | None) -> None:
        """Take inputs and parameters as the input policy leaves them."""
        self.inputs, self.parameters, self.judgement = inputs, parameters, judgement
        self.inspected = True

    def digest(self, model: str) -> bytes:
        """SHA-256 of the whole request."""
        hashed = hashlib.sha256()
        for part in (model.encode(), self.parameters, *map(values.canonical, self.inputs)):
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
        return hashed.digest()

    def ends(self, failed: bool) -> bool:
        """Note that an input has its outcome. True, once, when the request ends with it: the first failure or the last output."""
        ended = self._missing > 0 and (failed or self._missing == 1)
        self._missing = 0 if failed else self._missing - 1
        return ended
