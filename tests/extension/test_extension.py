"""Additions touch exactly what docs/architecture.md says.

A copy of the repository gets one addition of each kind. Then one of its processes is started and called.
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

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
COPIED = ("headway", "docs", "tests", "deploy")
CHECKS = (
    "tests/test_errors.py",
    "tests/test_metrics.py::test_every_metric_has_its_name_type_labels_and_value",
    "tests/test_metrics.py::test_every_series_is_there_from_the_start_with_nothing_counted",
    "tests/test_config.py::test_every_field_says_what_it_is_in_its_group",
    "tests/client/test_messages.py",
    "tests/cli/test_main.py::test_a_bad_setting_is_exit_code_3",
    "tests/backends/test_dialects.py",
    "tests/contracts/test_backend.py::test_a_backend_starts_and_runs_batches_and_stops_as_often_as_asked[kettle]",
    "tests/contracts/test_broker.py::test_an_admitted_entry_is_claimed_run_and_answered[kettle]",
    "tests/http/test_public.py",
    "tests/http/test_contract_words.py",
    "tests/test_docs.py::test_the_table_of_settings_is_that_of_the_settings",
    "tests/test_docs.py::test_every_error_is_in_its_page_with_its_status",
    "tests/test_docs.py::test_every_error_is_in_the_page_of_grpc_with_its_status",
    "tests/test_docs.py::test_every_refusal_is_in_the_page_of_the_ledger",
    "tests/test_docs.py::test_every_metric_is_in_its_page_and_no_other",
    "tests/test_docs.py::test_every_policy_and_dialect_is_in_its_pages_table",
)
"""Tests that compare lists with the code; the additions must pass them with only the changes in the table."""


def shown(house: Path, *arguments: str) -> str:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HEADWAY", "MAKE"))}
    command, environment = [sys.executable, *arguments], {**outer, "PYTHONPATH": str(house)}
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("house")
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, root)
    for addition in ADDITIONS:
        addition.make(root)
    shown(root, "docs/settings.py")
    shown(root, "deploy/helm/schema.py")
    return root


def rows() -> dict[str, tuple[set[str], set[str]]]:
    """Return the rows of the table by kind: files to change, and files to document it in."""
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


def test_each_addition_is_seen_in_a_running_process(house: Path) -> None:
    seen: dict[str, Any] = json.loads(shown(house, "-m", "tests.extension.probe").splitlines()[-1])
    assert Path(seen["where"]).is_relative_to(house)
    flags = " ".join(seen["help"]["serve"].replace("│", " ").split())
    # The policy.
    assert (seen["rule"], seen["policy"]) == ("Patient", "patient")
    assert "Did you mean patient?" in seen["unknown policy"]
    assert "paced|patient|window" in seen["help"]["simulate"]
    assert "20 for patient" in flags
    # The broker, by its URL's scheme; the backend, by its kind of target; the dialect, by its path.
    assert (seen["broker"], seen["backend"], seen["dialect"]) == ("KettleBroker", "WATER", "KettleList")
    assert "kettle-list" in flags
    # The error reaches the client and the contract.
    status, document = seen["error"]
    assert status == 418
    assert (document["error"], document["title"], document["message"]) == ("TEAPOT", "A teapot", "this is a teapot")
    assert seen["refusal"]
    assert "418" in seen["answers"]
    [entry] = seen["contract"]
    assert (entry["status"], entry["when"], entry["retry"]) == (418, "Coffee was asked for.", False)
    # The metric is exported, and forgets models that are gone.
    assert seen["metric"] and seen["forgotten"]
    # The setting has a flag, a variable and bounds.
    assert seen["setting"] == 5.0
    assert "--steep-s = 601.0: must lie between 1 and 600 s" in seen["bounds"]
    assert "--steep-s" in flags
    # The route is served, and is in the contract.
    assert seen["best route"] == seen["route"] == [200, {"tea": "hot"}]
    assert {"/tea", "/tea/best"} <= set(seen["paths"])


def test_the_tests_that_know_lists_pass_with_all_additions(house: Path) -> None:
    of_the_contract = ("-k", "not test_public or contract")
    shown(house, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *of_the_contract, *CHECKS)
