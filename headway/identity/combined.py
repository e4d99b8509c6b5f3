"""API keys and JSON Web Tokens side by side; apart from both, as neither knows of the other."""

from __future__ import annotations

from collections.abc import Callable

from headway.model import Principal
from headway.ports import Identity, KeyIdentity, WatchedIdentity

_OWN = b"hw_live_"


class CombinedIdentity(WatchedIdentity, KeyIdentity):
    """Identity that passes a credential on to the identity for its kind: a JSON Web Token has two dots, an API key none."""

    def __init__(self, keys: Identity, tokens: Identity) -> None:
        self._keys = keys.identify
        self._watch = keys.watch if isinstance(keys, WatchedIdentity) else None
        self._tokens = tokens.identify
        self._principal_of = keys.principal_of if isinstance(keys, KeyIdentity) else None

    def identify(self, authorization: bytes) -> Principal | None:
        """Return the principal, or raise what the identity of that kind raises."""
        return self._tokens(authorization) if _is_token(authorization) else self._keys(authorization)

    def watch(self, authorization: bytes) -> Callable[[], Principal | None] | None:
        return None if self._watch is None or _is_token(authorization) else self._watch(authorization)

    def principal_of(self, key: str) -> Principal | None:
        return None if self._principal_of is None else self._principal_of(key)


def _is_token(authorization: bytes) -> bool:
    credential = authorization[7:].strip()
    return credential.count(b".") == 2 and not credential.startswith(_OWN)
