"""Tensors as values: packing, checks against a model's specifications, and JSON."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import tensor_json, tensors, values
from headway.core.tensors import (
    NoTensors,
    Tensor,
    TensorHead,
    check_heads,
    header_of,
    join_elements,
    pack,
    rows_of,
    split_elements,
    unpack,
)
from headway.model import Octets, TensorSpec, Value

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 40]), min_size=1, max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, Any]:
    datatype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)
    rng, kind = np.random.default_rng(draw(st.integers(0, 1 << 30))), DTYPES[datatype]
    if datatype == "BOOL":
        return datatype, rng.integers(0, 2, shape).astype(bool)
    if datatype.startswith("FP"):
        return datatype, rng.normal(size=shape).astype(kind)
    bounds = np.iinfo(kind)
    return datatype, rng.integers(bounds.min, bounds.max, shape, dtype=kind, endpoint=True)


def tensor(array: Any, datatype: str = "FP32", name: str = "x") -> Tensor:
    return Tensor(TensorHead(name, datatype, array.shape), array.tobytes())


@given(arrays(), st.booleans(), st.sampled_from([None, 1]))
def test_arrays_survive_json_and_packing(drawn: tuple[str, Any], flat: bool, indent: int | None) -> None:
    datatype, array = drawn
    listed = array.ravel().tolist() if flat else array.tolist()
    text = json.dumps(listed, indent=indent).encode()
    assert tensor_json.read(text, "x", datatype, array.shape) == array.tobytes()
    if array.size and not flat:
        assert tensor_json.shape_of(text) == array.shape
    texts = Tensor(TensorHead("texts", "BYTES", array.shape[:1]), join_elements([b"\xff"] * array.shape[0]))
    value = pack([tensor(array, datatype), texts])
    first, second = unpack(value)
    assert (first.head.shape, bytes(first.data)) == (array.shape, array.tobytes())
    assert split_elements(second.data) == [b"\xff"] * array.shape[0]
    assert rows_of(value) == (array.shape[0] or 1)
    assert json.loads(tensor_json.write(pack([first]))) == array.tolist()


@given(st.binary(max_size=60))
def test_damaged_tensors_are_told_and_raise_nothing_else(content: bytes) -> None:
    value = pack([tensor(np.zeros((2, 3), np.float32))]).content
    for damaged in (content, value[: len(content)], content + value, value + content, value[:9] + content):
        if damaged != value:
            with pytest.raises(NoTensors):
                unpack(Octets(damaged))


NO_NUMBERS = [b"[[1,2],[3]]", b"[1 2]", b'["a"]', b"[300]", b"[1.5]", b"[null]", b"1", b"", b"[[[[", b"[1,]", b"[,1]",
              b"[true]", b"[-1]", b"[[],[]]", b"[1]]", b"[1]2", b"{}", b"[\xff]", b"[1[2]", b"[1e999]"]  # fmt: skip
NO_TEXTS = [b"[null]", b"[0]", b"[false]", b"[{}]", b"[[]]", b'["a",null]', b'["a",[]]', b'[["a"],"b"]', b'["\\ud800"]']


@pytest.mark.parametrize(
    ("datatype", "text"), [*(("UINT8", text) for text in NO_NUMBERS), *(("BYTES", text) for text in NO_TEXTS)]
)
def test_what_is_no_array_of_that_shape_and_datatype_is_told(datatype: str, text: bytes) -> None:
    for shape in ((1,), (2,), (1, 2), (2, 1), (1, 1)):
        with pytest.raises(NoTensors) as caught:
            tensor_json.read(text, "x", datatype, shape)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("datatype", ["BYTES", "FP32"])
@pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0), (1, 0, 0), (2, 0, 3), (2, 3, 0)])
def test_data_without_elements_are_nested_as_far_as_they_can_be(datatype: str, shape: tuple[int, ...]) -> None:
    for text in (b"[]", json.dumps(np.zeros(shape).tolist()).encode()):
        assert tensor_json.read(text, "x", datatype, shape) == b""


@pytest.mark.parametrize("shape", [(7, 11, 3, 0), (400, 0), (1, 600, 0)])
def test_many_arrays_without_elements_show_their_shape(shape: tuple[int, ...]) -> None:
    text = json.dumps(np.zeros(shape).tolist()).encode()
    assert tensor_json.shape_of(text) == shape
    assert tensor_json.read(text, "x", "FP32", shape) == b""
    for damaged in (text.replace(b"[]", b"[1]", 1), text.replace(b"[]", b"1", 1), text[:-1], text + b"]"):
        with pytest.raises(NoTensors):
            tensor_json.read(damaged, "x", "FP32", tensor_json.shape_of(damaged))


@pytest.mark.parametrize(
    ("datatype", "good", "bad", "largest"),
    [
        ("FP16", "65519.99", "65520", b"\xff\x7b"),
        ("BF16", "3.3895314e38", "3.3962e38", b"\x7f\x7f"),
        ("FP32", "3.4028235e38", "3.4028236e38", b"\xff\xff\x7f\x7f"),
    ],
)
def test_what_rounds_to_the_largest_number_is_no_overflow(datatype: str, good: str, bad: str, largest: bytes) -> None:
    assert tensor_json.read(f"[{good},-{good}]".encode(), "x", datatype, (2,))[: len(largest)] == largest
    with pytest.raises(NoTensors, match=f"element 1 of the input `x` is .* out of the range of {datatype}"):
        tensor_json.read(f"[{good},{bad}]".encode(), "x", datatype, (2,))


def test_nan_travels_in_binary_and_not_in_json() -> None:
    value = pack([tensor(np.array([[1.0, np.nan]], np.float32))])
    with pytest.raises(NoTensors, match="NaN or an infinity"):
        tensor_json.write(value)
    assert values.as_json(value) == b"[[1.0,null]]"


@pytest.mark.parametrize("shape", [(1 << 39,), (1, 1 << 39), (1 << 20, 1 << 19), (1, 1 << 39, 0)])
def test_a_shape_that_names_more_elements_than_there_are_takes_no_memory(shape: tuple[int, ...]) -> None:
    with pytest.raises(NoTensors):
        tensor_json.read(b"[1,2,3]", "x", "UINT8", shape)
    if 0 in shape:
        with pytest.raises(NoTensors, match="no elements"):
            check_heads([TensorHead("x", "UINT8", shape)], ())


SPECS = (TensorSpec("query", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,)))


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ([], "has 0 inputs"),
        ([TensorHead("query", "FP32", (1, 2))], "`ids` is missing"),
        ([TensorHead("query", "FP64", (1, 2)), TensorHead("ids", "INT64", (1, 3))], "is FP64 of shape [1, 2]; the model takes `query`, FP32 of shape [-1, 2]"),
        ([TensorHead("query", "FP32", (1, 3)), TensorHead("ids", "INT64", (1, 3))], "is FP32 of shape [1, 3]"),
        ([TensorHead("query", "FP32", (1, 2)), TensorHead("ids", "INT64", (2, 3))], "has 1 rows and `ids` has 2"),
        ([TensorHead("query", "FP32", (0, 2)), TensorHead("ids", "INT64", (0, 3))], "has no rows"),
        ([TensorHead("query", "FP32", (1, 2)), TensorHead("other", "INT64", (1, 3))], "there is no input `other`"),
        ([TensorHead("query", "FLOAT", (1, 2)), TensorHead("ids", "INT64", (1, 3))], "has the datatype `FLOAT`"),
        ([TensorHead("query", "FP32", (1, 2)), TensorHead("query", "FP32", (1, 2))], "is given 2 times"),
    ],
)  # fmt: skip
def test_inputs_that_a_model_does_not_take_are_told(heads: list[TensorHead], told: str) -> None:
    with pytest.raises(NoTensors) as caught:
        check_heads(heads, SPECS)
    assert told in str(caught.value)


def test_a_narrower_datatype_is_taken_where_every_number_of_it_stays_as_it_is() -> None:
    for (name, dtype), (wide, wider) in itertools.product(DTYPES.items(), repeat=2):
        rounded = name in ("INT64", "UINT64") and wide == "FP64"  # numpy considers that safe.
        head, spec = TensorHead("x", name, (1, 4)), TensorSpec("x", wide, (4,))
        if name == wide or (np.can_cast(dtype, wider) and name != "BOOL" and not rounded):
            assert check_heads([head], [spec]) == (head,), (name, wide)
            limits: Any = np.finfo(dtype) if name[0] == "F" else np.iinfo("u1" if name == "BOOL" else dtype)
            array = np.array([[limits.min, 0, 1, limits.max]], dtype)
            assert bytes(tensor_json.widened(tensor(array, name), wide)) == array.astype(wider).tobytes(), (name, wide)
        else:
            with pytest.raises(NoTensors, match="the model takes `x`"):
                check_heads([head], [spec])


def test_brain_floats_are_widened_and_hold_small_integers() -> None:
    halves = Tensor(TensorHead("x", "BF16", (1, 2)), b"\x80\x3f\x80\x7f")
    assert bytes(tensor_json.widened(halves, "FP64")) == np.array([1, np.inf]).tobytes()
    assert bytes(tensor_json.widened(tensor(np.array([[-128, 3]], "i1"), "INT8"), "BF16")) == b"\x00\xc3\x40\x40"
    check_heads([TensorHead("x", "UINT8", (1, 2))], [TensorSpec("x", "BF16", (2,))])
    for sent, taken in (("BF16", "FP16"), ("FP16", "BF16"), ("INT16", "BF16")):
        with pytest.raises(NoTensors):
            check_heads([TensorHead("x", sent, (1, 2))], [TensorSpec("x", taken, (2,))])


@pytest.mark.parametrize(
    ("sent", "taken", "mend"),
    [
        ("FP64", "FP32", ". Send FP32: in numpy use `.astype('float32')`"),
        ("INT64", "FP32", ". Send FP32: in numpy use `.astype('float32')`"),
        ("INT64", "FP64", ". Send FP64: in numpy use `.astype('float64')`"),
        ("INT64", "UINT8", ". Send UINT8: in numpy use `.astype('uint8')`"),
        ("FP32", "BF16", ". Send BF16"),
        ("BYTES", "FP32", ""),
        ("FP32", "BYTES", ""),
        ("BOOL", "FP32", ""),
    ],
)
def test_an_input_that_would_lose_something_is_refused_with_what_to_do(sent: str, taken: str, mend: str) -> None:
    with pytest.raises(NoTensors) as caught:
        check_heads([TensorHead("x", sent, (1, 2))], [TensorSpec("x", taken, (2,))])
    said = f"the input `x` is {sent} of shape [1, 2]; the model takes `x`, {taken} of shape [-1, 2]{mend}"
    assert str(caught.value) == said


def test_tensors_have_digests_of_their_own() -> None:
    one = pack([tensor(np.zeros((1, 2), "f4"))])
    others: list[Value] = [
        pack([tensor(np.zeros((1, 2), "f4"))], single=True),
        pack([tensor(np.zeros((2, 1), "f4"))]),
        pack([tensor(np.zeros((1, 2), "i4"), "INT32")]),
        pack([tensor(np.zeros((1, 2), "f4")), tensor(np.zeros((1, 2), "f4"), name="y")]),
        pack([tensor(np.zeros((1, 2), "f4")), tensor(np.zeros((1, 2), "f4"), name="z")]),
        Octets(one.content),
        "\1" + one.content.decode("latin-1"),
        json.dumps([[0.0, 0.0]]).encode(),
    ]
    assert len({values.canonical(value) for value in (one, *others)}) == 1 + len(others)
    assert values.canonical(pack([tensor(np.zeros((1, 2), "f4"))])) == values.canonical(one)


def test_the_name_of_a_sole_tensor_is_not_part_of_its_digest() -> None:
    """A request with the client's own name stays the same once the model's name is known."""
    one, other = (pack([tensor(np.ones((2, 3), "f4"), name=name)]) for name in ("x", "a name that is longer"))
    assert values.canonical(one) == values.canonical(other)


@pytest.mark.parametrize("datatype", ["FP16", "FP64", "INT64", "UINT8", "FP32"])
def test_numbers_are_made_four_bytes(datatype: str) -> None:
    array = np.array([[1, 2, 200]], DTYPES[datatype])
    assert tensor_json.as_fp32(tensor(array, datatype)) == array.astype("<f4").tobytes()
    if datatype == "FP64":
        with pytest.raises(NoTensors, match="a number that four bytes cannot hold"):
            tensor_json.as_fp32(tensor(np.array([[1e39]]), datatype))


@given(arrays(), st.booleans(), st.sampled_from([None, 1]))
def test_rows_of_vectors_are_read_however_short(drawn: tuple[str, Any], single: bool, indent: int | None) -> None:
    datatype, array = drawn
    rows = array.reshape(array.shape[0] or 1, -1)[: 1 if single else None]
    specs = (TensorSpec("x", datatype, (-1,)),)
    text = json.dumps(rows[0].tolist() if single else rows.tolist(), indent=indent).encode()
    value = tensor_json.tensors_of(text, specs)
    (found,) = unpack(value)
    assert (found.head.shape, bytes(found.data)) == (rows.shape, rows.tobytes())
    assert header_of(value).single is single


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[[1,2],[3]]", "are arrays of unequal lengths; expected one row, FP32 of shape [-1], or an array of rows"),
        (b"[[1,2],3]", "the data of the input `x`"),
        (b"[1,[2]]", "the data of the input `x`"),
        (b"[[1,true]]", "are not FP32: Expected `float`, got `bool`, at element 1"),
        (b"[[1,1e39]]", "element 1 of the input `x` is 1e39, which is out of the range of FP32"),
        (b"[[[1]]]", "have 3 axes"),
        (b"{}", "`x` is missing"),
        (b"null", "are `null`; expected one row"),
        (b"7", "are `number`; expected one row"),
    ],
)
def test_what_is_no_vector_is_told(text: bytes, says: str) -> None:
    with pytest.raises(NoTensors) as raised:
        tensor_json.tensors_of(text, (TensorSpec("x", "FP32", (-1,)),))
    assert says in str(raised.value)


def test_names_of_clients_are_not_remembered() -> None:
    for number in range(300):
        name = f"{number}" * 5000
        (head,) = check_heads([TensorHead(name, "FP32", (1, 2))], (TensorSpec("x", "FP32", (2,)),))
        assert head.name == "x"
        assert header_of(pack([Tensor(TensorHead(name, "FP32", (1, 0)), b"")])).heads[0].name == name
    for cache in (tensors._often_opening, tensors._often_decode, tensors._often_checked):
        assert cache.cache_info().currsize <= 256
    before = tensors._often_opening.cache_info().currsize
    pack([Tensor(TensorHead("y" * 2000, "FP32", (1, 0)), b"")])
    assert tensors._often_opening.cache_info().currsize == before


FLOATS, TEXTS = TensorSpec("x", "FP32", (2,)), TensorSpec("x", "BYTES", ())


@pytest.mark.parametrize(
    ("text", "specs", "expected"),
    [
        ("[1, 2]", (FLOATS,), [1.0, 2.0]),
        ("[[1, 2], [3, 4]]", (FLOATS,), [[1.0, 2.0], [3.0, 4.0]]),
        ('{"x": [1, 2], "y": 3}', (FLOATS, TensorSpec("y", "INT64", ())), {"x": [1.0, 2.0], "y": 3}),
        ('["a", "b"]', (TensorSpec("x", "BYTES", (-1,)),), ["a", "b"]),
        ("[1, 2]", (TEXTS,), "[1, 2]"),
    ],
)
def test_a_text_of_unknown_kind_is_read_as_json(text: str, specs: tuple[TensorSpec, ...], expected: Any) -> None:
    assert json.loads(values.as_json(values.as_tensors(text, specs))) == expected


@pytest.mark.parametrize("text", ["a text", "[1, 2", '"[1, 2]"', "[" * 10_000, "[NaN, 1]", ""])
def test_a_text_that_is_no_json_text_is_refused_as_a_text(text: str) -> None:
    with pytest.raises(NoTensors, match=r"are `str`; expected one row, FP32 of shape \[2\]"):
        values.as_tensors(text, [FLOATS])
