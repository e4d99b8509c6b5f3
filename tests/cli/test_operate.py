"""`headway status` and `headway dlq` against a real admin port, and the arguments that the role commands accept."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog.testing
from structlog.testing import capture_logs

from headway.app.roles import ROLES as PARTS
from headway.app.wiring import tell_of_other_roles
from headway.cli.admin import decode, pretty
from headway.config import FIELDS, Settings, flag
from headway.core.health import HEARTBEAT_EVERY
from headway.http.server.listener import Listener
from headway.model import InferenceRequest, Principal, ProcessInfo, RequestOptions, Role
from headway.runtime.certificates import Certificates
from headway.runtime.request_id import new_id
from tests.cli.command import code_of
from tests.http.test_admin import Touchy
from tests.services.stand import Stand

TENANT = Principal("alice", "acme", 0)
LONG = 60.0


class Steady:
    """A monotonic clock that skips stalls of this machine, so that no worker is declared dead because of them."""

    def __init__(self) -> None:
        self._shown, self._read = 0.0, time.monotonic()

    def __call__(self) -> float:
        before, self._read = self._read, time.monotonic()
        self._shown += min(self._read - before, HEARTBEAT_EVERY)
        return self._shown


class Running:
    """A service with an admin port, in its own thread."""

    def __init__(self, certificates: Certificates | None = None, **settings: Any) -> None:
        self.backend = Touchy(seconds=0.0)
        self._certificates, self._settings = certificates, settings
        self.url = ""
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stand = stand = Stand(Steady(), self.backend, admin_port=0, **self._settings)
        door = Listener.admin(stand.settings, stand.admin_app(), new_id, stand.counters.gateway, self._certificates)
        async with stand:
            await door.open()
            self.url = f"{'https' if self._certificates else 'http'}://127.0.0.1:{door.port}"
            self._up.set()
            await self._stop.wait()
            await door.close()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._up.wait(LONG)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG)

    def bury(self, *texts: str, caller: Principal = TENANT, id: str = "") -> list[str]:
        """Dead-letter some inputs. Returns their ids as shown."""

        async def ask(text: str) -> str:
            own = id or new_id()
            await self.stand.gateway.ask(InferenceRequest(caller, own, RequestOptions(4.0, 1), "m", text, b""))
            return f"req_{own}"

        return [asyncio.run_coroutine_threadsafe(ask(text), self.loop).result(LONG) for text in texts]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    # The service's log isn't part of a command's output.
    with structlog.testing.capture_logs(), Running(admin_token="s3cret") as running:
        monkeypatch.setenv("HEADWAY_ADMIN", running.url)
        monkeypatch.setenv("HEADWAY_ADMIN_TOKEN", "s3cret")
        yield running


def test_status_of_a_service(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("status        ok\n")
    assert "gpu-0   m      healthy" in shown
    assert code_of(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["worker_id"] == "gpu-0"
    service.stand.membership.leaving = True
    for command in (["status"], ["top"]):
        assert code_of(command) == 1
        assert capsys.readouterr().out.startswith("status        draining\n")


def test_a_worker_is_drained_and_given_work_again(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["drain", "gpu-0"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(
        "model m would have no healthy worker left, and its requests would be refused; use --force to drain it anyway\n"
    )
    assert code_of(["drain", "gpu-0", "--force"]) == 0
    told = capsys.readouterr().out
    assert told == (
        "gpu-0 is drained: by an operator\nPatch it, then restart its processes or run: headway undrain gpu-0\n"
    )
    code_of(["status"])
    shown = capsys.readouterr().out
    assert "gpu-0   m      drained" in shown
    assert shown.endswith("gpu-0 is drained: by an operator\n")
    assert code_of(["undrain", "gpu-1"]) == 1
    assert "nothing named 'gpu-1' is drained; similar names are gpu-0" in capsys.readouterr().err
    assert code_of(["undrain", "gpu-0", "--json"]) == 0
    [worker] = json.loads(capsys.readouterr().out)
    assert worker["status"] == "healthy"
    assert code_of(["drain", "gpu-0", "--force"]) == 0
    capsys.readouterr()
    assert code_of(["undrain", "here"]) == 0
    told = capsys.readouterr().out
    assert told == "gpu-0 is healthy\nSeparately requested drains have ended, too: gpu-0\n"


def test_an_order_that_is_not_waited_for_is_not_told_as_done(
    service: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, heartbeat = service.stand.fleet, service.stand.fleet.heartbeat

    def hears_only(*names: str) -> None:
        async def beat(member: ProcessInfo) -> Sequence[str]:
            await heartbeat(member)
            return names

        monkeypatch.setattr(fleet, "heartbeat", beat)

    hears_only()
    for wait in ("-1", "nan"):
        assert code_of(["drain", "gpu-0", "--force", "--wait", wait]) == 3
        assert "--wait" in capsys.readouterr().err
    assert code_of(["drain", "gpu-0", "--force", "--wait", "0"]) == 1
    assert capsys.readouterr().out == "gpu-0 is healthy: ordered, but not confirmed yet\n"
    hears_only("gpu-0")
    assert code_of(["drain", "gpu-0", "--force"]) == 0
    capsys.readouterr()
    assert code_of(["undrain", "gpu-0", "--wait", "-1"]) == 3
    assert code_of(["undrain", "gpu-0", "--wait", "0"]) == 1
    assert capsys.readouterr().out == "gpu-0 is drained: ordered, but not confirmed yet\n"


def test_dead_letters_are_listed_and_shown(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["dlq", "list"]) == 0
    assert capsys.readouterr().out == "no dead letters\n"
    ids = service.bury("poison one", "poison two")
    assert code_of(["dlq", "list"]) == 0
    head, newest, oldest = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "DIED", "AT", "TENANT", "TIER", "MODEL", "WORKER", "TRIES", "CAUSE", "ERROR"]
    assert newest.startswith(ids[1])
    assert oldest.startswith(ids[0])
    assert r"cannot digest \x1b[31mthis" in newest
    assert code_of(["dlq", "list", "--limit", "1"]) == 0
    assert "2 in all" in capsys.readouterr().out
    assert code_of(["dlq", "list", "--json"]) == 0
    shown = capsys.readouterr().out
    assert [letter["id"] for letter in json.loads(shown)["letters"]] == ids[::-1]
    assert "poison" not in shown
    assert code_of(["dlq", "show", ids[0].removeprefix("req_")]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["input"] == "poison one"
    assert "\x1b" not in shown


def test_replay_removes_what_succeeds_and_keeps_failures(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    ids = service.bury("poison one", "poison two")
    assert code_of(["dlq", "replay", *ids]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    first, more = shown.err.splitlines()
    assert first.startswith(rf"{ids[0]} failed: {service.url}: cannot digest \x1b[31mthis (422)")
    assert more == f"1 more failed for the same reason as {ids[0]}"
    service.backend.cured = True
    assert code_of(["dlq", "replay", ids[0]]) == 0
    assert f"{ids[0]} succeeded after " in capsys.readouterr().out
    assert code_of(["dlq", "replay", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "POISON TWO"
    assert code_of(["dlq", "list"]) == 0
    assert capsys.readouterr().out == "no dead letters\n"


def test_a_letter_with_a_number_out_of_range_is_shown_as_it_was_written() -> None:
    body = b'{"id":"req_x","attempts":2,"input":[1e999,' + b"9" * 4301 + b"]}"
    shown = pretty(decode(body))
    assert "1e999" in shown
    assert "9" * 4301 in shown
    assert decode(body)["attempts"] == 2


def test_equal_ids_of_two_tenants_are_told_apart(
    service: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("one", "two", "three"):
        service.bury(f"poison of {tenant}", caller=Principal("somebody", tenant, 1), id="x")
    assert code_of(["dlq", "show", "x"]) == 1
    assert "3 tenants have a dead letter req_x" in capsys.readouterr().err
    assert code_of(["dlq", "show", "x", "--tenant", "two"]) == 0
    assert json.loads(capsys.readouterr().out)["input"] == "poison of two"
    capsys.readouterr()
    assert code_of(["dlq", "purge", "x", "req_unknown", "--tenant", "two"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.partition(": ")[0]) == ("x removed\n", "req_unknown failed")
    service.backend.cured = True
    assert code_of(["dlq", "replay", "--all", "--tenant", "three", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "POISON OF THREE"
    monkeypatch.setattr("click.confirm", lambda question, abort: pytest.fail("was asked in spite of --yes"))
    assert code_of(["dlq", "purge", "--all", "--yes"]) == 0
    assert capsys.readouterr().out == "req_x removed\n"


def test_purging_everything_asks_first(
    service: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.bury("poison one")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert code_of(["dlq", "purge", "--all"]) == 1
    assert code_of(["dlq", "list"]) == 0
    assert "poison" not in capsys.readouterr().out
    assert asyncio.run_coroutine_threadsafe(service.stand.dead.count(), service.loop).result(LONG) == 1


def test_ids_and_all_exclude_each_other(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["replay"], ["purge"], ["replay", "x", "--all"], ["purge", "x", "--all"]):
        assert code_of(["dlq", *arguments]) == 2
        assert "--all" in capsys.readouterr().err


def test_a_wrong_token_is_told(service: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["status"], ["dlq", "list"], ["dlq", "replay", "a", "b"], ["dlq", "purge", "a", "b"]):
        assert code_of([*arguments, "--token", "wrong"]) == 1
        error = capsys.readouterr().err
        assert "needs the service token" in error
        assert error.count("(401)") == 1
        assert "HEADWAY_ADMIN_TOKEN" in error


def test_a_url_that_is_none_is_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("127.0.0.1:9000", "ftp://x", "http://", "http://x:y", "http://x/internal", "http://[x"):
        assert code_of(["status", "--admin", url]) == 3
        assert capsys.readouterr().err.startswith(f"headway: --admin = {url!r}: is not")


def test_a_command_says_that_nobody_answers_at_the_admin_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nothing listens there, and nothing else can.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert code_of(["status", "--admin", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway: {url} does not answer: Connection refused.")
    assert "--admin" in error


ROLES = {role.value: parts.settings for role, parts in PARTS.items() if not parts.alone}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_flags_of_what_it_does(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([role, "--help-all"]) == 0
    shown = capsys.readouterr().out
    flags = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE))
    assert flags == {flag(name) for name in ROLES[role]} | {"--config", "--help"}
    assert f"headway {role} " in shown
    assert "SIGTERM" in shown or role == "controller"


@pytest.mark.parametrize(
    ("role", "option", "takers"),
    [
        ("controller", "--devices", "serve and worker"),
        ("gateway", "--autoscale", "serve, worker and controller"),
        ("worker", "--scale-policy", "serve and controller"),
        ("worker", "--user-rate", "serve and gateway"),
        ("worker", "--bogus", ""),
    ],
)
def test_a_foreign_flag_names_roles(role: str, option: str, takers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([role, option]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (f"headway {role} has no {option}: it is a flag of headway {takers}." in told) is bool(takers)


def test_a_target_for_a_role_without_one_is_told_who_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    for role in ("gateway", "controller"):
        assert code_of([role, "--broker", "redis://127.0.0.1", "model.py:f"]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert f"headway {role} takes no TARGET, but got model.py:f: only workers run targets." in told
        assert "headway serve model.py:f" in told


def test_a_flag_without_its_value_is_told_to_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["serve", "model.py:f", "--workers"]) == 2
    told = capsys.readouterr().err
    assert "'--workers' requires an argument" in told
    assert "it is a flag of" not in told


def test_settings_of_other_roles_in_a_shared_file_are_told_in_the_log() -> None:
    settings = Settings(workers=4, port=0, scale_policy="plan")
    with capture_logs() as logs:
        tell_of_other_roles(settings, PARTS[Role.CONTROLLER])
        tell_of_other_roles(Settings(port=0), PARTS[Role.CONTROLLER])
    assert [(one["log_level"], one["settings"]) for one in logs] == [("info", "workers")]


def test_every_setting_is_one_of_a_role_apart() -> None:
    assert set().union(*ROLES.values()) == set(FIELDS)
