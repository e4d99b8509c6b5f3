"""Authentication without keys: everybody is one principal."""

from __future__ import annotations

from headway.model import Principal


class AnonymousIdentity:
    """Identity that gives every request the anonymous principal, whatever credential it carries.

    Arguments:
        tier: index of the tier of all requests.
    """

    def __init__(self, tier: int) -> None:
        self._principal = Principal(user="anonymous", tenant="default", tier=tier)

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the anonymous principal."""
        return self._principal
