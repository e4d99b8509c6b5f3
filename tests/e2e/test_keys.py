"""Keys that come and go while several processes serve, as clients and operators see it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tests.cli.command import run
from tests.e2e.client import wait_until
from tests.e2e.server import Server, serving

KNOWN_WITHIN = 5.0
"""Seconds after which every gateway must know that a key was revoked, unless its machine is held up."""
UNLIMITED = ("--user-rate", "0")
"""Flags for clients that ask again and again until something is known."""
WHO = ("--user", "alice", "--tenant", "acme", "--tier", "paid")


def keys(folder: Path, *arguments: str) -> str:
    """Output of `headway keys …`."""
    done = run(["keys", *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def accepted(server: Server, key: str) -> bool:
    """Whether a key is good there; where it is not, the answer says so and no more."""
    line = server.asked[-1].connection if server.asked else None
    asked = server.ask("hello", f"Authorization: Bearer {key}", on=line)
    answer = asked.answer()
    if answer.status == 200:
        return True
    assert (answer.status, asked.outcome) == (401, "UNAUTHENTICATED")
    assert key[-28:] not in answer.body.decode()
    return False


def test_every_gateway_hears_of_new_rotated_and_revoked_keys(tmp_path: Path) -> None:
    where = "--keys", "keys.toml"
    file = tmp_path / "keys.toml"
    first = keys(tmp_path, "create", *WHO, *where)
    with contextlib.ExitStack() as stack:
        gateways = [stack.enter_context(serving(tmp_path, *UNLIMITED, *where)) for _ in range(2)]
        assert all(accepted(gateway, first) for gateway in gateways)

        second = keys(tmp_path, "rotate", first.split("_")[2], "--grace", "1h", *where)
        wait_until(lambda: all(accepted(gateway, second) for gateway in gateways))
        assert all(accepted(gateway, first) for gateway in gateways), "both live during the grace"

        keys(tmp_path, "revoke", first.split("_")[2], *where)
        wait_until(lambda: not any(accepted(gateway, first) for gateway in gateways))
        assert all(accepted(gateway, second) for gateway in gateways)
        wait_until(lambda: all(gateway.metrics().value("keys_age_seconds") < KNOWN_WITHIN for gateway in gateways))

        listed = json.loads(keys(tmp_path, "list", "--json", *where))["keys"]
        assert [row["state"] for row in listed] == ["revoked", "live"]
        told = [text for gateway in gateways for text in (gateway.log_text(), gateway.banner())] + [file.read_text()]
        assert not any(key[-28:-6] in text for text in told for key in (first, second))

        for gateway in gateways:
            gateway.expected = {"the store of keys is out of reach"}
        broken = tmp_path / "broken.toml"
        broken.write_text(file.read_text().replace("[[keys]]", "[[keys]"))
        broken.replace(file)  # At once: a look between the two steps of a write sees an empty file, without keys.
        gateways[0].logged("the store of keys is out of reach")
        assert accepted(gateways[0], second), "the last known keys go on"


def test_keys_that_nobody_is_asked_for_are_told_at_the_start(tmp_path: Path) -> None:
    ledger = ("--ledger", f"sqlite:///{tmp_path}/headway.db")
    keys(tmp_path, "create", *WHO, *ledger)
    with serving(tmp_path, *ledger) as server:
        server.expected = {"API keys in the ledger are not used"}
        told = server.logged("API keys in the ledger are not used")
        assert (told["keys"], told["let_in"]) == (1, "everybody")
        assert "--keys ledger" in told["hint"]
        server.ask("anybody").output()
