"""Random tensors of any datatype and shape, and their data in both forms."""

import json
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from headway.core.tensors import SIZES, Tensor, TensorHead, join_elements
from tests.core import test_tensor_values

DATATYPES = [name for name in SIZES if name != "JSON"]
DTYPES: dict[str, Any] = {**test_tensor_values.DTYPES, "BF16": np.uint16}
"""Dtypes of numpy; BF16 is there as its bits."""
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


class Drawn(NamedTuple):
    """A tensor, and its JSON data as nested lists and as a flat list."""

    tensor: Tensor
    nested: Any
    flat: list[Any]


@st.composite
def tensors(draw: st.DrawFn, rows: int, name: str) -> Drawn:
    datatype = draw(st.sampled_from(DATATYPES))
    row = draw(st.lists(st.sampled_from([0, 1, 2, 3, 11]), max_size=3))
    shape = (rows, *row)
    head = TensorHead(name, datatype, shape)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    if datatype == "BYTES":
        texts = [draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=4)) for _ in range(min(8, rows))]
        elements = np.array(rng.choice(texts or [""], shape), dtype=object)
        data = join_elements(one.encode() for one in elements.ravel().tolist())
        return Drawn(Tensor(head, data), elements.tolist(), elements.ravel().tolist())
    array = _numbers(rng, datatype, shape)
    listed = (array.astype("<u4") << 16).view("<f4") if datatype == "BF16" else array
    return Drawn(Tensor(head, array.tobytes()), listed.tolist(), listed.ravel().tolist())


@st.composite
def several(draw: st.DrawFn, most: int = 4) -> list[Drawn]:
    """Draw the tensors of one request. All have the same number of rows."""
    names = draw(st.lists(NAMES, min_size=1, max_size=most, unique=True))
    rows = draw(st.integers(1, 4))
    return [draw(tensors(rows, name)) for name in names]


def body_of(drawn: list[Drawn], ways: list[str], **members: Any) -> tuple[bytes, int | None]:
    """Return the body of a request and the length of its JSON. `ways` has "nested", "flat" or "binary" per input."""
    inputs, behind = [], b""
    for one, way in zip(drawn, ways, strict=True):
        head = one.tensor.head
        given: dict[str, Any] = {"name": head.name, "datatype": head.datatype, "shape": head.shape}
        if way == "binary":
            given["parameters"] = {"binary_data_size": len(one.tensor.data)}
            behind += one.tensor.data
        else:
            given["data"] = one.nested if way == "nested" else one.flat
        inputs.append(given)
    text = json.dumps({"inputs": inputs, **members}, ensure_ascii=len(behind) % 2 == 0).encode()
    return text + behind, len(text) if "binary" in ways else None


def _numbers(rng: Any, datatype: str, shape: tuple[int, ...]) -> Any:
    kind = DTYPES[datatype]
    if datatype == "BOOL":
        return rng.integers(0, 2, shape).astype(kind)
    if datatype == "BF16":
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        return np.where((bits & 0x7F80) == 0x7F80, np.uint16(0x3F80), bits).astype("<u2")  # No NaN or infinities.
    if datatype.startswith("FP"):
        return (rng.normal(size=shape) * 10.0 ** rng.integers(-4, 4)).astype(kind)
    bounds = np.iinfo(kind)
    return rng.integers(bounds.min, bounds.max, shape, dtype=kind, endpoint=True)
