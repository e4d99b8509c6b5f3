"""A running service rereads its issuers of JSON Web Tokens."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.e2e.server import serving
from tests.identity.issuing import ISSUER, jwk, jwks, token

OTHER = "https://other.example.com/"


def bearer(issuer: str) -> str:
    return f"Authorization: Bearer {token('RS256', 'first', iss=issuer, exp=time.time() + 600).decode()}"


def test_issuers_are_read_again_at_a_hangup_and_what_will_not_do_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    (tmp_path / "jwks.json").write_bytes(jwks(jwk("RS256")))

    def name_issuers(*names: str) -> None:
        rows = (
            f'[[issuers]]\nissuer = "{name}"\naudience = "headway"\njwks = "jwks.json"\nalgorithm = "RS256"\n'
            f'tenant = "tenant of {name}"\n'
            for name in names
        )
        path.write_text("\n".join(rows))

    name_issuers(ISSUER)
    with serving(tmp_path, "--jwt", str(path)) as server:
        server.ask("known from the start", bearer(ISSUER)).output()
        assert server.ask("not known yet", bearer(OTHER)).refusal() == "UNAUTHENTICATED"
        name_issuers(ISSUER, OTHER)
        server.signal(signal.SIGHUP)
        server.logged("read again", what="issuers")
        server.ask("known now", bearer(OTHER)).output()
        path.write_text("[[issuers]")
        server.expected = {"rereading failed; the previous content stays in use"}
        server.signal(signal.SIGHUP)
        server.logged("rereading failed; the previous content stays in use", what="issuers")
        server.ask("known as before", bearer(OTHER)).output()
        name_issuers(OTHER)
        server.signal(signal.SIGHUP)
        server.logged("read again", 2, what="issuers")
        assert server.ask("known no more", bearer(ISSUER)).refusal() == "UNAUTHENTICATED"
        server.ask("still known", bearer(OTHER)).output()
