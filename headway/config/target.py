"""Targets: parse the string that names the function, class or remote API to serve. This imports no user code.

    module:attr              ModuleTarget, importable from the working directory or the Python path
    path/to/file.py:attr     FileTarget
    http(s)://host/path      RemoteTarget, a remote API that takes a batch
    grpc(s)://host:port/NAME RemoteTarget, a model that is called over gRPC

`attr` may be dotted (`app:models.small`). A class may get literal arguments: `path/to/file.py:Model(size='small', layers=3)`.

NAME=TARGET names the model, and NAME@VERSION=TARGET one of several versions of it. A table `[models.NAME]` of the settings file
contains the settings of a model, and optionally its target. All its versions share these settings. Models without a table have the
settings of the process. The models served are those named on the command line, or else all models in the file that have a target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.core import arguments
from headway.errors import SettingError, TargetError


@dataclass(frozen=True, slots=True)
class ModuleTarget:
    """Attribute of an importable module. Both names may be dotted. `arguments` are those of a class (see `core.arguments`).
    `folder` is the folder to import from; empty for the working directory."""

    module: str
    attribute: str
    arguments: str = field(default="", repr=False)
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}{_call(self.arguments)}"


@dataclass(frozen=True, slots=True)
class FileTarget:
    """Attribute of a Python file. See ModuleTarget for `arguments`."""

    path: Path
    attribute: str
    arguments: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.attribute}{_call(self.arguments)}"


class RemoteTarget(msgspec.Struct, frozen=True):
    """Remote API. Messages never show the query of its URL, because it may contain a secret."""

    url: str

    @property
    def secure(self) -> bool:
        return self.url.partition("://")[0].lower() in ("https", "grpcs")

    @property
    def over_grpc(self) -> bool:
        return self.url.partition("://")[0].lower() in ("grpc", "grpcs")

    def __str__(self) -> str:
        return shown_target(self.url)

    def __repr__(self) -> str:
        return f"RemoteTarget({str(self)!r})"


class ObservedTarget(msgspec.Struct, frozen=True, eq=False):
    """Target in a test that records the inputs of each batch. `subject` is a target to run in a worker process, or a callable to run
    in a thread of this process."""

    subject: ModuleTarget | FileTarget | Callable[..., Any]
    batches: list[list[Any]]

    def __str__(self) -> str:
        if isinstance(self.subject, ModuleTarget | FileTarget):
            return str(self.subject)
        return str(getattr(self.subject, "__qualname__", None) or type(self.subject).__qualname__)


Target = ModuleTarget | FileTarget | RemoteTarget | ObservedTarget

SCHEMES: Mapping[str, Callable[[str], Target]] = {
    "http": RemoteTarget,
    "grpc": RemoteTarget,
    "grpcs": RemoteTarget,
    "https": RemoteTarget,
}

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}(/[!-~]*)?")  # URL without a scheme.
_CALL = re.compile(r"(?s)(?P<named>.*?:[^\W\d][\w.]*)\((?P<arguments>.*)")  # `arguments` includes the final `)`.


def parse_target(text: str) -> Target:
    """Parse a target. Raises TargetError if it is malformed, its file is missing, or an argument is not a literal."""
    if (called := _called(text)) is not None:
        return _with_own_arguments(text, *called)
    if "://" in text:
        return _remote(text)
    place, colon, attribute = text.rpartition(":")
    if not colon:
        raise _nameless(text)
    if _ADDRESS.fullmatch(text):
        raise _error(text, "is an address without its scheme", f"Write http://{text}, or https:// before it.")
    if not all(part.isidentifier() for part in attribute.split(".")):
        raise _error(text, f"{attribute!r} is not the name of a function or class", "Write module:function.")
    if place.endswith(".py") or "/" in place or "\\" in place:
        return _file(text, Path(place), attribute)
    if not all(part.isidentifier() for part in place.split(".")):
        raise _error(text, f"{place!r} is neither a module nor a .py file", "Write module:attr or path/file.py:attr.")
    return ModuleTarget(place, attribute)


def shown_target(text: str) -> str:
    """Return a target without its secrets: without arguments, and a URL without user, password, query and fragment."""
    if (called := _called(text)) is not None:
        return f"{shown_target(called[0])}(…)"
    scheme, colon, rest = text.partition("://")
    if not colon:
        return "…" if re.search("[@?]", text) else text
    address, *options = re.split("[?#]", rest, maxsplit=1)
    if "@" in scheme or any("@" in option for option in options):
        return "…"  # There is no telling where the password ends.
    _, at, place = address.rpartition("@")
    return f"{scheme}://{'…@' if at else ''}{place}"


def _call(text: str) -> str:
    return f"({arguments.shown(text)})" if text else ""


def _called(text: str) -> tuple[str, str] | None:
    """Split a target into its name and the text after the opening parenthesis, or return None if it has no arguments."""
    match = _CALL.fullmatch(text)
    return None if match is None or "://" in match["named"] else (match["named"], match["arguments"])


def _with_own_arguments(text: str, named: str, call: str) -> Target:
    target = parse_target(named)
    if not call.rstrip().endswith(")"):
        raise _error(
            text, "its arguments are not closed", "Close them with ), and quote the whole target for your shell."
        )
    own = call.rstrip()[:-1]
    try:
        arguments.read(own)
    except arguments.NoArguments as exc:
        raise _error(text, f"{exc}", "For example file.py:Model(size='small', layers=3).") from None
    return replace(target, arguments=own) if isinstance(target, ModuleTarget | FileTarget) else target


def _error(text: str, reason: str, hint: str) -> TargetError:
    shown = shown_target(text)
    # The reason may quote a part of the text that is a password.
    if "://" not in text and shown != text and _called(text) is None:
        reason, hint = "names neither a function nor a URL", "Begin a URL with http:// or https://."
    return TargetError(f"TARGET {shown!r}: {reason}. {hint}")


def _nameless(text: str) -> TargetError:
    if text.endswith(".py"):
        return _error(text, "does not say which function of the file", f"Write {text}:NAME.")
    module, dot, attribute = text.rpartition(".")
    if dot and module and attribute:
        return _error(text, "has no colon between module and function", f"Write {module}:{attribute}.")
    return _error(text, "names no function", "Write module:attr, path/file.py:attr or the URL of a remote batch API.")


def _file(text: str, path: Path, attribute: str) -> FileTarget:
    if path.suffix != ".py":
        raise _error(text, f"{path} is not a .py file", "Write path/file.py:attr, or module:attr with dots.")
    if path.is_dir():
        raise _error(text, f"{path} is a folder", "Name a file in it, such as path/file.py:attr.")
    if not path.is_file():
        raise _error(text, f"there is no file {path}", f"Name one, relative to {Path.cwd()} or absolute.")
    return FileTarget(path, attribute)


def _remote(text: str) -> Target:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:  # The exception may quote a password where the port should be.
        raise _error(text, "is not a valid URL", "Write http://host:port/path.") from None
    if parts.scheme not in SCHEMES:
        *others, last = (f"{scheme}://" for scheme in SCHEMES)
        hint = f"Use {', '.join(others)} or {last}."
        raise _error(text, f"the scheme {parts.scheme!r} is not supported", hint)
    if parts.username is not None or parts.password is not None:
        hint = "Leave it out; credentials are set by remote_headers_file or remote_token."
        raise _error(text, "contains a user name or password", hint)
    if not host:
        raise _error(text, "names no host", "Write http://host:port/path.")
    if not text.isprintable() or " " in text:
        raise _error(text, "contains a space or control character", "Percent-encode it.")
    return SCHEMES[parts.scheme](text)


SHORT = {"version": "model_version"}  # Settings for the short keys of a model's table.
MOST_MODELS = 256
VERSIONS = 'Versions of one model are NAME@VERSION=TARGET each, or a table [models."NAME@VERSION"] each.'
"""Hint for two targets with the same name."""

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:/-]{1,128}(@[A-Za-z0-9_.:/@-]{0,128})?)=(?P<target>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One of several models, or a version of a model. `name` is the name of the model or version. `target` is empty if the process
    doesn't run it, or if the target is a Python object. If `versions` is empty, the setting `model_version` has the version."""

    name: str
    target: str = field(default="", repr=False)
    values: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    versions: tuple[ModelSettings, ...] = ()


def split_target(text: str) -> tuple[str, str] | None:
    """Split NAME=TARGET. Return None if the text names no model."""
    match = _NAMED.fullmatch(text)
    return None if match is None or "://" in match["name"] else (match["name"], match["target"])


def named_targets(texts: Sequence[str], tables: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the target of each model on the command line, or None for a single target without a name. `texts` may also contain
    names of tables, whose models are returned with an empty target. The name of a model means all its versions that have
    tables. Raises SettingError."""
    known = {*tables, *(table.partition("@")[0] for table in tables)}
    if len(texts) == 1 and texts[0] not in known and split_target(texts[0]) is None:
        return None
    targets: dict[str, str] = {}
    for text in texts:
        name, target = (text, "") if text in known else split_target(text) or ("", text)
        if not name:
            hint = "Write NAME=TARGET for each model, for example small=small.py:Model large=large.py:Model."
            raise SettingError("TARGET", shown_target(text), "needs a name, because there are several models", hint)
        if name in targets:
            hint = f"Give each its own name. {VERSIONS}"
            raise SettingError("TARGET", name, "is the name of two models", hint)
        targets[name] = target
    return targets
