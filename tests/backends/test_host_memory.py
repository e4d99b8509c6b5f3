"""The share of memory in use, from cgroups v1 and v2 and from the machine."""

from pathlib import Path
from typing import Any

import pytest

from headway.backends.process.host_memory import READ_EVERY, HostMemory
from headway.runtime.memory_reuse import kept_by_host


class Place:
    """A fake file system that holds the files to read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def machine(self, available: int) -> None:
        self.write("proc/meminfo", f"MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: {available} kB")

    def group_v2(self, group: str, limit: object, used: int, inactive: int = 0) -> None:
        self.write(f"sys/fs/cgroup/{group}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{group}/memory.current", used)
        self.write(f"sys/fs/cgroup/{group}/memory.stat", f"anon 5\ninactive_file {inactive}")

    def group_v1(self, group: str, limit: int, used: int, inactive: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", limit)
        self.write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", used)
        self.write(f"sys/fs/cgroup/memory/{group}/memory.stat", f"inactive_file 0\ntotal_inactive_file {inactive}")

    def memory(self) -> HostMemory:
        return HostMemory(lambda: self.now, self.root)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.machine(available=600)
    return made


@pytest.mark.parametrize(
    ("cgroup", "groups", "available", "used"),
    [
        ("", [], 600, 0.4),  # Memory that isn't available counts as used.
        ("0::/", [(2, "", 1000, 930, 30)], 600, 0.9),
        ("0::/pods/one", [(2, "pods/one", "max", 100, 0), (2, "pods", 1000, 800, 0)], 600, 0.8),
        (
            "9:cpu,cpuacct:/\n4:memory:/box\n0::/",
            [(1, "box", 1000, 750, 50), (1, "", 9223372036854771712, 10**12, 0)],
            600,
            0.7,
        ),
        ("4:memory:/outside/only\n0::/", [(1, "", 1000, 880, 0)], 600, 0.88),  # It isn't visible in the container.
        ("0::/", [(2, "", 1000, 500, 0)], 50, 0.95),
    ],
)
def test_memory_is_as_full_as_the_fullest_of_machine_and_groups(
    place: Place, cgroup: str, groups: list[tuple[int, str, Any, int, int]], available: int, used: float
) -> None:
    place.machine(available)
    if cgroup:
        place.write("proc/self/cgroup", cgroup)
    for version, *group in groups:
        (place.group_v1 if version == 1 else place.group_v2)(*group)
    assert place.memory().used() == pytest.approx(used)


def test_a_system_that_does_not_tell_counts_as_empty_and_this_one_tells(tmp_path: Path) -> None:
    assert HostMemory(lambda: 0.0, tmp_path).used() == 0.0
    place = Place(tmp_path)
    place.write("proc/self/cgroup", "nonsense\n0::/")
    place.write("sys/fs/cgroup/memory.max", "nonsense")
    assert place.memory().used() == 0.0
    assert 0.0 < HostMemory(lambda: 0.0).used() < 1.0


def test_slots_of_one_process_share_a_reading(place: Place) -> None:
    memory = place.memory()
    assert memory.used() == pytest.approx(0.4)
    place.machine(available=100)
    assert memory.used() == pytest.approx(0.4)
    place.now += READ_EVERY
    assert memory.used() == pytest.approx(0.9)


def test_the_tightest_limit_is_the_memory_that_may_be_used(place: Place) -> None:
    assert place.memory().limit() == 1000 << 10
    place.write("proc/self/cgroup", "0::/pods/one")
    place.group_v2("pods/one", "max", 100)
    assert place.memory().limit() == 1000 << 10
    place.group_v2("pods", 5000, 800)
    assert place.memory().limit() == 5000


@pytest.mark.parametrize(
    ("memory", "kept"), [(0, 64 << 20), (1 << 29, 64 << 20), (2 << 30, 128 << 20), (64 << 30, 256 << 20)]
)
def test_a_small_container_is_not_filled_with_memory_that_is_kept_for_later(memory: int, kept: int) -> None:
    assert kept_by_host(memory) == kept
