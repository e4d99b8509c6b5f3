"""The process that ends process groups after their host."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from headway.backends.process import group_guard
from headway.backends.process.group_guard import GroupGuard

pytestmark = pytest.mark.processes

LONG = 30.0


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_what_is_watched_ends_with_the_guard(group: subprocess.Popen[bytes]) -> None:
    guard = GroupGuard()
    guard.watch(group.pid)
    guard.close()
    assert group.wait(LONG) == -signal.SIGKILL


def test_what_was_forgotten_is_left_alone(group: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        guard = GroupGuard()
        for process in (group, other):
            guard.watch(process.pid)
        guard.forget(group.pid)
        guard.close()
        assert other.wait(LONG) == -signal.SIGKILL
    assert group.poll() is None


def test_one_that_was_killed_is_replaced_and_told_of_all(group: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        guard = GroupGuard()
        guard.watch(group.pid)
        first = guard.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        guard.forget(0)  # It is told of nothing any more, which hurts nobody.
        guard.watch(other.pid)
        assert guard.pid != first
        guard.close()
        assert {group.wait(LONG), other.wait(LONG)} == {-signal.SIGKILL}


def test_without_a_shell_nothing_is_watched(group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_guard, "_SHELL", "/nowhere/sh")
    guard = GroupGuard()
    guard.watch(group.pid)
    assert guard.pid == 0
    guard.forget(group.pid)
    guard.close()
    assert group.poll() is None
