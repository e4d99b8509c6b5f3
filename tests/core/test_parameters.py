"""Parameters are read as JSON, whatever numbers are in them, and compared by what they mean."""

from __future__ import annotations

import msgspec
import pytest

from headway.core.parameters import CANONICAL, canonical, decode


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"{}", {}),
        (b'{"a":[1,-2.5,1e3,true,null,"x"]}', {"a": [1, -2.5, 1000.0, True, None, "x"]}),
        (b'{"a":1e308}', {"a": 1e308}),
        (b'{"a":4.9e-324}', {"a": 5e-324}),
        (b'{"a":123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
    ],
)
def test_parameters_mean_what_json_means(text: bytes, value: object) -> None:
    assert decode(text) == value


@pytest.mark.parametrize("text", [b"", b"{", b'{"a":1e999}', b'{"a":-1e400}', b'{"a":NaN}', b'{"a":01}'])
def test_text_that_is_no_json_or_out_of_range_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(text)


def test_what_is_written_differently_and_means_the_same_is_the_same() -> None:
    assert canonical(b'{"b": 1, "a": [1.50]}') == canonical(b'{"a":[1.5],"b":1}')
    assert canonical(b"") == b""
    assert canonical(b'{"a": 1}') != canonical(b'{"a": 2}')


def test_a_long_text_is_taken_as_it_is_written() -> None:
    long = b'{"a":"' + b"x" * CANONICAL + b'"}'
    assert canonical(long) is long
