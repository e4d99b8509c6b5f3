"""API keys from a TOML file that holds only their SHA-256.

    [[keys]]
    sha256 = "9f86d081…"     # hex digest of the key's text
    user = "alice"
    tenant = "acme"
    tier = "paid"
    rate = 1000              # requests a minute; left out: 1000, 0: no limit
    burst = 50               # requests at once; left out: ten seconds' worth of the rate

A key is looked up by the digest of what was sent. That keeps no secret in memory and needs no comparison
in constant time: who could learn from the timing of a dictionary lookup would have to find preimages first.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.config import Settings
from headway.errors import SettingError
from headway.identity.callers import make_caller
from headway.model import Caller

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_sha256 = hashlib.sha256


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    user: str
    tenant: str
    tier: str
    rate: float | None = None
    burst: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[dict[str, object]]


class KeysFile:
    """Knows the callers of one file of keys.

    Arguments:
        path: the file.
        settings: for tiers and rates.

    Raises:
        SettingError: the file cannot be read, or one of its keys is wrong; names the key by its position.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        tiers = settings.tier_names
        self._callers: dict[bytes, Caller] = {}
        positions: dict[bytes, int] = {}
        for position, row in enumerate(_rows(path), start=1):
            where = f"{path}: keys[{position}]"
            key = _key(where, row, tiers)
            digest = bytes.fromhex(key.sha256)
            if digest in positions:
                raise SettingError(
                    f"{where}.sha256", key.sha256, f"is the same as of keys[{positions[digest]}]", "Remove one of them."
                )
            positions[digest] = position
            self._callers[digest] = make_caller(
                settings,
                key.user,
                key.tenant,
                key.tier,
                key=key.sha256[:12].lower(),
                rate=key.rate,
                burst=key.burst,
            )

    def __len__(self) -> int:
        return len(self._callers)

    def identify(self, authorization: bytes) -> Caller | None:
        """The caller whose key this `Authorization` header carries (`Bearer KEY`); None for any other."""
        if authorization[:7].lower() != b"bearer ":
            return None
        return self._callers.get(_sha256(authorization[7:].strip()).digest())


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(table, _File).keys
    except OSError as exc:
        raise SettingError("keys", str(path), f"cannot be read: {exc.strerror}", "Name a readable file.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingError("keys", str(path), f"is not valid TOML: {exc}", "Mend the file.") from exc
    except msgspec.ValidationError as exc:
        raise SettingError("keys", str(path), str(exc), "Write every key as a table [[keys]].") from exc


def _key(where: str, row: dict[str, object], tiers: Sequence[str]) -> _Key:
    try:
        key = msgspec.convert(row, _Key)
    except msgspec.ValidationError as exc:
        shown = {name: value for name, value in row.items() if name != "sha256"}
        raise SettingError(where, shown, str(exc), "A key has sha256, user, tenant, tier, rate and burst.") from None
    if _DIGEST.fullmatch(key.sha256) is None:
        # It may be the key itself, pasted by mistake: never show it.
        raise SettingError(f"{where}.sha256", "…", "is not 64 hexadecimal digits", "Write the SHA-256 of the key.")
    if key.tier not in tiers:
        raise SettingError(f"{where}.tier", key.tier, "is no tier", f"Use {' or '.join(tiers)}.")
    for name, text in (("user", key.user), ("tenant", key.tenant)):
        if not text or len(text) > 128 or not text.isprintable():
            raise SettingError(f"{where}.{name}", text, "must be 1 to 128 printable characters", "Choose another name.")
    for name, number in (("rate", key.rate), ("burst", key.burst)):
        if number is not None and not 0 <= number <= 1e9:
            raise SettingError(f"{where}.{name}", number, "must lie between 0 and 1e9", "Choose a value in that range.")
    return key
