"""JSON Web Tokens, as clients of a running service see them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from tests.e2e.client import wait_until
from tests.e2e.server import TIERS, Server, serving
from tests.identity.issuing import ISSUER, jwk, jwks, publishing, token
from tests.identity.writing import entry, key_of

OTHER = "https://other.example.com/"


def name_issuers(folder: Path, jwks_at: str, *names: str) -> str:
    """Name these issuers, and no other; the path of their file."""
    rows = (
        f'[[issuers]]\nissuer = "{name}"\naudience = "headway"\njwks = "{jwks_at}"\nalgorithm = "RS256"\nleeway_s = 0\n'
        f'tenant = "tenant of {name}"\n'
        for name in names
    )
    path = folder / "issuers.toml"
    path.write_text("\n".join(rows))
    return str(path)


def bearer(name: str = "first", **changed: Any) -> str:
    changed.setdefault("exp", time.time() + 600)
    return f"Authorization: Bearer {token('RS256', name, **changed).decode()}"


def test_tokens_and_keys_side_by_side(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("bob", "bob", "globex", "free"))
    with publishing() as publisher:
        publisher.body = jwks(jwk("RS256"))
        flags = (
            *TIERS,
            "--jwt",
            name_issuers(tmp_path, publisher.url, ISSUER),
            "--keys",
            str(keys),
            "--log-level",
            "debug",
        )
        with serving(tmp_path, *flags) as server:
            good = bearer(sub="canary-user", jti="canary-id")
            line = server.connect()
            for number in range(3):
                server.ask(f"hello {number}", good, on=line).output()
            server.ask("hello", f"Authorization: Bearer {key_of('bob')}").output()
            refused: tuple[list[str], ...] = (
                [],
                [bearer(aud="canary-audience")],
                [bearer("other", header={"kid": "first"})],
                [bearer(tier="canary-tier")],
                ["Authorization: Bearer a.b.c"],
                ["Authorization: Bearer canary"],
            )
            for fields in refused:
                asked = server.ask("let me in", *fields)
                assert asked.refusal() == "UNAUTHENTICATED"
            asked = server.ask("let me in", bearer(exp=time.time() - 1))
            answer = asked.answer()
            assert asked.outcome == "UNAUTHENTICATED"
            assert "expired" in answer.message
            assert answer.header["www-authenticate"].startswith("Bearer")
            metrics = server.metrics()
            assert metrics.by("requests_total", "tier") == {"paid": 3, "free": 1}
            assert metrics.value("refusals_total", reason="unauthenticated") == len(refused) + 1
            wait_until(lambda: len(server.log("token refused")) >= 4)
            told = server.log_text() + server.banner() + server.admin("/metrics").body.decode() + str(server.health())
            assert "canary" not in told
            assert good.split()[-1].split(".")[1] not in told
            issuers_are_read_again(server, publisher.url)


def issuers_are_read_again(server: Server, jwks_at: str) -> None:
    """What the file says counts from a SIGHUP on, and what will not do changes nothing."""
    assert server.ask("not known yet", bearer(iss=OTHER)).refusal() == "UNAUTHENTICATED"
    name_issuers(server.folder, jwks_at, ISSUER, OTHER)
    server.signal(signal.SIGHUP)
    server.logged("read again", what="issuers")
    server.ask("known now", bearer(iss=OTHER)).output()
    (server.folder / "issuers.toml").write_text("[[issuers]")
    server.expected = {"reading again failed; the former content stays"}
    server.signal(signal.SIGHUP)
    server.logged("reading again failed; the former content stays", what="issuers")
    server.ask("known as before", bearer(iss=OTHER)).output()
    name_issuers(server.folder, jwks_at, OTHER)
    server.signal(signal.SIGHUP)
    server.logged("read again", 2, what="issuers")
    assert server.ask("known no more", bearer()).refusal() == "UNAUTHENTICATED"
    server.ask("still known", bearer(iss=OTHER)).output()
