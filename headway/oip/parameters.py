"""Parameters of a request: those that the protocol's servers know, and the rest, which is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headway.errors import BadRequest
from headway.model import RequestOptions

_T = TypeVar("_T")

PRIORITY = "priority"
TIMEOUT = "timeout"
BINARY_OUTPUT = "binary_data_output"
FINAL_WISH, FINAL = "triton_enable_empty_final_response", "triton_final_response"
"""Wish of Triton's clients on streams, and the parameter by which an answer says that it is the last to its request: each is."""

TOKENS = "tokens_used"
"""Parameter of an answer: the tokens that all of its elements have used, where the target tells them."""

KNOWN = (PRIORITY, TIMEOUT, BINARY_OUTPUT, FINAL_WISH)
"""Parameters that the protocol's servers know."""

_MOST_MICROSECONDS = 2**63 - 1


class Wishes(msgspec.Struct, frozen=True, gc=False):
    """Wishes of a client for one request, out of its parameters.

    Attributes:
        tier: index of the highest tier that it asks for: 0, the highest there is, unless it asks for a lower one.
        timeout: seconds until the answer is worthless; None for no wish.
        binary: whether its outputs come in the binary form.
        final: whether an answer on a stream says that it is the last to its request.
    """

    tier: int = 0
    timeout: float | None = None
    binary: bool = False
    final: bool = False

    def applied_to(self, options: RequestOptions) -> RequestOptions:
        """Options of the request with these wishes: its tier may only become lower, its time only shorter."""
        tier = max(options.tier, self.tier)
        timeout = options.timeout if self.timeout is None else min(options.timeout, self.timeout)
        if tier == options.tier and timeout == options.timeout:
            return options
        return msgspec.structs.replace(options, tier=tier, timeout=timeout)


NONE = Wishes()
"""Wishes of a request without parameters that the protocol knows."""


def read_wishes(parameters: Mapping[str, Any], tiers: int) -> Wishes:
    """Wishes among a request's parameters, where there are that many tiers.

    `priority` 1 is the highest tier, 2 the next; 0, as in the protocol, is that of the principal. `timeout` is in
    microseconds; 0 is no wish.

    Raises:
        BadRequest: a parameter has a wrong type, or is out of range.
    """
    priority = _whole_number(parameters, PRIORITY, tiers)
    microseconds = _whole_number(parameters, TIMEOUT, _MOST_MICROSECONDS)
    timeout = microseconds / 1e6 if microseconds else None
    return Wishes(max(priority - 1, 0), timeout, _boolean(parameters, BINARY_OUTPUT), _boolean(parameters, FINAL_WISH))


def for_target(parameters: Mapping[str, _T]) -> dict[str, _T]:
    """Parameters that the target gets: all but those that the protocol knows."""
    return {name: value for name, value in parameters.items() if name not in KNOWN}


def _boolean(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"the parameter `{name}` is no boolean; expected true or false")
    return value


def _whole_number(parameters: Mapping[str, Any], name: str, most: int) -> int:
    number = parameters.get(name, 0)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= most:
        return number
    wrong = "out of range" if type(number) is int else "no integer"
    unit = "microseconds" if name == TIMEOUT else "1 being the highest tier"
    raise BadRequest(f"the parameter `{name}` is {wrong}; expected an integer from 0 to {most}, {unit}")
