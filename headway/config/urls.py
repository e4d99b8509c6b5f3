"""URLs of brokers and databases: check them, and print them without their passwords."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qsl, unquote

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
"""Schemes of a broker's URL. Those with a double s use TLS."""
OPTIONS = {  # Options that may follow a `?`, as NAME=VALUE joined by `&`, with their meanings.
    "ssl_ca_certs": "file of authorities to trust besides the system's",
    "ssl_certfile": "file of the client's certificate, if the server asks for one",
    "ssl_keyfile": "file of its key, if it is in another file",
    "ssl_check_hostname": "false: accept a certificate of another host",
    "sentinel_username": "user for the Sentinels, if they require one; the user before the host is for the server",
    "sentinel_password": "password of that user",
}
LAST_DATABASE = 2**31 - 1  # Highest database number that servers allow.

_BROKER_EXAMPLE = "For example redis://127.0.0.1:6379/0."
_DATABASE_EXAMPLE = "For example sqlite:///headway.db or postgresql://headway@127.0.0.1/headway."
_ESCAPES = "In a password / is written %2F, ? %3F, # %23, @ %40."
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]{1,253})(?::([0-9]{1,5}))?")
_PLACE = re.compile(r"[A-Za-z0-9_.:,\[\]%-]+(/[A-Za-z0-9_.:-]*)*")

Fault = tuple[str, str]  # Why a URL is wrong, and a hint. Neither quotes the URL, which may contain a password.


def broker_fault(url: str) -> Fault | None:
    """Return what is wrong with a broker's URL, or None if it is valid."""
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in BROKER_FAULTS:
        *others, last = BROKER_FAULTS
        return "is not the URL of a Redis or Valkey", f"Begin it with {'://, '.join(others)}:// or {last}://."
    return BROKER_FAULTS[scheme](url)


def _redis_fault(url: str) -> Fault | None:
    scheme, _, rest = url.partition("://")
    if not (url.isascii() and url.isprintable()) or " " in url:
        return "contains a space or a non-ASCII character", "Percent-encode it."
    authority, _, path = re.split("[?#]", rest)[0].partition("/")
    hosts = authority.rpartition("@")[2]
    for host in hosts.split(","):
        match = _HOST.fullmatch(host)
        if match is None or not 1 <= int(match[2] or 1) <= 65_535:
            return "names no host and port", f"{_BROKER_EXAMPLE} In a password / is written %2F, ? %3F, # %23."
    if scheme.endswith("sentinel") and not re.fullmatch(r"[A-Za-z0-9_.-]+(/[0-9]*)?", path):
        hint = "For example redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster."
        return "names no service of the Sentinels", hint
    if scheme in SCHEMES[:2] and "," in hosts:
        return "names several hosts", f"Begin it with {scheme}+sentinel:// or {scheme}+cluster://, or name one host."
    if scheme in SCHEMES[:2] and not re.fullmatch("[0-9]*", path):
        return "names a database that is not a number", _BROKER_EXAMPLE
    if scheme.endswith("cluster") and path.strip("/0"):
        return "names a database, but a cluster has only one", "Leave it out."
    database = path.partition("/")[2] if scheme.endswith("sentinel") else path.strip("/")
    if float(database or 0) > LAST_DATABASE:
        return "names a database with too high a number", _BROKER_EXAMPLE
    return _option_fault(scheme, rest)


def _option_fault(scheme: str, rest: str) -> Fault | None:
    if "#" in rest:
        return "contains a #", "In a password # is written %23."
    for option in filter(None, rest.partition("?")[2].split("&")):
        name = option.partition("=")[0]
        if name not in OPTIONS:
            return "has an unknown option", f"Known are {', '.join(OPTIONS)}."
        if name.startswith("ssl_") and not scheme.startswith("rediss"):
            secure = scheme.replace("redis", "rediss")
            return f"has the option {name} but does not use TLS", f"Begin it with {secure}://."
        if name.startswith("sentinel_") and not scheme.endswith("sentinel"):
            return f"has the option {name} but names no Sentinels", "Leave it out."
    return None


BROKER_FAULTS: Mapping[str, Callable[[str], Fault | None]] = {**dict.fromkeys(SCHEMES, _redis_fault)}


def database_fault(url: str) -> Fault | None:
    """Return what is wrong with a database's URL, or None if it is valid."""
    if re.fullmatch(r"sqlite:///.+|postgres(ql)?://.+", url) is None:
        return "is not the URL of a database", _DATABASE_EXAMPLE
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        hint = "Write only the path, as in sqlite:///headway.db. Choose a path without these characters."
        return ("contains a ? or #, but SQLite takes no options here", hint) if re.search("[?#]", rest) else None
    if "#" in rest:
        return "contains a #", _ESCAPES
    if re.split("[/?]", rest)[0].count("@") > 1:
        return "contains more than one @ before its database", _ESCAPES
    if not all(re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65_535 for port in _ports(rest)):
        hint = f"Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE. {_ESCAPES}"
        return "names a port that is not a number from 1 to 65535", hint
    return None


def _ports(rest: str) -> Iterator[str]:
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


def shown_url(url: str) -> str:
    """Return a URL in the form that messages may show: without user, password and options. Return "…" if it is malformed."""
    scheme, colon, rest = url.partition("://")
    if scheme == "sqlite" and rest.isprintable():
        return url.partition("?")[0]  # A path cannot contain a password.
    if not colon:
        return "…" if re.search("[@?#]", url) else url
    address, *options = re.split("[?#]", rest, maxsplit=1)
    _, at, place = address.rpartition("@")
    if not re.fullmatch(r"[a-z+]{1,20}", scheme) or any("@" in text for text in options) or not _PLACE.fullmatch(place):
        return "…"
    return f"{scheme}://{'…@' if at else ''}{place}"
