"""Weights of inputs by a function of the target, in the child process.

A batch is packed by estimated weights. The true weights are known only here, so a batch that turns out too heavy runs in
parts, each within the limit. An input that exceeds the limit runs alone.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, trace
from headway.backends.process.values import kind_of
from headway.core.values import shown
from headway.core.weight_estimate import MOST_WEIGHT
from headway.model import ValueKind

_MOST_SHOWN = 60


class NoWeight(Exception):
    """The function gives no weight for an input. `fault` is True if the function, not the input, is at fault."""

    def __init__(self, text: str, fault: bool, trace: str = "") -> None:
        super().__init__(text)
        self.fault, self.trace = fault, trace


class Weighing:
    """Weighs inputs by a method of a loaded target or a function of its module. `most` limits the weight of a batch unless it
    is 0. Raises Refusal if there is no such function, or it gives the target's warm-up input no weight."""

    def __init__(self, target: Target, function: str, most: int, loop: UserLoop) -> None:
        self._name, self._most, self._loop = function, most, loop
        if target.signature.takes is ValueKind.TENSORS:
            raise Refusal(
                f"target {target.name}: --weight {function} names a function that weighs inputs, and a target that takes arrays is "
                "weighed by its rows. Leave --weight out, and set --max-batch-size to the rows that a batch may hold."
            )
        self._call = _find(target, function)
        self._try(target)

    def weigh(self, value: Any) -> int:
        """Return the weight of an input as the target gets it, at least 1. Raises NoWeight."""
        try:
            result = self._loop.finish(self._call(value))
        except BaseException as exc:
            raise NoWeight(f"the weight function {self._name} raised {describe(exc)}", False, trace(exc)) from None
        try:
            weight = _whole(result)
        except BaseException:
            weight = None
        if weight is None:
            what = f"the weight function {self._name} returned {kind_of(result)}"
            raise NoWeight(f"{what}, expected a number from 0 on", True)
        return min(max(weight, 1), MOST_WEIGHT)

    def parts(self, weights: Sequence[int]) -> Iterator[slice]:
        """Yield the parts in which a batch with these weights runs, in order."""
        begin = together = 0
        for place, weight in enumerate(weights):
            together += weight
            if together > self._most > 0 and place > begin:
                yield slice(begin, place)
                begin, together = place, weight
        yield slice(begin, len(weights))

    def _try(self, target: Target) -> None:
        """Weigh the warm-up input, to notice a function that fails for all inputs."""
        value = target.signature.warm_up_input
        if value is None:
            return
        readable, _ = target.read([value])
        for warm_up in readable:
            try:
                self.weigh(warm_up)
            except NoWeight as exc:
                what = f"{exc} for the warm-up input {shown(value)[:_MOST_SHOWN]!r}"
                hint = "Fix it, give the target another attribute example, or use --weight chars."
                raise Refusal(f"target {target.name}: {what}. {hint}", exc.trace) from None


def _whole(result: Any) -> int | None:
    """Return a number that user code returned, rounded up, or None for anything else and for numbers below 0."""
    if isinstance(result, bool) or not hasattr(type(result), "__float__"):
        return None
    try:
        number: float = operator.index(result)
    except TypeError:
        number = float(result)
    return math.ceil(number) if number >= 0 else None


def _find(target: Target, name: str) -> Any:
    places = [target.call, target.module, sys.modules.get(getattr(target.call, "__module__", None) or "")]
    for place in places:
        function = getattr(place, name, None)
        if function is None:
            continue
        if not callable(function):
            raise _refusal(target, name, f"{name} is of type {kind_of(function)} there")
        _check(target, name, function)
        return function
    import difflib

    near = difflib.get_close_matches(name, {attribute for place in places for attribute in dir(place)}, 1)
    raise _refusal(target, name, "neither it nor its module has that" + (f"; there is {near[0]!r}" if near else ""))


def _check(target: Target, name: str, function: Any) -> None:
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError:
        raise _refusal(target, name, f"its signature is {signature}") from None


def _refusal(target: Target, name: str, why: str) -> Refusal:
    return Refusal(
        f"target {target.name}: --weight {name} names a function of it, and {why}. Write def {name}(input) -> int, which "
        "takes one input and returns its weight, or use --weight chars."
    )
