"""Checks of new API keys against existing ones."""

import pytest

from headway.model import ApiKey
from headway.model.identity import check_new


def key(id: str, *, replaces: str = "", expires_at: float | None = None) -> ApiKey:
    return ApiKey(
        id=id,
        digest=b"",
        user="u",
        tenant="t",
        tier="paid",
        created_at=1000.0,
        expires_at=expires_at,
        replaces=replaces,
    )


def test_an_id_is_given_once_and_of_two_rotations_of_one_key_the_second_loses() -> None:
    with pytest.raises(ValueError, match=r"^a key with the id 'a' already exists$"):
        check_new(key("a"), [key("a", expires_at=1.0)])
    check_new(key("a"), [key("b"), key("c")])
    for end in (None, 1000.5):
        with pytest.raises(ValueError, match=r"^old has just been replaced by b, which is still valid$"):
            check_new(key("a", replaces="old"), [key("b", replaces="old", expires_at=end)])
    for end in (999.0, 1000.0):  # An expired key doesn't block others.
        check_new(key("a", replaces="old"), [key("b", replaces="old", expires_at=end)])
