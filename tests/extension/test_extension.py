"""Additions touch what docs/architecture.md says, and nothing else.

A copy of the house gets one addition of each kind; then a process of it is started and asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extension.additions import ADDITIONS, Addition
from tests.test_floors import problems

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
COPIED = ("headway", "docs", "tests", "deploy")
CHECKS = (
    "tests/test_errors.py",
    "tests/test_metrics.py",
    "tests/test_config.py",
    "tests/client/test_messages.py",
    "tests/cli/test_main.py::test_a_bad_setting_is_exit_code_3",
    "tests/backends/test_dialects.py",
    "tests/contracts/test_backend.py::test_starting_tells_how_long_the_warm_up_took[kettle]",
    "tests/contracts/test_broker.py::test_an_admitted_entry_is_claimed_run_and_answered[kettle]",
    "tests/http/test_public.py",
    "tests/http/test_contract_words.py",
    "tests/grpc/test_port.py::test_health_tells_of_the_process_and_of_each_service",
    "tests/grpc/test_port.py::test_reflection_gives_all_services_and_their_files",
    "tests/grpc/test_port.py::test_the_descriptors_are_those_of_the_files",
    "tests/test_docs.py::test_the_table_of_settings_is_that_of_the_settings",
    "tests/test_docs.py::test_every_error_is_in_its_page_with_its_status",
    "tests/test_docs.py::test_every_error_is_in_the_page_of_grpc_with_its_status",
    "tests/test_docs.py::test_every_refusal_is_in_the_page_of_the_ledger",
    "tests/test_docs.py::test_every_metric_is_in_its_page_and_no_other",
    "tests/test_docs.py::test_every_policy_and_dialect_is_in_its_pages_table",
)
"""Tests that compare lists of what there is; the additions must not need more than the table says to pass them."""


def in_it(house: Path, *command: str) -> str:
    return shown(house, sys.executable, *command)


def shown(house: Path, *command: str) -> str:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HEADWAY", "MAKE"))}
    environment = {**outer, "PYTHONPATH": str(house)}
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, root)
    for addition in ADDITIONS:
        addition.make(root)
    in_it(root, "docs/settings.py")
    in_it(root, "deploy/helm/schema.py")
    bin = os.path.relpath(Path(sys.executable).parent, root)
    shown(root, "make", "--silent", "--assume-old=.venv/.ready", "protos", f"BIN={bin}")
    return root


@pytest.fixture(scope="module")
def seen(house: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_it(house, "-m", "tests.extension.probe").splitlines()[-1])
    assert Path(found["where"]).is_relative_to(house)
    return found


def rows() -> dict[str, tuple[set[str], set[str]]]:
    """Rows of the table, by kind: places to touch, and places to say so."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| an? ([A-Za-z ]+) \| (.*) \| (.*)\|$", text, re.MULTILINE)
    return {kind: (places(touch), places(say)) for kind, touch, say in found}


def places(cell: str) -> set[str]:
    return {name for name in re.findall(r"`([\w./]+)`", cell) if "." in name or name.endswith("/")}


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.kind)
def test_the_table_names_all_that_an_addition_touches(addition: Addition) -> None:
    touch, say = rows()[addition.kind]
    new = {f"{Path(name).parent.relative_to('headway')}/" for name in addition.files}
    assert new | {str(Path(name).relative_to("headway")) for name, _, _ in addition.lines} == touch
    assert {*(name for name, _, _ in addition.words), *addition.renewed} == say


def test_the_table_has_no_other_rows() -> None:
    assert set(rows()) == {addition.kind for addition in ADDITIONS}


def test_a_policy_is_known_to_settings_commands_and_a_running_process(seen: dict[str, Any]) -> None:
    assert seen["rule"] == "Patient"
    assert seen["policy"] == "patient"
    assert "Did you mean patient?" in seen["unknown policy"]
    assert "paced|patient|window" in seen["help"]["simulate"]
    assert "20 for patient" in " ".join(seen["help"]["serve"].replace("│", " ").split())


def test_a_broker_is_chosen_by_the_scheme_of_its_url(seen: dict[str, Any]) -> None:
    assert seen["broker"] == "KettleBroker"


def test_a_backend_is_chosen_by_its_kind_of_target(seen: dict[str, Any]) -> None:
    assert seen["backend"] == "hot water"


def test_a_dialect_is_told_by_its_path_and_known_to_the_settings(seen: dict[str, Any]) -> None:
    assert seen["dialect"] == "KettleList"
    assert "kettle-list" in " ".join(seen["help"]["serve"].replace("│", " ").split())


def test_an_error_reaches_the_client_and_the_contract(seen: dict[str, Any]) -> None:
    status, document = seen["error"]
    assert status == 418
    assert (document["error"], document["title"], document["message"]) == ("TEAPOT", "A teapot", "this is a teapot")
    assert seen["refusal"]
    assert "418" in seen["answers"]
    [entry] = seen["contract"]
    assert (entry["status"], entry["when"], entry["retry"]) == (418, "Coffee was asked for.", False)


def test_a_metric_is_exported_and_forgets_models_that_are_gone(seen: dict[str, Any]) -> None:
    assert seen["metric"]
    assert seen["forgotten"]


def test_a_gauge_shows_a_figure_of_the_process(seen: dict[str, Any]) -> None:
    assert seen["gauge"]


def test_a_setting_has_flag_environment_and_bounds(seen: dict[str, Any]) -> None:
    assert seen["setting"] == 5.0
    assert "--steep-s = 601.0: must lie between 1 and 600 s" in seen["bounds"]
    assert "--steep-s" in seen["help"]["serve"]


def test_a_route_is_served_and_in_the_contract(seen: dict[str, Any]) -> None:
    assert seen["route"] == [200, {"tea": "hot"}]
    assert seen["best route"] == seen["route"]
    assert {"/tea", "/tea/best"} <= set(seen["paths"])


def test_a_method_of_grpc_is_answered_and_its_error_has_a_status(seen: dict[str, Any]) -> None:
    assert seen["method of gRPC"] == ["hot oolong", "INVALID_ARGUMENT TEAPOT"]


def test_an_inference_route_has_its_own_answers_and_errors(seen: dict[str, Any]) -> None:
    assert seen["inference route"] == [200, {"cup": "hot oolong"}]
    status, document = seen["inference error"]
    assert (status, list(document)) == (404, ["spilt"])
    assert seen["native error"] == "BAD_REQUEST"
    assert "/brew" in seen["paths"]


def test_a_role_has_a_command_its_parts_and_its_word(seen: dict[str, Any]) -> None:
    assert seen["role"] == ["butler", 200]
    assert not seen["port"]
    assert "--workers" in seen["help"]["butler"]
    assert "--keep-alive-ms" not in seen["help"]["butler"]
    assert "a butler without a broker has nobody to work with" in seen["no broker"]


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.kind)
def test_an_addition_keeps_the_rules_of_the_house(addition: Addition, house: Path) -> None:
    touched = {*addition.files, *(name for name, _, _ in addition.lines)}
    for name in (name for name in touched if name.endswith(".py")):
        module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        assert problems(module, (house / name).read_text(encoding="utf-8")) == [], name


def test_the_tests_that_know_lists_pass_with_all_additions(house: Path) -> None:
    in_it(house, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CHECKS)
