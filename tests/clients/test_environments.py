"""Locks of the clients' environments, and tests whose environment is missing."""

import json
from pathlib import Path

import pytest

from tests.clients import environments

NAMES = environments.names()


@pytest.mark.parametrize("name", NAMES)
def test_each_package_of_a_lock_has_a_hash_and_no_address(name: str) -> None:
    if name == environments.CONTAINER:  # It holds Debian packages.
        return
    text = environments._lock(name).read_text()
    if not environments._of_node(name):
        assert text.count("==") <= text.count("    --hash=sha256:")
        assert all(line[0] in " #" or line.endswith(" \\") for line in text.splitlines())
        assert "://" not in text
        return
    packages = json.loads(text)["packages"]
    packages.pop("")
    assert packages
    assert all("integrity" in package and "resolved" not in package for package in packages.values())


def test_a_test_without_environment_is_skipped_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.delenv(environments.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"environment of openai is not there, .* run `make clients`"):
        environments.run_client("openai", "openai_program.py")
    monkeypatch.setenv(environments.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=r"is not there, .* HEADWAY_TEST_REQUIRE_CLIENTS is set"):
        environments.run_client("openai", "openai_program.py")
