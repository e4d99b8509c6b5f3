"""No keys: everybody is the same caller."""

from __future__ import annotations

from headway.model import Principal


class AnonymousIdentity:
    """Takes every request as coming from one anonymous caller, whatever credential it carries.

    Arguments:
        tier: index of the tier everybody gets.
    """

    def __init__(self, tier: int) -> None:
        self._caller = Principal(user="anonymous", tenant="default", tier=tier)

    def identify(self, authorization: bytes) -> Principal | None:
        """The anonymous caller."""
        return self._caller
