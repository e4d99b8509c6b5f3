"""Signals that a service manager or an operator may send to a process that serves."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

from tests.e2e.client import Gate
from tests.e2e.server import TIERS, Server, launched, serving
from tests.identity.issuing import ISSUER, jwk, jwks, token
from tests.targets.gates import SETUP_GATE

DOES_NOTHING = "{} does nothing; SIGHUP opens the log anew and reads files again, SIGTERM ends"
OTHER = "https://other.example.com/"


def issuers(folder: Path, *names: str) -> None:
    """Name these issuers, and no other."""
    rows = (
        f'[[issuers]]\nissuer = "{name}"\naudience = "headway"\njwks = "jwks.json"\nalgorithm = "EdDSA"\n'
        f'tenant = "tenant of {name}"\n'
        for name in names
    )
    (folder / "issuers.toml").write_text("\n".join(rows))


def bearer(issuer: str) -> str:
    text = token("EdDSA", iss=issuer, exp=time.time() + 600).decode()
    return f"Authorization: Bearer {text}"


def hang_up(server: Server, count: int) -> None:
    """Have it read its files again, for the `count`th time."""
    server.signal(signal.SIGHUP)
    server.logged("SIGHUP", count)


def test_signals_that_mean_nothing_are_told_and_do_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for pid in server.processes():
                os.kill(pid, number)
            server.logged(DOES_NOTHING.format(number.name))
        server.ask("undisturbed").output()


def test_a_log_that_was_renamed_is_begun_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        path = server.log_path
        path.rename(tmp_path / "log.1")
        path.touch()
        for pid in server.processes():
            os.kill(pid, signal.SIGHUP)
        assert server.logged("SIGHUP")["log"] == "opened anew"
        server.ask("undisturbed").output()


def test_issuers_are_read_again_and_those_that_will_not_do_are_not(tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk("EdDSA")))
    issuers(tmp_path, ISSUER)
    with serving(tmp_path, *TIERS, "--jwt", str(tmp_path / "issuers.toml")) as server:
        server.ask("known", bearer(ISSUER)).output()
        assert server.ask("not known yet", bearer(OTHER)).refusal() == "UNAUTHENTICATED"
        issuers(tmp_path, ISSUER, OTHER)
        hang_up(server, 1)
        server.logged("read again", what="issuers")
        server.ask("known now", bearer(OTHER)).output()
        (tmp_path / "issuers.toml").write_text("[[issuers]")
        server.expected = {"cannot be read again; the former content stays in use"}
        hang_up(server, 2)
        server.logged("cannot be read again; the former content stays in use", what="issuers")
        server.ask("known as before", bearer(ISSUER)).output()
        issuers(tmp_path, OTHER)
        hang_up(server, 3)
        server.logged("read again", 2, what="issuers")
        assert server.ask("known no more", bearer(ISSUER)).refusal() == "UNAUTHENTICATED"
        server.ask("still known", bearer(OTHER)).output()


def test_while_it_comes_up_a_hangup_ends_nothing(tmp_path: Path) -> None:
    gate = Gate(tmp_path, SETUP_GATE)
    with launched(tmp_path) as server:
        gate.reached()
        hang_up(server, 1)
        gate.open()
        server.ready()
        server.signal()
        server.check_end()


def test_a_terminal_that_is_closed_ends_it_in_good_order(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    with launched(tmp_path, stderr=its, logs_json=False) as server:
        os.close(its)
        server.ready()
        os.close(ours)
        server.signal(signal.SIGHUP)
        server.check_end()
