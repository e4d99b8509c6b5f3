"""Files of certificates that are read again when they change.

The files are looked at every second. What has changed is read one look later, when it has stopped changing, and taken only if all
of it fits together: a certificate whose key is not there yet leaves what was read before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from headway.errors import SettingError
from headway.runtime.certificate_dates import validity
from headway.runtime.file_watcher import Stamp, stamp
from headway.runtime.logger import get_logger
from headway.runtime.pem import Pair, no_certificate
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

CHECK_FILES_EVERY = 1.0
"""Seconds between two looks at the files."""

DAY = 86_400.0
NEAR = 14 * DAY
"""Seconds before its end from which on a certificate is warned of; at most a sixth of its whole time."""

T = TypeVar("T")
_Stamps = tuple[Stamp | None, ...]


async def look_pause() -> None:
    """Wait between two looks."""
    await asyncio.sleep(CHECK_FILES_EVERY)


class OwnCertificate(msgspec.Struct, frozen=True):
    """Facts about the certificate that this process shows.

    Attributes:
        path: path of its file.
        key_path: path of the file that holds its key.
        open_key: rights to that file, if others have any; else empty.
        fingerprint: beginning of its SHA-256.
        begins, ends: time for which it is valid, in Unix seconds.
    """

    path: str
    key_path: str
    open_key: str
    fingerprint: str
    begins: float
    ends: float

    @classmethod
    def of(cls, pair: Pair) -> OwnCertificate:
        """Facts about the certificate of a pair.

        Raises:
            SettingError: it is no certificate.
        """
        try:
            begins, ends = validity(pair.first)
        except ValueError:
            raise no_certificate(pair.setting, pair.path) from None
        return cls(pair.path, pair.key_path, pair.open_key, hashlib.sha256(pair.first).hexdigest()[:16], begins, ends)


class CertificateFiles(ABC, Generic[T]):
    """Base of what is read from files of certificates; a resource that an operator may change.

    Arguments:
        purpose: words behind "certificate" or "certificates" in the log, such as " for the remote API"; empty: for the ports.
        refuser: who refuses a certificate that is not valid, with its verb.
        paths: paths of all files; an empty one is left out.
        now: Unix seconds.
        pause: waits between two looks.

    Attributes:
        current: what was read last, ready for use.

    Raises:
        SettingError: a file cannot be used.
    """

    rereads = ""

    def __init__(
        self,
        purpose: str,
        refuser: str,
        paths: Iterable[str],
        now: Callable[[], float] = time.time,
        pause: Callable[[], Awaitable[None]] = look_pause,
    ) -> None:
        self._purpose, self._refuser = purpose, refuser
        self._now, self._pause = now, pause
        self._paths = tuple(Path(path) for path in dict.fromkeys(paths) if path)
        self._seen = self._read = self._stamps()
        self._told = ""
        self._reminded = -DAY
        self._own: OwnCertificate | None = None
        self.current: T
        self._take(*self._load())

    async def open(self) -> None:
        """Do nothing: the files were read when this was made, so that a start with a wrong one ends at once."""

    def start(self, supervisor: Supervisor) -> None:
        """Start looking at the files."""
        supervisor.start(f"certificates{self._purpose}", self._watch)

    async def close(self) -> None:
        """Do nothing: the loop has ended."""

    async def reread(self) -> None:
        """Read the files now.

        Raises:
            SettingError: they cannot be used; what was read before goes on.
        """
        stamps = self._stamps()
        self._take(*await asyncio.to_thread(self._load))
        self._seen = self._read = stamps
        self._told = ""

    async def look(self) -> None:
        """Look at the files once, and take what has changed since they were read and has settled since the last look."""
        stamps = await asyncio.to_thread(self._stamps)
        settled, self._seen = stamps == self._seen, stamps
        if settled and stamps != self._read:
            try:
                await self.reread()
            except SettingError as exc:
                if str(exc) != self._told:
                    self._told = str(exc)
                    event = f"the changed certificates{self._purpose} cannot be used; those read before go on"
                    log.error(event, error=self._told)
        self._remind()

    @abstractmethod
    def _load(self) -> tuple[T, OwnCertificate | None]:
        """Read and check all files, in a thread: what is ready for use, and the certificate that is shown, if one is.

        Raises:
            SettingError: one cannot be used, or two do not fit.
        """

    @abstractmethod
    def _ends(self, when: float) -> None:
        """Note the Unix second at which the certificate ends that is shown."""

    async def _watch(self) -> None:
        while True:
            await self._pause()
            await self.look()

    def _take(self, loaded: T, own: OwnCertificate | None) -> None:
        self.current, self._own = loaded, own
        self._reminded = -DAY
        if own is None:
            log.info(f"certificates{self._purpose} read", files=[str(path) for path in self._paths])
            return
        self._ends(own.ends)
        log.info(f"certificate{self._purpose} read", file=own.path, sha256=own.fingerprint, ends=_date(own.ends))
        if own.open_key:
            hint = "Leave it to the user that Headway runs as: chmod 600"
            event = f"the key of the certificate{self._purpose} can be read or changed by others"
            log.warning(event, file=own.key_path, mode=own.open_key, hint=hint)
        self._remind()

    def _remind(self) -> None:
        """Log once a day that the certificate ends soon, or is not good now."""
        own, now = self._own, self._now()
        if own is None or now < self._reminded + DAY:
            return
        if not own.begins <= now < own.ends:
            log.error(f"the certificate{self._purpose} is not valid now, and {self._refuser} it", file=own.path,
                      begins=_date(own.begins), ends=_date(own.ends))  # fmt: skip
        elif now >= own.ends - min(NEAR, (own.ends - own.begins) / 6):
            log.warning(f"the certificate{self._purpose} ends soon", file=own.path, ends=_date(own.ends))
        else:
            return
        self._reminded = now

    def _stamps(self) -> _Stamps:
        return tuple(stamp(path) for path in self._paths)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
