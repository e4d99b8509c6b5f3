"""systemd units in deploy/systemd: the programs they start exist, systemd accepts them, and they restrict their processes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.config import Settings
from headway.model import Role
from tests.docs.pages import ROOT
from tests.docs.parsing import parse_headway

DEPLOY = ROOT / "deploy" / "systemd"
UNITS = sorted(DEPLOY.glob("*.service"))
OF_ROLE = {
    "headway-worker@": Role.WORKER,
    "headway-gateway": Role.GATEWAY,
    "headway-controller": Role.CONTROLLER,
    "headway": Role.SERVE,
}
LAME_DUCK = 5.0
"""Seconds for which a gateway keeps serving before it drains, according to its unit."""
WITHOUT_A_TARGET = {Role.GATEWAY, Role.CONTROLLER}
ONLY_WITHOUT_A_TARGET = {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers"}
"""Restrictions that user code on a GPU can't work with."""


def lines(unit: Path) -> list[tuple[str, str]]:
    text = unit.read_text(encoding="utf-8")
    return [
        (name, value)
        for name, _, value in (line.partition("=") for line in text.splitlines())
        if value and name[0] != "#"
    ]


def value(unit: Path, name: str) -> str:
    [found] = [value for named, value in lines(unit) if named == name]
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_restarts_its_role_and_lets_it_end(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = value(unit, "ExecStart").split()
    assert command[0] == "/srv/headway/env/bin/headway"
    assert command[1] == OF_ROLE[unit.stem].value
    parse_headway([word.replace("%i", "0") for word in command[1:]])
    assert value(unit, "Type") == "notify"
    assert value(unit, "TimeoutStartSec") == "infinity"
    assert value(unit, "Restart") == "always"
    assert int(value(unit, "RestartSec")) >= 1
    assert "3" in value(unit, "RestartPreventExitStatus").split()
    assert float(value(unit, "TimeoutStopSec")) > Settings().drain_s + LAME_DUCK
    assert int(value(unit, "LimitNOFILE")) > Settings().max_connections


def test_there_is_a_unit_for_each_role_and_they_differ_in_their_start_and_the_devices_that_a_model_needs() -> None:
    assert {unit.stem for unit in UNITS} == set(OF_ROLE)
    assert set(OF_ROLE.values()) == set(Role)
    base = dict(lines(DEPLOY / "headway.service"))
    for unit in UNITS:
        other = dict(lines(unit))
        differing = {name for name in base.keys() | other.keys() if base.get(name) != other.get(name)}
        allowed = {"Description", "ExecStart"}
        if OF_ROLE[unit.stem] in WITHOUT_A_TARGET:
            allowed |= ONLY_WITHOUT_A_TARGET | {"DevicePolicy", "DeviceAllow"}
        assert differing <= allowed


def analyzed(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the path; on Debian and Ubuntu: apt-get install systemd")
    return subprocess.run(
        ["systemd-analyze", command, "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.processes
def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    paths = []
    for unit in UNITS:
        path = tmp_path / f"{unit.stem}{'0' if unit.stem.endswith('@') else ''}.service"
        text = unit.read_text(encoding="utf-8")
        # The program and its user don't exist on this machine.
        path.write_text(text.replace("/srv/headway/env/bin/headway", "/bin/true").replace("User=headway", "User=root"))
        paths.append(str(path))
    verified = analyzed("verify", "--man=no", *paths)
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.mark.processes
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_lets_its_process_do_little(unit: Path) -> None:
    judged = analyzed("security", "--offline=true", str(unit))
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+)", judged.stdout)
    assert rated, judged.stdout + judged.stderr
    assert "Unknown" not in judged.stderr, judged.stderr
    assert float(rated[1]) <= 1.8
