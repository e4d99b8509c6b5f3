"""Runs the property tests for some minutes, with other cases than those of a normal run.

    python -m tests.explore --minutes 10 [--seed 7] [pytest's arguments]

Each round has its own seed. After a failure it prints the command that repeats it, and exits with 1. Turn what it found into
an `@example` of the test, or a test. As a pytest plugin (`-p tests.explore`) it selects the tests that draw cases: those of
hypothesis, including state machines, and those marked `draws`.
"""

import argparse
import secrets
import shlex
import subprocess
import sys
import time

import pytest
from hypothesis import is_hypothesis_test, settings

PROFILE = "explore"
DRAWS = "draws"
"""Marks tests that draw cases. Those of hypothesis get it automatically."""
MACHINE = "run_state_machine_as_test"
ENDED, NOTHING_LEFT = 0, 5
"""pytest's exit codes for: all passed; nothing to run."""

settings.register_profile(PROFILE, deadline=None, derandomize=False, print_blob=True, database=None, max_examples=100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    drawing = [item for item in items if draws(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in drawing])
    items[:] = drawing


def draws(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    if function is None:
        return False
    return is_hypothesis_test(function) or MACHINE in function.__code__.co_names or bool(item.get_closest_marker(DRAWS))


def main() -> int:
    """Explore until the time is over, or a test fails."""
    parser = argparse.ArgumentParser(description="Property tests with random seeds.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones count up (default: a new one)")
    options, arguments = parser.parse_known_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    end = time.monotonic() + options.minutes * 60.0
    rounds = 0
    while (left := end - time.monotonic()) > 0.0:
        command = [sys.executable, "-m", "pytest", "-p", "tests.explore", f"--hypothesis-profile={PROFILE}"]
        command += [f"--hypothesis-seed={seed}", "-q", "--no-header", "-x", *arguments]
        print(f"Seed {seed}, {left / 60.0:.1f} minutes left.", flush=True)  # noqa: T201
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            break
        if code not in (ENDED, NOTHING_LEFT):
            print(f"Found with seed {seed}. Again:\n  {shlex.join(command)}")  # noqa: T201
            return 1
        rounds, seed = rounds + 1, seed + 1
    print(f"{rounds} whole rounds, nothing found.")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
