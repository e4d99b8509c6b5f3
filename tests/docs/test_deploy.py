"""Files for operators in docs/deploy: what they start is there, and they say what the pages say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.config import Settings
from headway.model import Role
from tests.docs.pages import ROOT
from tests.docs.parsing import parse_headway

DEPLOY = ROOT / "docs" / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
OF_ROLE = {
    "headway-worker": Role.WORKER,
    "headway-gateway": Role.GATEWAY,
    "headway-controller": Role.CONTROLLER,
    "headway": Role.SERVE,
}
WITHOUT_A_TARGET = {Role.GATEWAY, Role.CONTROLLER}
ONLY_WITHOUT_A_TARGET = {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers"}
"""What user code on a GPU cannot do without."""


def lines(unit: Path) -> list[tuple[str, str]]:
    """The assignments of a unit, in order."""
    text = unit.read_text(encoding="utf-8")
    return [
        (name, value)
        for name, _, value in (line.partition("=") for line in text.splitlines())
        if value and name[0] != "#"
    ]


def value(unit: Path, name: str) -> str:
    [found] = [value for named, value in lines(unit) if named == name]
    return found


def test_there_is_a_unit_for_each_role() -> None:
    assert {unit.stem for unit in UNITS} == set(OF_ROLE)
    assert set(OF_ROLE.values()) == set(Role)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_starts_its_role_again_and_gives_it_time_to_end(
    unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = value(unit, "ExecStart").split()
    assert command[0] == "/srv/headway/env/bin/headway"
    assert command[1] == OF_ROLE[unit.stem].value
    parse_headway(command[1:])
    assert value(unit, "Restart") == "always"
    assert int(value(unit, "RestartSec")) >= 1
    assert "3" in value(unit, "RestartPreventExitStatus").split()
    assert float(value(unit, "TimeoutStopSec")) > Settings().drain_timeout_ms / 1000
    assert int(value(unit, "LimitNOFILE")) > Settings().max_connections


def test_units_differ_in_what_they_start_and_in_the_devices_that_a_model_needs() -> None:
    base = dict(lines(DEPLOY / "headway.service"))
    for unit in UNITS:
        other = dict(lines(unit))
        differing = {name for name in base.keys() | other.keys() if base.get(name) != other.get(name)}
        allowed = {"Description", "ExecStart"}
        if OF_ROLE[unit.stem] in WITHOUT_A_TARGET:
            allowed |= ONLY_WITHOUT_A_TARGET | {"DevicePolicy", "DeviceAllow"}
        assert differing <= allowed


@pytest.mark.processes
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_is_one_and_lets_its_process_do_little(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the path; on Debian and Ubuntu: apt-get install systemd")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+)", judged.stdout)
    assert rated, judged.stdout + judged.stderr
    assert "Unknown" not in judged.stderr, judged.stderr
    assert float(rated[1]) <= 2.5
