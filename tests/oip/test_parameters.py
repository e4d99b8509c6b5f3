"""Parameters of a request: what the protocol knows of them, and what the target gets."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import BadRequest
from headway.oip.parameters import NONE, Wishes, for_target, read_wishes


@pytest.mark.parametrize(
    ("parameters", "wishes"),
    [
        ({}, NONE),
        ({"priority": 0, "timeout": 0, "binary_data_output": False, "other": 1}, NONE),
        ({"priority": 1}, NONE),
        ({"priority": 3}, Wishes(tier=2)),
        ({"timeout": 1_500}, Wishes(timeout=0.0015)),
        ({"binary_data_output": True}, Wishes(binary=True)),
        ({"triton_enable_empty_final_response": True}, Wishes(final=True)),
    ],
)
def test_what_a_client_wishes_is_read(parameters: dict[str, Any], wishes: Wishes) -> None:
    assert read_wishes(parameters, 3) == wishes


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"priority": 4}, "`priority` is out of range; expected an integer from 0 to 3, 1 being the highest tier"),
        ({"priority": -1}, "`priority`"),
        ({"priority": True}, "`priority` is not an integer; expected"),
        ({"priority": "1"}, "`priority` is not an integer; expected an integer from 0 to 3"),
        (
            {"timeout": 1.5},
            "`timeout` is not an integer; expected an integer from 0 to 9223372036854775807, microseconds",
        ),
        ({"timeout": -1}, "`timeout`"),
        ({"timeout": 2**63}, "`timeout`"),
        ({"timeout": None}, "`timeout`"),
        ({"binary_data_output": 1}, "`binary_data_output` is not a boolean"),
        ({"triton_enable_empty_final_response": "yes"}, "`triton_enable_empty_final_response` is not a boolean"),
    ],
)
def test_a_wrong_parameter_is_named(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_wishes(parameters, 3)
    assert says in str(caught.value)


def test_the_target_gets_what_the_protocol_does_not_know() -> None:
    known = {"priority": 1, "timeout": 2, "binary_data_output": True, "triton_enable_empty_final_response": True}
    given = {**known, "temperature": 0.5, "sequence_id": 7}
    assert for_target(given) == {"temperature": 0.5, "sequence_id": 7}
