"""A server of the S3 protocol as a child process, with one bucket in memory, and its clients' environment."""

import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from tests.clients import environments
from tests.e2e.client import PATIENCE
from tests.servers.child import ChildServer
from tests.servers.ports import LOOPBACK

ENVIRONMENT = "bucket"
BUCKET = "jobs"


class S3Server(ChildServer):
    """`with` starts and stops it. Skips the test if its environment is missing. `environ` is for its clients."""

    def __init__(self, folder: Path) -> None:
        environments.need(ENVIRONMENT)
        super().__init__(folder / "s3")
        home = environments.FOLDER / ENVIRONMENT
        packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        self._url = f"http://{LOOPBACK}:{self.port}"
        python = str(home / "bin" / "python")
        self.argv = [python, "-m", "moto.server", "-H", LOOPBACK, "-p", str(self.port)]
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

    def answers(self) -> bool:
        try:
            urlopen(Request(f"{self._url}/{BUCKET}", method="PUT"), timeout=PATIENCE).close()
        except URLError:
            return False
        return True
