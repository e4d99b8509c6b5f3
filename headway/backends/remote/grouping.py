"""Groups of a batch's entries that go to a remote API in one request each: pure, apart from the backend that sends them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from headway.core.tensors import NoTensors, check_heads, header_of, rows_of
from headway.core.values import as_tensors
from headway.dialects.dialect import Dialect
from headway.model import Entry, ItemResult, Signature, Tensors, Value, ValueKind


class RequestGroup(NamedTuple):
    """Entries that go in one request.

    Attributes:
        places: their places in the batch.
        inputs: their inputs, as the dialect takes them.
        parameters: their parameters.
    """

    places: list[int]
    inputs: list[Value]
    parameters: list[bytes]


def grouped(
    entries: Sequence[Entry], dialect: Dialect, most_rows: int = 0
) -> tuple[list[RequestGroup], dict[int, ItemResult]]:
    """Group a batch by row shape, by parameters if those apply to a whole request, and into parts of limited rows.

    Arguments:
        entries: the batch.
        dialect: dialect of the API.
        most_rows: limit on rows of one request, unless a single entry has more; 0 for none.

    Returns:
        The groups, and by place the items of entries whose inputs can't be sent.
    """
    signature = dialect.signature
    of_form: dict[Hashable, list[RequestGroup]] = {}
    rows: dict[Hashable, int] = {}
    wrong: dict[int, ItemResult] = {}
    for place, entry in enumerate(entries):
        try:
            value = _taken(entry.input, signature)
        except _NotTaken as exc:
            wrong[place] = exc.item
            continue
        key = (entry.parameters if dialect.shared_parameters else b"", _form_of(value, signature))
        count = rows_of(value)
        groups = of_form.setdefault(key, [])
        if not groups or (most_rows and rows[key] + count > most_rows):
            groups.append(RequestGroup([], [], []))
            rows[key] = 0
        rows[key] += count
        group = groups[-1]
        group.places.append(place)
        group.inputs.append(value)
        group.parameters.append(entry.parameters)
    return [group for groups in of_form.values() for group in groups], wrong


def rows_of_each(inputs: Sequence[Value]) -> list[int]:
    """Return the rows of each input, for `Dialect.decode`; empty if the inputs aren't tensors."""
    headers = [header_of(one) for one in inputs if isinstance(one, Tensors)]
    return [0 if one.single else one.rows for one in headers]


class _NotTaken(Exception):
    """An input can't be sent."""

    def __init__(self, item: ItemResult) -> None:
        super().__init__(item.error)
        self.item = item


def _taken(value: Value, signature: Signature) -> Value:
    """Return the input as the dialect takes it. Raises _NotTaken."""
    if signature.takes is ValueKind.TENSORS:
        try:
            found = as_tensors(value, signature.inputs)
            check_heads(header_of(found).heads, signature.inputs)
        except NoTensors as exc:
            raise _NotTaken(ItemResult(None, str(exc))) from None
        return found
    if isinstance(value, str) or signature.takes is ValueKind.JSON:
        return value
    what = "text" if signature.takes is ValueKind.TEXT else "octets, in base64"
    raise _NotTaken(ItemResult(None, f"the remote API takes {what}", True))


def _form_of(value: Value, signature: Signature) -> Hashable:
    """Return the row shapes of an input; inputs of one request have the same."""
    if signature.takes is not ValueKind.TENSORS or not isinstance(value, Tensors):
        return ()
    heads = header_of(value).heads
    named = len(signature.inputs) > 1  # A sole input may have any name.
    return tuple(sorted((one.name if named else "", one.shape[1:]) for one in heads))


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide tokens in proportion to the weights, evenly if all are 0; the parts add up."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts, before, done = [], 0, 0
    for weight in weights:  # Each part begins where the last one ends, so that rounding loses none.
        before += weight
        end = total * before // whole
        parts.append(end - done)
        done = end
    return parts
