"""Parameters of a request. The protocol defines some of them; all others are passed to the target."""

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
"""Parameters of Triton's streams: a client's request to have the last answer marked, and the mark."""
TOKENS = "tokens_used"  # Parameter of an answer: the number of tokens for all its elements, if the target reports it.
KNOWN = (PRIORITY, TIMEOUT, BINARY_OUTPUT, FINAL_WISH)
_MOST_MICROSECONDS = 2**63 - 1


class Wishes(msgspec.Struct, frozen=True, gc=False):
    """Options that a client sets through parameters. `tier` is the index of the highest acceptable tier. After `timeout` seconds, the
    answer is useless. If `binary`, outputs are in binary form. If `final`, a request's last answer on a stream is marked."""

    tier: int = 0
    timeout: float | None = None
    binary: bool = False
    final: bool = False

    def applied_to(self, options: RequestOptions) -> RequestOptions:
        tier = max(options.tier, self.tier)
        timeout = options.timeout if self.timeout is None else min(options.timeout, self.timeout)
        if tier == options.tier and timeout == options.timeout:
            return options
        return msgspec.structs.replace(options, tier=tier, timeout=timeout)


NONE = Wishes()


def read_wishes(parameters: Mapping[str, Any], tiers: int) -> Wishes:
    """Read what a client requests through parameters. `tiers` is the number of tiers. `priority` 1 is the highest tier, and 0 the
    principal's own. `timeout` is in microseconds; 0 means no timeout. Raises BadRequest if a parameter is invalid."""
    priority = _whole_number(parameters, PRIORITY, tiers)
    microseconds = _whole_number(parameters, TIMEOUT, _MOST_MICROSECONDS)
    timeout = microseconds / 1e6 if microseconds else None
    return Wishes(max(priority - 1, 0), timeout, _boolean(parameters, BINARY_OUTPUT), _boolean(parameters, FINAL_WISH))


def for_target(parameters: Mapping[str, _T]) -> dict[str, _T]:
    """Return the parameters to pass to the target."""
    return {name: value for name, value in parameters.items() if name not in KNOWN}


def _boolean(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise BadRequest(f"the parameter `{name}` is not a boolean; expected true or false")
    return value


def _whole_number(parameters: Mapping[str, Any], name: str, limit: int) -> int:
    number = parameters.get(name, 0)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= limit:
        return number
    wrong = "out of range" if type(number) is int else "not an integer"
    unit = "microseconds" if name == TIMEOUT else "where 1 is the highest tier"
    raise BadRequest(f"the parameter `{name}` is {wrong}; expected an integer from 0 to {limit}, {unit}")
