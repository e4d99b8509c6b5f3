from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from headway.runtime import file_watcher


def changes_seen(*files: Path, steps: list[Callable[[], object]]) -> list[bool]:
    """Do one step before each look; returns after which ones a change was seen."""

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

        async def follow() -> None:
            async for _ in file_watcher.watch(files, pause):
                seen.append(at)

        task = asyncio.create_task(follow())
        await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [step in seen for step in range(len(steps))]

    return asyncio.run(main())


def write(file: Path, text: str) -> Callable[[], object]:
    """Writes with a modification time of its own, whatever the file system's grain."""

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
    assert changes_seen(file, steps=[nothing, write(file, "b"), nothing, write(file, "c")]) == [
        False,
        True,
        False,
        True,
    ]


def test_a_file_that_is_away_for_a_while_counts_when_it_is_back(tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text("a")
    assert changes_seen(file, steps=[file.unlink, nothing, write(file, "b"), nothing]) == [False, False, True, False]


def test_a_file_that_was_not_there_counts_when_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "target.py"
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
