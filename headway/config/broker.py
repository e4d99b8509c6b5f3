"""URL of a broker: its forms, and its text without the password."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
"""Schemes of a broker's URL; with two s: through TLS."""
OPTIONS = {
    "ssl_ca_certs": "file of authorities that are trusted besides the system's",
    "ssl_certfile": "file of this process's own certificate, for a server that asks for one",
    "ssl_keyfile": "file of its key, if it is another",
    "ssl_check_hostname": "false: the certificate may be of another host",
    "sentinel_username": "user for the Sentinels, if they ask; the one before the host is for the server",
    "sentinel_password": "its password",
}
"""Options that may follow a `?`, as NAME=VALUE, joined by `&`, and their meanings."""
LAST_DATABASE = 2**31 - 1
"""Highest number of a database that a server understands, however many it has."""

_EXAMPLE = "For example redis://127.0.0.1:6379/0."
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]{1,253})(?::([0-9]{1,5}))?")
_PLACE = re.compile(r"[A-Za-z0-9_.:,\[\]%-]+(/[A-Za-z0-9_.:-]*)*")


Fault = tuple[str, str]
"""Fault of a URL, and a correct form. The text never quotes the URL."""


def fault(url: str) -> Fault | None:
    """Fault of a URL; None when it can be a broker's."""
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in FAULTS:
        *others, last = FAULTS
        return "is not the URL of a Redis or Valkey", f"Begin it with {'://, '.join(others)}:// or {last}://."
    return FAULTS[scheme](url)


def _redis_fault(url: str) -> Fault | None:
    scheme, _, rest = url.partition("://")
    if not (url.isascii() and url.isprintable()) or " " in url:
        return "holds a space or a character beyond ASCII", "Percent-encode it."
    authority, _, path = re.split("[?#]", rest)[0].partition("/")
    hosts = authority.rpartition("@")[2]
    for host in hosts.split(","):
        found = _HOST.fullmatch(host)
        if found is None or not 1 <= int(found[2] or 1) <= 65_535:
            return "names no host and port", f"{_EXAMPLE} In a password / is written %2F, ? %3F, # %23."
    if scheme.endswith("sentinel") and not re.fullmatch(r"[A-Za-z0-9_.-]+(/[0-9]*)?", path):
        return (
            "names no service of the Sentinels",
            "For example redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster.",
        )
    if scheme in SCHEMES[:2] and "," in hosts:
        return "names several hosts", f"Begin it with {scheme}+sentinel:// or {scheme}+cluster://, or name one host."
    if scheme in SCHEMES[:2] and not re.fullmatch("[0-9]*", path):
        return "names a database that is no number", _EXAMPLE
    if scheme.endswith("cluster") and path.strip("/0"):
        return "names a database, of which a cluster has but one", "Leave it out."
    database = path.partition("/")[2] if scheme.endswith("sentinel") else path.strip("/")
    if float(database or 0) > LAST_DATABASE:
        return "names a database that no server has", _EXAMPLE
    return _option_fault(scheme, rest)


def _option_fault(scheme: str, rest: str) -> Fault | None:
    if "#" in rest:
        return "holds a #", "In a password # is written %23."
    for option in filter(None, rest.partition("?")[2].split("&")):
        name = option.partition("=")[0]
        if name not in OPTIONS:
            return "has an option that is not known", f"Known are {', '.join(OPTIONS)}."
        if name.startswith("ssl_") and not scheme.startswith("rediss"):
            return (
                f"has the option {name} but does not speak TLS",
                f"Begin it with {scheme.replace('redis', 'rediss')}://.",
            )
        if name.startswith("sentinel_") and not scheme.endswith("sentinel"):
            return f"has the option {name} but names no Sentinels", "Leave it out."
    return None


FAULTS: Mapping[str, Callable[[str], Fault | None]] = {
    **dict.fromkeys(SCHEMES, _redis_fault),
}
"""Function that finds the fault of a URL, by the scheme of the broker."""


def shown_url(url: str) -> str:
    """`url` fit to be printed: without user, password and options, and hardly anything when it is not well formed."""
    scheme, colon, rest = url.partition("://")
    if scheme == "sqlite" and rest.isprintable():
        return url.partition("?")[0]  # a path, and no place for a password
    if not colon:
        return "…" if re.search("[@?#]", url) else url
    address, *options = re.split("[?#]", rest, maxsplit=1)
    _, at, place = address.rpartition("@")
    if not re.fullmatch(r"[a-z+]{1,20}", scheme) or any("@" in text for text in options) or not _PLACE.fullmatch(place):
        return "…"
    return f"{scheme}://{'…@' if at else ''}{place}"
