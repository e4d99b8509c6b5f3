"""API keys and JSON Web Tokens side by side."""

from __future__ import annotations

from headway.model import Principal
from headway.ports import Identity

_OWN = b"hw_live_"


class CombinedIdentity:
    """Identity that asks the one for which a credential is. A JSON Web Token has two dots in it, which no API key has.

    Arguments:
        keys: identity of API keys.
        tokens: identity of JSON Web Tokens.
    """

    def __init__(self, keys: Identity, tokens: Identity) -> None:
        self._keys = keys.identify
        self._tokens = tokens.identify

    def identify(self, authorization: bytes) -> Principal | None:
        """Principal as the identity says that was asked; raises what that raises."""
        credential = authorization[7:].strip()
        if credential.count(b".") == 2 and not credential.startswith(_OWN):
            return self._tokens(authorization)
        return self._keys(authorization)
