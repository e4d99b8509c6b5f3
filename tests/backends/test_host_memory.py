"""Share of the memory in use, read from control groups of both versions and from the machine."""

from pathlib import Path

import pytest

from headway.backends.process.host_memory import READ_EVERY, HostMemory
from headway.runtime.memory_reuse import kept_by_host


class Place:
    """A file system with what is read in it."""

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


def test_of_the_machine_what_is_not_available_is_in_use(place: Place) -> None:
    assert place.memory().used() == pytest.approx(0.4)


def test_the_limit_of_a_container_counts(place: Place) -> None:
    place.write("proc/self/cgroup", "0::/")
    place.group_v2("", 1000, 930, inactive=30)
    assert place.memory().used() == pytest.approx(0.9)


def test_the_limit_of_a_group_above_counts(place: Place) -> None:
    place.write("proc/self/cgroup", "0::/pods/one")
    place.group_v2("pods/one", "max", 100)
    place.group_v2("pods", 1000, 800)
    assert place.memory().used() == pytest.approx(0.8)


def test_version_1_counts_as_well(place: Place) -> None:
    place.write("proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/box\n0::/")
    place.group_v1("box", 1000, 750, inactive=50)
    place.group_v1("", 9223372036854771712, 10**12)
    assert place.memory().used() == pytest.approx(0.7)


def test_a_path_that_is_not_to_be_seen_from_inside_is_that_of_the_root(place: Place) -> None:
    place.write("proc/self/cgroup", "4:memory:/outside/only\n0::/")
    place.group_v1("", 1000, 880)
    assert place.memory().used() == pytest.approx(0.88)


def test_memory_is_as_full_as_the_fuller_of_group_and_machine(place: Place) -> None:
    place.write("proc/self/cgroup", "0::/")
    place.group_v2("", 1000, 500)
    place.machine(available=50)
    assert place.memory().used() == pytest.approx(0.95)


def test_a_system_that_does_not_tell_counts_as_empty(tmp_path: Path) -> None:
    assert HostMemory(lambda: 0.0, tmp_path).used() == 0.0
    place = Place(tmp_path)
    place.write("proc/self/cgroup", "nonsense\n0::/")
    place.write("sys/fs/cgroup/memory.max", "nonsense")
    assert place.memory().used() == 0.0


def test_slots_of_one_process_share_a_reading(place: Place) -> None:
    memory = place.memory()
    assert memory.used() == pytest.approx(0.4)
    place.machine(available=100)
    assert memory.used() == pytest.approx(0.4)
    place.now += READ_EVERY
    assert memory.used() == pytest.approx(0.9)


def test_this_machine_tells_how_full_its_memory_is() -> None:
    assert 0.0 < HostMemory(lambda: 0.0).used() < 1.0


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
