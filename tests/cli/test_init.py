"""`headway init`: what it makes works as it says, and nothing is overwritten."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import EXIT_FAILED
from tests.cli.command import ROOT, code_of, run

FILES = {"model.py", "test_model.py", "headway.toml"}


@pytest.mark.processes
@pytest.mark.parametrize("flags", [[], ["--numpy"]], ids=["texts", "numpy"])
def test_what_is_printed_works(tmp_path: Path, flags: list[str]) -> None:
    made = run(["init", "shop", *flags], tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "shop"
    assert {path.name for path in folder.iterdir()} == FILES
    lines = [line.split("#")[0].split() for line in made.stdout.splitlines() if line.startswith("  ")]
    enter, *install, test, check, serve = lines
    assert install == ([["pip", "install", "numpy"]] if flags else [])
    assert enter == ["cd", "shop"]
    tested = subprocess.run(
        [sys.executable, *test[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (tested.returncode, tested.stdout) == (0, "all right\n"), tested.stderr
    checked = run([*check[1:], "--max-batch-size", "4"], folder)
    assert checked.returncode == 0 and checked.stdout.endswith("fit to serve\n"), checked.stdout + checked.stderr
    assert "note:" not in checked.stdout
    assert serve == ["headway", "serve", "model.py:Model"]
    assert run(["serve", "model.py:Model", "--max-batch-size", "0"], folder).returncode == 3
    linted = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,B,UP", "--line-length", "120"]
    told = subprocess.run(linted, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
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


@pytest.mark.parametrize("taken", sorted(FILES))
def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / taken).symlink_to("nowhere")
    (tmp_path / "shop" / "notes").write_text("mine")
    assert code_of(["init", "shop"]) == EXIT_FAILED
    assert f"shop: {taken} is there already; nothing was written" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "shop").iterdir()} == {taken, "notes"}


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
    assert "are there already" in capsys.readouterr().err


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


def test_the_help_has_a_line_for_each_example() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert code_of(["init", "--help"]) == 0
    lines = {line.strip() for line in shown.getvalue().splitlines()}
    assert {"headway init shop", "headway init iris --numpy"} <= lines
