import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from headway.runtime.shared_files import FileWatcher, python_files


def changes_seen(*files: Path, steps: list[Callable[[], object]], folder: Path | None = None) -> list[bool]:
    """Do one step before each look. Returns for each whether a change was seen, in the files or a folder's files."""

    async def main() -> list[bool]:
        at = -1
        done = asyncio.Event()

        async def pause() -> None:
            nonlocal at
            at += 1
            if at == len(steps):
                done.set()
                await asyncio.Event().wait()
            steps[at]()

        seen: list[int] = []

        watcher = FileWatcher((lambda: files) if folder is None else (lambda: python_files(folder)), pause)

        async def follow() -> None:
            async for _ in watcher.changes():
                seen.append(at)

        task = asyncio.create_task(follow())
        await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [step in seen for step in range(len(steps))]

    return asyncio.run(main())


def write(file: Path, text: str) -> Callable[[], object]:
    """Write with a new modification time, even on file systems with coarse timestamps."""

    def act() -> None:
        later = file.stat().st_mtime_ns + 1_000_000_000 if file.exists() else 0
        file.write_text(text)
        if later:
            os.utime(file, ns=(later, later))

    return act


def nothing() -> None: ...


def test_a_change_is_seen_once(tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text("a")
    steps = [nothing, write(file, "b"), nothing, write(file, "c")]
    assert changes_seen(file, steps=steps) == [False, True, False, True]


def test_a_file_that_was_away_for_a_while_or_never_there_counts_when_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text("a")
    assert changes_seen(file, steps=[file.unlink, nothing, write(file, "b"), nothing]) == [False, False, True, False]
    file = tmp_path / "new.py"
    assert changes_seen(file, steps=[nothing, write(file, "a"), nothing]) == [False, True, False]


def test_a_file_replaced_by_another_counts(tmp_path: Path) -> None:
    file, fresh = tmp_path / "target.py", tmp_path / "fresh.py"
    file.write_text("a")
    fresh.write_text("b")
    os.utime(fresh, ns=(file.stat().st_mtime_ns,) * 2)
    assert changes_seen(file, steps=[nothing, lambda: fresh.replace(file), nothing]) == [False, True, False]


def test_changes_of_several_files_at_once_are_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("a")

    def both() -> None:
        write(one, "b")()
        write(two, "b")()

    assert changes_seen(one, two, steps=[both, nothing, write(two, "c")]) == [True, False, True]


def test_of_a_folder_all_python_files_count_and_new_ones_too(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "model.py").write_text("a")
    (tmp_path / "pkg" / "deep" / "part.py").write_text("a")
    steps = [
        write(tmp_path / "pkg" / "deep" / "part.py", "b"),
        write(tmp_path / "notes.txt", "b"),
        write(tmp_path / "pkg" / "new.py", "b"),
        (tmp_path / "model.py").unlink,
        write(tmp_path / "model.py", "c"),
    ]
    assert changes_seen(steps=steps, folder=tmp_path) == [True, False, True, False, True]


def test_what_is_installed_hidden_or_cached_is_passed_by_and_no_folder_has_no_files(tmp_path: Path) -> None:
    for folder in (".git", "__pycache__", "node_modules", "env/lib", "lib/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "part.py").write_text("a")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "model.py").write_text("a")
    assert python_files(tmp_path) == [tmp_path / "model.py"]
    assert python_files(tmp_path / "nowhere") == []
