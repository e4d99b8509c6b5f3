"""Guard that kills the descendants of workers if this process is killed.

The kernel kills a worker's process along with its host (`child.py: not_outlive`), but not the processes that user code started. So
the host tells a shell each worker's process group. When the host ends, so does the shell's input, and the shell kills the groups.
"""

from __future__ import annotations

import contextlib
import os
import weakref

_SHELL = "/bin/sh"
_SCRIPT = """
trap '' HUP INT TERM
groups=''
while read -r op group; do
  case $op in
    +) groups="$groups $group" ;;
    -) left=''
       for one in $groups; do [ "$one" = "$group" ] || left="$left $one"; done
       groups=$left ;;
  esac
done
for one in $groups; do kill -s KILL -- "-$one"; done
"""
"""The guard's script. It ignores signals from a terminal or service manager, because workers may still be draining."""


class GroupGuard:
    """Guards process groups, using a process that starts with the first group. Does nothing if the system has no shell."""

    def __init__(self) -> None:
        self._groups: list[int] = []
        self.pid = 0
        self._release: weakref.finalize[[int], GroupGuard] | None = None
        self._fd = -1

    def watch(self, group: int) -> None:
        """Guard a process group: kill it if this process dies."""
        self._groups.append(group)
        if self.pid and self._ended():
            self.close()
        if self.pid:
            self._tell(f"+ {group}\n")
        else:
            self._start()

    def forget(self, group: int) -> None:
        """Stop guarding a group that has ended, because its number may be reused."""
        with contextlib.suppress(ValueError):
            self._groups.remove(group)
        self._tell(f"- {group}\n")

    def close(self) -> None:
        """Kill the groups that are still guarded, and end the guard."""
        if self._release is not None:
            self._release()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.pid, self._fd, self._release = 0, -1, None

    def _ended(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def _start(self) -> None:
        reading, writing = os.pipe()
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        try:
            self.pid = os.posix_spawn(
                _SHELL,
                [_SHELL, "-c", _SCRIPT, "headway-guard"],
                {"PATH": os.defpath},
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *quiet],
                setsid=True,
            )
        except (OSError, NotImplementedError):
            os.close(writing)
            return
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        self._fd = writing
        self._release = weakref.finalize(self, os.close, writing)
        for group in self._groups:
            self._tell(f"+ {group}\n")

    def _tell(self, line: str) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # It has ended or doesn't read. The next group starts another guard.
                os.write(self._fd, line.encode())
