"""URL of the ledger's database: its forms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote

_EXAMPLE = "For example sqlite:///headway.db or postgresql://headway@127.0.0.1/headway."
_ESCAPES = "In a password / is written %2F, ? %3F, # %23, @ %40."


def fault(url: str) -> tuple[str, str] | None:
    """Fault of a URL, and a correct form; None when it can be a database's. The text never quotes the URL."""
    if re.fullmatch(r"sqlite:///.+|postgres(ql)?://.+", url) is None:
        return "is no URL of a database", _EXAMPLE
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        hint = "Write the path alone, as in sqlite:///headway.db; its name can hold neither."
        return ("holds a ? or #, and SQLite has no options here", hint) if re.search("[?#]", rest) else None
    if "#" in rest:
        return "holds a #", _ESCAPES
    if re.split("[/?]", rest)[0].count("@") > 1:
        return "holds more than one @ before its database", _ESCAPES
    if not all(re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65_535 for port in _ports(rest)):
        hint = f"Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE. {_ESCAPES}"
        return "names a port that is no number from 1 to 65535", hint
    return None


def _ports(rest: str) -> Iterator[str]:
    """Texts that stand where a port may stand, in what follows the scheme."""
    place, _, query = rest.partition("?")
    hosts = place.partition("/")[0].rpartition("@")[2].split(",")
    for name, value in parse_qsl(query):
        if name == "port":
            yield from value.split(",")
        elif name == "host":
            hosts += value.split(",")
    for host in hosts:
        port = re.sub(r"^\[[^\]]*\]", "", host).partition(":")[2]
        if port and not host.startswith("/"):
            yield unquote(port)
