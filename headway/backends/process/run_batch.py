"""Runs a batch in the child process: weighs the inputs, calls user code, and judges its result.

User code must return a list or tuple with one output per input; any other result fails the whole batch. An exception instance or
an invalid value fails only its input. If user code raises anything, even SystemExit, the batch fails, but the process continues.
Merely inspecting a result can raise, too.
"""

from __future__ import annotations

import math
import operator
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from headway.backends.process import frames
from headway.backends.process.frames import Failed, Outputs, Run
from headway.backends.process.usercode import Refusal, Target, UserLoop, describe, trace
from headway.backends.process.values import Encode, NoOutput, encoder, kind_of, listed
from headway.core.batch_cost import Calls
from headway.core.values import as_json, shown
from headway.core.weight_estimate import MOST_WEIGHT, octets
from headway.model import Octets, Output, TokenCount, Value, ValueKind

if TYPE_CHECKING:
    from headway.backends.process.array_kind import ArrayKind

_Why = tuple[str, bool]  # The reason why an input has no output, and True if the target is at fault.

_MOST_SHOWN = 60


class NoWeight(Exception):
    """The weight function returned no weight for an input. `fault` is True if the function is to blame, not the input."""

    def __init__(self, text: str, fault: bool, trace: str = "") -> None:
        super().__init__(text)
        self.fault, self.trace = fault, trace


class Weighing:
    """Weighs inputs using a method of a loaded target, or a function in its module. Raises Refusal if there is none, or it
    fails on the warm-up input. Batches are packed by estimated weight. A batch that turns out heavier than `most` (0: no
    limit) runs in parts of at most that weight. An input above the limit runs alone."""

    def __init__(self, target: Target, function: str, most: int, loop: UserLoop) -> None:
        self._name, self._most, self._loop = function, most, loop
        if target.signature.takes is ValueKind.TENSORS:
            raise Refusal(
                f"target {target.name}: --weight {function} names a function that weighs inputs, but a target that takes arrays is "
                "weighed by its rows. Leave out --weight, and set --max-batch-size to the number of rows that a batch may contain."
            )
        self._call = _find(target, function)
        self._try(target)

    def weigh(self, value: Any) -> int:
        """Return an input's weight, at least 1. `value` is the input as the target gets it. Raises NoWeight."""
        try:
            result = self._loop.finish(self._call(value))
        except BaseException as exc:
            raise NoWeight(f"the weight function {self._name} raised {describe(exc)}", False, trace(exc)) from None
        try:
            weight = _rounded_up(result)
        except BaseException:
            weight = None
        if weight is None:
            problem = f"the weight function {self._name} returned {kind_of(result)}"
            raise NoWeight(f"{problem}, expected a number of at least 0", True)
        return min(max(weight, 1), MOST_WEIGHT)

    def parts(self, weights: Sequence[int]) -> Iterator[slice]:
        begin = together = 0
        for place, weight in enumerate(weights):
            together += weight
            if together > self._most > 0 and place > begin:
                yield slice(begin, place)
                begin, together = place, weight
        yield slice(begin, len(weights))

    def _try(self, target: Target) -> None:
        """Weigh the warm-up input, to find out if the function fails for all inputs."""
        value = target.signature.warm_up_input
        if value is None:
            return
        readable, _ = target.read([value])
        for warm_up in readable:
            try:
                self.weigh(warm_up)
            except NoWeight as exc:
                problem = f"{exc} for the warm-up input {shown(value)[:_MOST_SHOWN]!r}"
                hint = "Fix it, give the target another attribute example, or use --weight chars."
                raise Refusal(f"target {target.name}: {problem}. {hint}", exc.trace) from None


def _rounded_up(result: Any) -> int | None:
    """Return a result of user code, rounded up, or None if it isn't a number of at least 0."""
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
    raise _refusal(
        target, name, "neither the target nor its module has it" + (f"; there is {near[0]!r}" if near else "")
    )


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
        f"target {target.name}: --weight {name} must name a function of the target, but {why}. Write def {name}(input) -> int, which "
        "takes one input and returns its weight, or use --weight chars."
    )


def run(
    target: Target, batch: Run, weighing: Weighing | None = None, most_rows: int = 0, calls: Calls | None = None
) -> Outputs | Failed:
    """Run a batch in user code, and judge its result. An input that can't be passed to user code fails alone. If a call
    fails, the whole batch fails. Inputs with conflicting call parameters run in separate calls. (Queues keep such inputs
    apart once they know the target.)

    With `weighing`, a batch that is too heavy runs in parts, and the answer contains each input's weight. `most_rows`
    limits the rows in one call of a target that takes arrays (0: no limit). `calls` learns the costs of calls, and may
    divide a batch."""
    number, expected, gives = batch.number, len(batch.inputs), target.signature.gives
    try:
        if target.arrays is not None and target.arrays.takes:
            return _run_arrays(target, target.arrays, batch, most_rows)
        inputs, reasons = target.read(batch.inputs)
        parameters = batch.parameters_of_each()
        groups = target.calls(parameters) if target.per_call else {}
        if reasons or groups or weighing is not None or (calls is not None and calls.cuts):
            return _run_in_parts(target, batch, inputs, reasons, weighing, calls, groups)
        begun = monotonic()
        result = target.run(inputs, parameters)
        if calls is not None:
            calls.ran(batch.inputs, monotonic() - begun)
        return judge(number, expected, result, gives, target.arrays)
    except BaseException as exc:
        return Failed(number, False, describe(exc), trace(exc))


def _run_in_parts(
    target: Target,
    batch: Run,
    inputs: list[Any],
    reasons: Mapping[int, str],
    weighing: Weighing | None,
    calls: Calls | None,
    groups: Mapping[bytes, list[int]],
) -> Outputs | Failed:
    """Run a batch in several calls because of `groups` or weights, or to save time. Inputs with `reasons` are left out."""
    number, expected, gives = batch.number, len(batch.inputs), target.signature.gives
    refused = {place: (reason, False) for place, reason in reasons.items()}
    weights = [] if weighing is None else _weigh(weighing, inputs, refused, expected)
    whole = Outputs(number, gives, [None] * expected, refused, weights)
    places = [place for place in range(expected) if place not in refused]
    counted = [weights[place] for place in places] if weights else [octets(batch.inputs[place]) for place in places]
    parameters = batch.parameters_of_each()
    ran = list[tuple[list[int], float]]()
    for part in _parts(counted, weighing, calls, _positions(places, groups)):
        here, begun = [places[at] for at in part], monotonic()
        try:
            result = target.run([inputs[at] for at in part], parameters and [parameters[place] for place in here])
        except BaseException as exc:
            return Failed(number, False, describe(exc), trace(exc), sorted(here) if len(here) < expected else [])
        ran.append(([counted[at] for at in part], monotonic() - begun))
        word = judge(number, len(part), result, gives, target.arrays)
        if isinstance(word, Failed):
            return word
        _put(whole, here, word)
    if calls is not None:
        calls.ran_in_parts(counted, ran)
    return whole


def _positions(places: list[int], groups: Mapping[bytes, list[int]]) -> list[list[int]]:
    """Return the positions in `places` of each group of inputs that may share a call."""
    if not groups:
        return [list(range(len(places)))] if places else []
    at = {place: position for position, place in enumerate(places)}
    positions = [[at[place] for place in group if place in at] for group in groups.values()]
    return [group for group in positions if group]


def _parts(
    weights: list[int], weighing: Weighing | None, calls: Calls | None, groups: list[list[int]]
) -> Iterator[list[int]]:
    """Yield the positions of each call's inputs, given the weights of all inputs."""
    for group in groups:
        group_weights = [weights[at] for at in group]
        for part in [slice(0, len(group))] if weighing is None else weighing.parts(group_weights):
            cuts = [range(len(group[part]))] if calls is None else calls.parts(group_weights[part])
            yield from ([group[part.start + at] for at in cut] for cut in cuts)


def _run_arrays(target: Target, kind: ArrayKind, batch: Run, most_rows: int) -> Outputs | Failed:
    from headway.backends.process import arrays  # Targets that take text start faster without it.

    parameters = batch.parameters_of_each()
    if target.takes_parameters and parameters is None:
        parameters = [b""] * len(batch.inputs)
    here: list[int] = []

    def call(inputs: Any, places: list[int]) -> object:
        here[:] = sorted(set(places))
        try:
            return target.run(inputs, parameters and [parameters[place] for place in places])
        except ValueError as exc:
            if "read-only" in str(exc):
                exc.args = (f"{exc}; the arrays of a batch are read-only: change a copy, for example x = x.copy()",)
            raise

    keys = {place: key for key, group in target.calls(parameters).items() for place in group}
    try:
        return arrays.run(batch.number, batch.inputs, kind, most_rows, call, describe, keys)
    except BaseException as exc:
        blamed = here if len(here) < len(batch.inputs) else []
        return Failed(batch.number, False, describe(exc), trace(exc), blamed)


def _weigh(weighing: Weighing, inputs: list[Any], refused: dict[int, _Why], expected: int) -> list[int]:
    """Return the weight of each place. An input that can't be weighed moves from `inputs` to `refused`, and gets weight 0."""
    weights = [0] * expected
    fit = []
    for place, value in zip([place for place in range(expected) if place not in refused], inputs, strict=True):
        try:
            weights[place] = weighing.weigh(value)
            fit.append(value)
        except NoWeight as exc:
            refused[place] = str(exc), exc.fault
    inputs[:] = fit
    return weights


def _put(whole: Outputs, places: Sequence[int], word: Outputs) -> None:
    for place, output in zip(places, word.outputs, strict=True):
        whole.outputs[place] = output
    whole.errors |= {places[place]: error for place, error in word.errors.items()}
    whole.tokens |= {places[place]: used for place, used in word.tokens.items()}


def judge(
    number: int, expected: int, result: object, gives: ValueKind = ValueKind.TEXT, kind: ArrayKind | None = None
) -> Outputs | Failed:
    """Turn what user code returned for a batch into an answer. `kind` describes the target's arrays."""
    if kind is not None and gives is ValueKind.TENSORS:
        from headway.backends.process import arrays

        return arrays.judge(number, expected, result, kind, describe)
    result = listed(result, gives)
    if not isinstance(result, list | tuple):
        return Failed(number, True, f"the target returned {_unlisted(result, expected)}")
    items = list(islice(result, expected + 1))  # The result may be longer than its `len`, or even endless.
    count = len(items) if len(items) < expected else max(len(items), len(result))
    if count != expected:
        return Failed(number, True, f"the target returned {count} outputs for {expected} inputs")
    outputs: list[Any] = []
    errors: dict[int, tuple[str, bool]] = {}
    encode, texts = encoder(gives), gives is not ValueKind.BYTES
    tokens: dict[int, TokenCount] = {}
    for place, output in enumerate(items):
        if texts and type(output) is str and output.isascii() and len(output) <= frames.MAX_OUTPUT:
            value: Value | None = output
        else:
            rich = output if type(output) is Output else None
            if rich is not None:
                tokens[place] = TokenCount(rich.tokens, rich.prompt_tokens)
            value, error = _value(output if rich is None else rich.value, encode)
            if value is None:
                errors[place] = error
        outputs.append(value)
    return _answer(number, outputs, errors, gives, tokens)


def bounded(word: Outputs | Failed, lines: int, *, mixed: bool = False) -> Outputs | Failed:
    """Drop outputs from an answer if they are too large in total. Small outputs of requests are dropped last. The batch's last
    `lines` inputs are bulk lines. A `mixed` batch has several callers, and the large outputs of one must not delay the
    small outputs of others."""
    if isinstance(word, Failed):
        return word
    sizes = [len(output) if output else 0 for output in word.outputs]
    requests = len(sizes) - lines
    small, large, of_lines = frames.MAX_OUTPUTS, frames.MAX_LARGE_OUTPUTS, frames.MAX_LINES_OUTPUTS
    if sum(sizes[:requests]) > min(small, frames.LARGE_BESIDE if mixed else large):
        by_size = sorted(range(requests), key=sizes.__getitem__)
        first_large = bisect_left(by_size, frames.LONG_HAND_OVER, key=sizes.__getitem__)
        _leave_out(word, sizes, by_size[:first_large], small)
        if mixed and first_large > sizes[:requests].count(0):
            large = frames.LARGE_BESIDE
        _leave_out(word, sizes, by_size[first_large:], large)
    if lines:
        _leave_out(word, sizes, range(requests, len(sizes)), of_lines)
    return word


def _leave_out(word: Outputs, sizes: Sequence[int], places: Iterable[int], room: int) -> None:
    for place in places:
        if sizes[place] > room:
            word.outputs[place] = None
            word.crowded[place] = sizes[place]
        else:
            room -= sizes[place]


def _answer(
    number: int,
    outputs: list[Any],
    errors: dict[int, tuple[str, bool]],
    gives: ValueKind,
    tokens: dict[int, TokenCount] | None = None,
) -> Outputs:
    if gives is ValueKind.JSON:
        outputs = [None if output is None else as_json(output) for output in outputs]
    elif gives is ValueKind.BYTES:
        outputs = [output.content if isinstance(output, Octets) else None for output in outputs]
    return Outputs(number, gives, outputs, errors, tokens=tokens or {})


def _value(output: object, encode: Encode) -> tuple[Value | None, tuple[str, bool]]:
    """Return the encoded output. If there is none, return None with the reason, and whether the target is at fault."""
    try:
        if isinstance(output, BaseException):
            return None, (describe(output), False)
        return encode(output), ("", False)
    except NoOutput as exc:
        return None, (f"the target returned {exc}{exc.mend}", True)
    except BaseException as exc:
        problem = "the target returned something unreadable for this input"
        return None, (f"{problem}: {describe(exc)}", True)


def _unlisted(result: object, expected: int) -> str:
    if hasattr(type(result), "__next__"):
        mend = "return a list instead of yielding its items, for example return list(outputs)"
    elif hasattr(type(result), "__anext__"):
        mend = "return a list instead of yielding its items: collect them with [item async for item in outputs]"
    elif callable(getattr(result, "tolist", None)):
        kind = "np.ndarray" if hasattr(type(result), "__array__") else "list[list[float]]"
        mend = f"write -> {kind} after its parameters to return arrays"
    elif result is None:
        mend = "end it by returning a list"
    else:
        mend = "return one output for each input"
    return f"{kind_of(result)}, expected a list of {expected} outputs; {mend}"
