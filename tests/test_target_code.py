"""The digest of a target: another one whenever its code may be another, and the same elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.app.target_code import source_folder, target_digest
from headway.config.target import FileTarget, ModuleTarget, ObservedTarget, RemoteTarget, Target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a target that imports from a package beside it."""
    (tmp_path / "parts").mkdir()
    for name in ("model.py", "parts/__init__.py", "parts/words.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def of_file(folder: Path, **changed: object) -> FileTarget:
    return FileTarget(**{"path": folder / "model.py", "attribute": "answer", **changed})  # type: ignore[arg-type]


def test_it_is_of_what_the_target_is_named_and_of_its_arguments(folder: Path) -> None:
    others = (of_file(folder, attribute="other"), of_file(folder, arguments="'big'"), RemoteTarget("http://a/v1"))
    digests = {target_digest(target) for target in (of_file(folder), *others)}
    assert len(digests) == 4
    assert all(len(digest) == 12 for digest in digests)


@pytest.mark.parametrize("name", ["model.py", "parts/words.py", "parts/new.py"])
@pytest.mark.parametrize("target", ["file", "module", "package"])
def test_it_is_of_the_python_files_in_the_folder_and_below(folder: Path, name: str, target: str) -> None:
    spec: Target = of_file(folder)
    if target != "file":
        spec = ModuleTarget("model" if target == "module" else "parts.words", "answer", folder=str(folder))
    before = target_digest(spec)
    (folder / name).write_text("# changed\n")
    assert (target_digest(spec) == before) is (target == "package" and name == "model.py")


def test_it_is_the_same_for_the_same_files_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in folder.rglob("*.py"):
        copy = elsewhere / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (elsewhere / "notes.txt").write_text("no code")
    (elsewhere / ".venv").mkdir()
    (elsewhere / ".venv" / "foreign.py").write_text("not the user's")
    assert target_digest(of_file(folder)) == target_digest(of_file(elsewhere))


def test_a_file_that_was_written_anew_counts_only_where_it_is_watched(folder: Path) -> None:
    spec = of_file(folder)
    before, watched = target_digest(spec), target_digest(spec, stamps=True)
    os.utime(folder / "model.py", ns=(0, 5))
    assert target_digest(spec) == before
    assert target_digest(spec, stamps=True) != watched


def test_of_an_installed_package_it_is_of_the_package_and_of_others_of_the_name_alone(folder: Path) -> None:
    installed = ModuleTarget("msgspec", "json", folder=str(folder))
    assert source_folder(installed) is None
    assert target_digest(installed) != target_digest(ModuleTarget("no_such_module", "json", folder=str(folder)))


def test_nothing_is_known_of_a_target_that_is_only_observed() -> None:
    assert target_digest(ObservedTarget(len, [])) == ""
    assert source_folder(RemoteTarget("http://a/v1")) is None
