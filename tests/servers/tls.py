"""A server that speaks TLS alone, knows its users by name, and has a certificate of an authority of our own."""

import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

from tests.servers.ports import LOOPBACK
from tests.servers.redis import RedisServer, lacking

PASSWORD = "only/for:tests@loopback"  # It has to be quoted in a URL.
ADMIN = "admin"
RULES = "~headway:* &headway:* +@all -@dangerous +info +config|get +function|load"
"""Rights of a user unless a test says otherwise."""


class Authority:
    """Makes certificates that nobody else trusts; `certificate` is the path of its own."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            lacking("openssl is not on the path, which makes the certificates")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.certificate = folder / "authority.pem"
        self._key = folder / "authority.key"
        self._openssl(*_NEW, "-keyout", self._key, "-out", self.certificate, "-subj", "/CN=Headway tests")

    def issue(self, name: str, *names: str) -> tuple[Path, Path]:
        """Paths of a certificate for a server of these names, as in `IP:127.0.0.1`, and of its key."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        signed = ("-CA", self.certificate, "-CAkey", self._key)
        alternatives = ("-addext", f"subjectAltName={','.join(names)}", "-addext", "basicConstraints=CA:FALSE")
        self._openssl(*_NEW, "-keyout", key, "-out", certificate, "-subj", f"/CN={name}", *signed, *alternatives)
        return certificate, key

    def _openssl(self, *arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, cwd=self._folder)


class TlsServer(RedisServer):
    """A Redis server over TLS; Valkey's wheel is built without. `rules`: what its user `headway` may do; `default` may do
    nothing. `url` is the administrator's."""

    def __init__(self, folder: Path, rules: str = RULES, durable: bool = False) -> None:
        self.authority = Authority(folder / "certificates")
        certificate, key = self.authority.issue("server", f"IP:{LOOPBACK}", "DNS:localhost")
        super().__init__(
            "redis",
            folder,
            "port 0",
            f"tls-cert-file {certificate}",
            f"tls-key-file {key}",
            f"tls-ca-cert-file {self.authority.certificate}",
            "tls-auth-clients no",
            "user default off",
            f"user {ADMIN} on >{PASSWORD} ~* &* +@all",
            f"user headway on >{PASSWORD} {rules}",
            durable=durable,
        )
        with (folder / "server.conf").open("a", encoding="utf-8") as config:
            config.write(f"tls-port {self.port}\n")
        self.url = self.url_of(ADMIN)

    def url_of(self, user: str = "headway") -> str:
        """rediss://USER:PASSWORD@HOST:PORT/DB with the authority to trust."""
        login = f"{user}:{quote(PASSWORD, safe='')}"
        return (
            f"rediss://{login}@{LOOPBACK}:{self.port}/0?ssl_ca_certs={quote(str(self.authority.certificate), safe='')}"
        )


_NEW = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
