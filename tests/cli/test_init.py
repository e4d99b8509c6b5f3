import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli import EXIT_FAILED
from tests.cli.command import ROOT, code_of, run

FILES = {"model.py", "test_model.py", "headway.toml"}


@pytest.mark.processes
@pytest.mark.parametrize("flags", [[], ["--numpy"]], ids=["texts", "numpy"])
def test_what_is_printed_works(
    tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_of(["init", "shop", *flags]) == 0
    folder = tmp_path / "shop"
    assert {path.name for path in folder.iterdir()} == FILES
    lines = [line.split("#")[0].split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    enter, *install, test, check, serve = lines
    assert install == ([["pip", "install", "numpy"]] if flags else [])
    assert enter == ["cd", "shop"]
    given: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "check": False, "timeout": 120}
    tested = subprocess.run([sys.executable, *test[1:]], env={**os.environ, "PYTHONPATH": str(ROOT)}, **given)
    assert (tested.returncode, tested.stdout) == (0, "all right\n"), tested.stderr
    checked = run([*check[1:], "--max-batch-size", "4"], folder)
    assert checked.returncode == 0 and checked.stdout.endswith("fit to serve\n"), checked.stdout + checked.stderr
    assert "note:" not in checked.stdout
    assert serve == ["headway", "serve", "model.py:Model"]
    linted = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,B,UP", "--line-length", "120"]
    told = subprocess.run(linted, **given)
    assert told.returncode == 0, told.stdout


def test_the_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.config import load

    monkeypatch.chdir(tmp_path)
    assert code_of(["init", "shop-2"]) == 0
    settings = load({}, environ={}, file=tmp_path / "shop-2" / "headway.toml")
    assert (settings.model, settings.max_batch_size) == ("shop-2", 32)
    lines = (tmp_path / "shop-2" / "headway.toml").read_text()
    named = re.sub(r"^# (\w+ = )", r"\1", lines, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(named)
    assert load({}, environ={}, file=tmp_path / "all.toml").workers == 2


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for taken in sorted(FILES):
        folder = tmp_path / f"has-{taken}"
        folder.mkdir()
        (folder / taken).symlink_to("nowhere")
        assert code_of(["init", folder.name]) == EXIT_FAILED
        assert f"{folder.name}: already there: {taken}. Nothing was written" in capsys.readouterr().err
        assert {path.name for path in folder.iterdir()} == {taken}


def test_a_folder_that_is_there_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path / "shop")
    assert code_of(["init", "."]) == 0
    told = capsys.readouterr().out
    assert "cd " not in told and {path.name for path in (tmp_path / "shop").iterdir()} == FILES
    assert 'model = "shop"' in (tmp_path / "shop" / "headway.toml").read_text()
    assert code_of(["init", "."]) == EXIT_FAILED
    assert "already there: model.py, test_model.py, headway.toml." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "part"), [("sh op", "letters, digits"), ("/", "letters, digits"), ("taken/shop", "taken")]
)
def test_a_folder_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert code_of(["init", name]) == EXIT_FAILED
    assert part in capsys.readouterr().err
