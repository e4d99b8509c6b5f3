"""API keys and JSON Web Tokens side by side."""

from __future__ import annotations

from headway.model import Principal
from headway.ports import Identity

_OWN = b"hw_live_"


class CombinedIdentity:
    """Asks the one that a credential is for. A JSON Web Token has two dots in it, which no key of our making has.

    Arguments:
        keys: knows API keys.
        tokens: knows JSON Web Tokens.
    """

    def __init__(self, keys: Identity, tokens: Identity) -> None:
        self._keys = keys.identify
        self._tokens = tokens.identify

    def identify(self, authorization: bytes) -> Principal | None:
        """The caller, as the one that was asked says; raises what it raises."""
        credential = authorization[7:].strip()
        if credential.count(b".") == 2 and not credential.startswith(_OWN):
            return self._tokens(authorization)
        return self._keys(authorization)
