"""A server that only speaks TLS, knows its users by name, and has a certificate from our own authority."""

from pathlib import Path
from urllib.parse import quote

from tests.authority import Authority
from tests.servers.ports import LOOPBACK
from tests.servers.redis import RedisServer

PASSWORD = "only/for:tests@loopback"  # Must be quoted in a URL.
ADMIN = "admin"
UNNAMED = "127.0.0.2"
"""An address of the server that its certificate doesn't name."""
RULES = "~headway:* &headway:* +@all -@dangerous +info +config|get +function|load"
"""A user's rights unless a test changes them."""


class TlsServer(RedisServer):
    """Redis over TLS, which Valkey's wheel lacks. User `default` may do nothing; `url` is the administrator's."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        certificate, key = self.authority.issue("server")
        super().__init__(
            "redis",
            folder,
            f"bind {LOOPBACK} {UNNAMED}",
            "port 0",
            f"tls-cert-file {certificate}",
            f"tls-key-file {key}",
            f"tls-ca-cert-file {self.authority.file}",
            "tls-auth-clients no",
            "user default off",
            f"user {ADMIN} on >{PASSWORD} ~* &* +@all",
            f"user headway on >{PASSWORD} {RULES}",
        )
        with (folder / "server.conf").open("a", encoding="utf-8") as config:
            config.write(f"tls-port {self.port}\n")
        self.url = self.url_of(ADMIN)

    def url_of(self, user: str = "headway") -> str:
        """rediss://USER:PASSWORD@HOST:PORT/DB, with the authority to trust."""
        login, trusted = f"{user}:{quote(PASSWORD, safe='')}", quote(str(self.authority.file), safe="")
        return f"rediss://{login}@{LOOPBACK}:{self.port}/0?ssl_ca_certs={trusted}"
