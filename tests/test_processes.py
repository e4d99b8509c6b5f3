import asyncio
import signal
import subprocess
import sys

import pytest

NOTHING = [sys.executable, "-c", ""]


def test_without_the_mark_no_process_is_started() -> None:
    with pytest.raises(AssertionError, match="has the mark `processes`"):
        subprocess.run(NOTHING, check=True)
    with pytest.raises(AssertionError, match="has the mark `processes`"):
        asyncio.run(asyncio.create_subprocess_exec(*NOTHING))


@pytest.mark.processes
def test_what_a_test_starts_can_be_interrupted_even_when_the_tests_run_in_the_background() -> None:
    show = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"]
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert subprocess.run(show, check=True, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("kind", ["valkey", "memory"])
def test_who_is_given_a_server_by_its_name_has_the_mark(kind: str, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("processes") is not None) == (kind == "valkey")
