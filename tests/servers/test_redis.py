"""No server outlives its test, and a missing one is reported."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.client import PATIENCE
from tests.servers.redis import REQUIRED, lacking


def test_a_server_ends_with_its_test_run_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.servers.redis import RedisServer\n"
        "with RedisServer('valkey', pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        try:
            assert run.stdout
            server = os.pidfd_open(int(run.stdout.readline()))
        finally:
            run.kill()
    assert select.select([server], [], [], PATIENCE)[0]
    os.close(server)


def test_a_server_that_is_lacking_skips_a_test_unless_none_may_be_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such server"):
        lacking("no such server")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no such server"):
        lacking("no such server")
