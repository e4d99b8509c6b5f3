from http import HTTPStatus

import pytest

from headway import errors
from headway.errors import CODES


@pytest.mark.parametrize("name", CODES)
def test_an_error_code_is_complete(name: str) -> None:
    code = CODES[name]
    assert getattr(errors, name) == name
    assert 400 <= HTTPStatus(code.status) < 600
    assert code.title
    assert not code.title.endswith(".")
    assert code.when.endswith(".")
    assert code.shown in ("", *CODES)


def test_two_codes_that_are_one_to_clients_differ_in_status_or_title() -> None:
    shown = [(code.shown or name, code.status, code.title) for name, code in CODES.items()]
    assert len(set(shown)) == len(shown)
