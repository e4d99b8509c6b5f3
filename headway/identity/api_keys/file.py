"""API keys in a TOML file, for services without a database.

    [[keys]]
    id = "4hT9bLq2XwZ0"      # the part of the key after hw_live_
    sha256 = "9f86d081…"     # hex digest of its secret
    user = "alice"
    tenant = "acme"
    tier = "paid"
    models = ["minilm"]      # the only models that it may use; by default all
    rate = 1000              # requests per minute, 0 for no limit; by default, its user's limit applies
    burst = 50               # requests at a time; by default, as many as the rate allows in ten seconds
    created_at = 2026-11-01T12:00:00Z
    expires_at = 2027-02-01T12:00:00Z
    replaces = "…"           # id of the key that it replaces
    model_limits = {minilm = {rate = 60, burst = 5}}    # additional limits for a model; burst is optional

All fields from `models` on are optional. The file can be written by hand, or by `headway keys`, which drops comments. Readers never
see a partial file, because a new file replaces the old one atomically. Writers lock the folder."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headway.core.excerpt import nearest
from headway.errors import SettingError, StoreUnavailable
from headway.identity.api_keys.credential import is_id
from headway.identity.tables import check_model_limit, is_name, read_tables
from headway.model import ApiKey, ModelLimit
from headway.model.identity import check_new
from headway.ports import KeyChanges, KeyMark, KeyStore
from headway.runtime.shared_files import Stamp, locked, stamp

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = "A key has id, sha256, user, tenant and tier, and may have models, rate, burst, created_at, expires_at, replaces and model_limits."


class _ModelRow(msgspec.Struct, forbid_unknown_fields=True):
    rate: float
    burst: float | None = None


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    sha256: str
    user: str
    tenant: str
    tier: str
    models: tuple[str, ...] = ()
    rate: float | None = None
    burst: float | None = None
    created_at: float | datetime = 0.0
    expires_at: float | datetime | None = None
    replaces: str = ""
    model_limits: dict[str, _ModelRow] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[dict[str, object]] = []


class KeysFile(KeyStore):
    """Key store in a TOML file. A key deleted from the file expires. If `create`, adding the first key creates the file."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path, self._create = path, create
        self._stamp: Stamp | None = None
        self._known: dict[str, ApiKey] = {}
        self._changed: dict[str, int] = {}
        self._revision = 0
        self._turn = threading.Lock()  # Held by the thread that is checking the file for changes.

    async def open(self) -> None:
        """Read the file. Raises SettingError if the file can't be read, or contains an invalid key."""
        await asyncio.to_thread(self._read, self._create)

    async def add(self, key: ApiKey) -> None:
        def change(keys: dict[str, ApiKey]) -> bool:
            check_new(key, keys.values())
            keys[key.id] = key
            return True

        await self._change(change)

    async def get(self, id: str) -> ApiKey | None:
        return (await self._load()).get(id)

    async def expire(self, id: str, at: float) -> bool:
        def change(keys: dict[str, ApiKey]) -> bool:
            if id not in keys:
                return False
            end = keys[id].expires_at
            keys[id] = msgspec.structs.replace(keys[id], expires_at=at if end is None else min(at, end))
            return True

        return await self._change(change)

    async def keys(self) -> Sequence[ApiKey]:
        return _in_order((await self._load()).values())

    async def changes(self, since: KeyMark, limit: int) -> KeyChanges | None:
        """Return the changes after a mark. Revisions count the changes since this object was created."""
        return await asyncio.to_thread(self._changes, since, limit)

    async def latest(self) -> KeyMark:
        return (await asyncio.to_thread(self._changes, KeyMark(), 0)).upto

    async def remove_ended(self, before: float, limit: int) -> int:
        """Do nothing: rewriting the file would drop its owner's comments."""
        return 0

    async def close(self) -> None:
        """Do nothing: the file isn't kept open."""

    def _changes(self, since: KeyMark, limit: int) -> KeyChanges:
        """Return the changes after `since`. `latest` passes a limit of 0, and uses only the mark."""
        with self._turn:
            seen = stamp(self._path)
            if seen is None or seen != self._stamp:
                if seen is not None and not seen[1] and self._known:
                    # Some editors empty a file before they write it. If that deleted keys, their bulk jobs would end for good.
                    reason = "is empty, possibly because it is being written; the keys read before stay valid"
                    raise StoreUnavailable(f"{self._path} {reason}")
                self._note(seen, self._read_in_use())
            later = [id for id, revision in self._changed.items() if revision > since.revision]
            page = later[:limit] if limit else later
            keys = [self._known[id] for id in page]
            upto = KeyMark(self._changed[page[-1]]) if page else since
            return KeyChanges(keys, upto, bool(limit) and len(page) == limit)

    def _note(self, seen: Stamp | None, keys: Mapping[str, ApiKey]) -> None:
        gone = [key for id, key in self._known.items() if id not in keys and key.expires_at != 0.0]
        changed = [key for key in _in_order(keys.values()) if self._known.get(key.id) != key]
        for key in (*changed, *(msgspec.structs.replace(key, expires_at=0.0) for key in gone)):
            self._revision += 1
            self._known[key.id] = key
            self._changed.pop(key.id, None)  # Keeps them ordered by revision.
            self._changed[key.id] = self._revision
        self._stamp = seen

    async def _load(self) -> dict[str, ApiKey]:
        return await asyncio.to_thread(self._read_in_use)

    def _read_in_use(self) -> dict[str, ApiKey]:
        """Read the keys in the file. Raises StoreUnavailable if the file has become invalid."""
        try:
            return self._read(self._create)
        except SettingError as exc:
            raise StoreUnavailable(str(exc)) from exc

    def _read(self, missing_is_empty: bool) -> dict[str, ApiKey]:
        if missing_is_empty and not self._path.exists():
            return {}
        return _parsed(self._path)

    async def _change(self, change: Callable[[dict[str, ApiKey]], bool]) -> bool:
        try:
            return await asyncio.to_thread(self._change_now, change)
        except SettingError as exc:
            raise StoreUnavailable(str(exc)) from exc
        except OSError as exc:
            raise StoreUnavailable(f"{self._path} cannot be written: {exc.strerror}") from exc

    def _change_now(self, change: Callable[[dict[str, ApiKey]], bool]) -> bool:
        path = self._path.resolve()
        with locked(path.parent):
            keys = self._read(True)
            changed = change(keys)
            if changed:
                _replace(path, _written(_in_order(keys.values())))
            return changed


def _in_order(keys: Iterable[ApiKey]) -> list[ApiKey]:
    return sorted(keys, key=lambda key: (key.created_at, key.id))


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically. It keeps its permissions; a new file is readable only by its owner."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _written(keys: Sequence[ApiKey]) -> str:
    parts = ["# API keys: digests of their secrets, and whose they are. Written by `headway keys`.\n"]
    for key in keys:
        fields: dict[str, str | None] = {
            "id": _text(key.id),
            "sha256": _text(key.digest.hex()),
            "user": _text(key.user),
            "tenant": _text(key.tenant),
            "tier": _text(key.tier),
            "models": f"[{', '.join(map(_text, key.models))}]" if key.models else None,
            "rate": None if key.rate is None else repr(key.rate),
            "burst": None if key.burst is None else repr(key.burst),
            "created_at": _instant(key.created_at),
            "expires_at": None if key.expires_at is None else _instant(key.expires_at),
            "replaces": _text(key.replaces) if key.replaces else None,
            "model_limits": _model_limits(key.model_limits) if key.model_limits else None,
        }
        lines = [f"{name} = {value}\n" for name, value in fields.items() if value is not None]
        parts.append("".join(["[[keys]]\n", *lines]))
    return "\n".join(parts)


def _model_limits(limits: Sequence[ModelLimit]) -> str:
    tables = []
    for limit in limits:
        burst = "" if limit.burst is None else f", burst = {limit.burst!r}"
        tables.append(f"{_text(limit.model)} = {{rate = {limit.rate!r}{burst}}}")
    return f"{{{', '.join(tables)}}}"


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()  # TOML supports all JSON escapes.


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _parsed(path: Path) -> dict[str, ApiKey]:
    keys: dict[str, ApiKey] = {}
    positions: dict[str, int] = {}
    mistyped = nearest(str(path), ("ledger",))
    hint = f"Did you mean {mistyped[0]}? Otherwise, name" if mistyped else "Name"
    rows = read_tables(path, "keys", _File, "keys", f"{hint} a readable file; headway keys create creates one.")
    for position, row in enumerate(rows, start=1):
        where = f"{path}: keys[{position}]"
        key = _key(where, row)
        if key.id in keys:
            reason = f"is also the id of keys[{positions[key.id]}]"
            raise SettingError(f"{where}.id", key.id, reason, "Remove one of them.")
        keys[key.id], positions[key.id] = key, position
    return keys


def _key(where: str, row: dict[str, object]) -> ApiKey:
    try:
        fields = msgspec.convert(row, _Row)
    except msgspec.ValidationError as exc:
        # A key may have been pasted into the wrong field, so only field names are shown.
        raise SettingError(where, sorted(row), str(exc), _FIELDS) from None
    if not is_id(fields.id):
        reason, hint = "is not 12 letters and digits", "Write the part of the key between hw_live_ and the next _."
        raise SettingError(f"{where}.id", "…", reason, hint)
    if _DIGEST.fullmatch(fields.sha256) is None:
        hint = "Create the key with headway keys create, which also writes its digest."
        raise SettingError(f"{where}.sha256", "…", "is not 64 hexadecimal digits", hint)
    for name in ("user", "tenant", "tier"):
        text = getattr(fields, name)
        if not is_name(text):
            raise SettingError(f"{where}.{name}", text, "must be 1 to 128 printable characters", "Choose another name.")
    for name in ("rate", "burst"):
        number = getattr(fields, name)
        if number is not None and not 0 <= number <= 1e9:
            raise SettingError(f"{where}.{name}", number, "must lie between 0 and 1e9", "Choose a value in that range.")
    for model in fields.models:
        if not is_name(model):
            raise SettingError(f"{where}.models", model, "must be model names", 'For example ["minilm"].')
    limits = [ModelLimit(model, row.rate, row.burst) for model, row in fields.model_limits.items()]
    return ApiKey(
        id=fields.id,
        digest=bytes.fromhex(fields.sha256),
        user=fields.user,
        tenant=fields.tenant,
        tier=fields.tier,
        models=fields.models,
        rate=fields.rate,
        burst=fields.burst,
        created_at=_seconds(where, "created_at", fields.created_at),
        expires_at=None if fields.expires_at is None else _seconds(where, "expires_at", fields.expires_at),
        replaces=fields.replaces,
        model_limits=tuple(check_model_limit(f"{where}.model_limits", limit, fields.models) for limit in limits),
    )


def _seconds(where: str, name: str, value: float | datetime) -> float:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            hint = "Add one, for example 2027-02-01T12:00:00Z."
            raise SettingError(f"{where}.{name}", str(value), "has no time zone", hint)
        return value.timestamp()
    if not 0 <= value <= 2e11:
        hint = "For example 2027-02-01T12:00:00Z."
        raise SettingError(f"{where}.{name}", value, "is neither a date and time nor a Unix time", hint)
    return value
