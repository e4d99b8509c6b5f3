"""A server of S3's protocol as a child process, with one bucket in memory, and what a process asks it with."""

import subprocess
import sys
from pathlib import Path
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.clients import environments
from tests.e2e.client import PATIENCE, wait_until
from tests.servers.ports import LOOPBACK, Port
from tests.servers.reaper import the_reaper

ENVIRONMENT = "bucket"
BUCKET = "jobs"


class S3Server:
    """`with` starts it and ends it. Skips the test where its environment is missing. `environ` is for a process that asks it."""

    def __init__(self, folder: Path) -> None:
        environments.need(ENVIRONMENT)
        self._port, self._log = Port(), folder / "s3.log"
        home = environments.FOLDER / ENVIRONMENT
        packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        self._url = f"http://{LOOPBACK}:{self._port.number}"
        self._python = str(home / "bin" / "python")
        self.environ = {
            "PYTHONPATH": f"{Path(__file__).parents[2]}:{packages}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "FSSPEC_S3_ENDPOINT_URL": self._url,
        }

    def names(self) -> str:
        with urlopen(f"{self._url}/{BUCKET}?list-type=2", timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def __enter__(self) -> Self:
        command = [self._python, "-m", "moto.server", "-H", LOOPBACK, "-p", str(self._port.number)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        the_reaper().watch(self._process.pid)
        wait_until(self._made)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        the_reaper().forget(self._process.pid)
        self._port.close()

    def _made(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            urlopen(Request(f"{self._url}/{BUCKET}", method="PUT"), timeout=PATIENCE).close()
        except URLError:
            return False
        return True
