"""Shutdown, and signals from service managers and operators: accepted requests succeed, and nothing is left behind."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

from tests.e2e.client import Asked, Gate
from tests.e2e.server import Server, launched, serving
from tests.targets.gates import SETUP_GATE

UNHAPPY = {"batch failed", "worker process ended"}
DOES_NOTHING = "{} does nothing; SIGHUP reopens the log and rereads files, SIGTERM ends the process"


def all_held(server: Server) -> tuple[Gate, list[Asked]]:
    """Send requests until one runs and waits at a gate, and the others are queued."""
    gate = Gate(server.folder)
    held = [server.ask(gate.text())]
    gate.reached()
    held += [server.ask(f"waiting {number}") for number in range(50)]
    server.queued(50)
    return gate, held


def test_a_signal_fails_no_request_that_is_held_and_tells_each_client_that_its_connection_ends(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        server.ready()
        idle = server.ask("before")
        idle.output()
        gate, held = all_held(server)
        server.signal()
        server.logged("draining")
        gate.open()
        for asked in held:
            answer = asked.answer()
            assert (asked.outcome, answer.header["connection"]) == ("ok", "close")
        assert idle.connection.ended()
        server.check_end()


def test_a_second_signal_ends_the_drain_with_503_for_what_is_held(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        server.ready()
        _, held = all_held(server)
        server.signal()
        server.logged("draining")
        server.signal()
        server.logged("got a second signal: ending immediately")
        for asked in held:
            assert asked.refusal() == "DRAINING"
        server.expected = UNHAPPY
        server.check_end()


def test_a_hangup_during_the_start_ends_nothing_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    gate = Gate(tmp_path, SETUP_GATE)
    with launched(tmp_path, "--workers", "2") as server:
        gate.reached()
        server.signal(signal.SIGHUP)
        server.logged("SIGHUP")
        assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert server.ended() == 0
        assert server.banner() == ""
        server.expected = UNHAPPY
        server.check_end()


def test_other_signals_disturb_no_process_and_a_renamed_log_is_begun_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for pid in server.processes():
                os.kill(pid, number)
            server.logged(DOES_NOTHING.format(number.name))
        path = server.log_path
        path.rename(tmp_path / "log.1")
        path.touch()
        for pid in server.processes():
            os.kill(pid, signal.SIGHUP)
        assert server.logged("SIGHUP")["log"] == "reopened"
        server.ask("undisturbed").output()


def test_a_terminal_that_is_closed_ends_it_in_good_order(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    with launched(tmp_path, stderr=its, logs_json=False) as server:
        os.close(its)
        server.ready()
        os.close(ours)
        server.signal(signal.SIGHUP)
        server.check_end()
