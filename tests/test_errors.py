"""The errors that are drawn are those that exist, and each code says all that is asked of it."""

from __future__ import annotations

import inspect
import re
from http import HTTPStatus

import pytest

from headway import errors
from headway.errors import CODES, HeadwayError


def drawn() -> set[tuple[str, str]]:
    """Class and base of each error in the tree of the module's docstring."""
    found, above = set(), ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)", line)
        if match:
            level = len(match[1]) // 4
            del above[level + 1 :]
            found.add((match[2], above[-1]))
            above.append(match[2])
    return found


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, HeadwayError)]
    assert drawn() == {(one.__name__, one.__base__.__name__) for one in classes if one.__base__ is not None}


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
