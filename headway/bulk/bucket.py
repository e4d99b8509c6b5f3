"""Bulk files in a bucket: S3, or any other object store that fsspec supports.

Objects can't be appended to. So a file is uploaded in parts, which are joined in the last step, and a log is a series of
objects of about 1 MiB. Each write to a log replaces the last object until it reaches this size. The objects' names
contain the generation of the job's holder, so nobody else writes to them."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from headway.bulk.folder import LEFT_AFTER, BulkFolder, FileReader, FileSink, PartLog, Run

T = TypeVar("T")

SENT_AT_ONCE = 5 << 20  # Bytes of a file to upload at a time. S3 accepts no smaller parts, and at most 10,000 of them.
READ_AT_ONCE = 1 << 20  # Bytes of a file to read at a time.
PART = 1 << 20  # Size in bytes at which a log starts a new object.
MARK = "headway-bulk"  # Object that exists while the bucket is reachable.


class Bucket(BulkFolder):
    """Folder in a bucket, given by a URL such as `s3://bucket/folder`. Raises ImportError if the package for this kind of
    bucket is missing, and ValueError if there is no such kind."""

    def __init__(self, url: str, run: Run | None = None) -> None:
        super().__init__(url, run)
        fsspec.get_filesystem_class(url.partition("://")[0])
        self._url = url
        self._system: Any = None
        self._root = ""

    async def do(self, work: Callable[[], T]) -> T:
        """Run a blocking function. Turn the many kinds of errors that bucket clients raise into OSError."""

        def work_or_oserror() -> T:
            try:
                return work()
            except OSError:
                raise
            except Exception as exc:
                raise OSError(errno.EIO, "the bucket does not respond") from exc

        return await super().do(work_or_oserror)

    def make(self) -> None:
        self._system, root = fsspec.url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._system.pipe_file(self._path_of(MARK), b"")

    def look(self) -> None:
        self._system.info(self._path_of(MARK))

    def reader(self, name: str) -> FileReader:
        file: FileReader = self._system.open(self._path_of(name), "rb", block_size=READ_AT_ONCE, cache_type="readahead")
        return file

    def sink(self, id: str) -> FileSink:
        return BucketSink(self._system, self._path_of(self.file(id)))

    def size_of(self, name: str) -> int:
        return int(self._system.info(self._path_of(name))["size"])

    def begin_log(self, job: str) -> None:
        """Do nothing: a bucket has no folders to create."""

    def log(self, job: str, stem: str) -> PartLog:
        return BucketLog(self._system, self._path_of(self.part(job, stem)))

    def parts(self, job: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._system.find(self._path_of(f"jobs/{job}"))]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path_of(name))

    def remove_log(self, job: str) -> None:
        for name in self.parts(job):
            self.remove(self.part(job, name))

    def remove_left(self) -> None:
        """Do nothing: a lifecycle rule of the bucket removes the parts of unfinished uploads."""

    def list_names(self) -> dict[str, bool]:
        names: dict[str, bool] = {}
        for folder, at in (("files", -1), ("jobs", -2)):
            for path, known in self._system.find(self._path_of(folder), detail=True).items():
                name = path.split("/")[at]
                names[name] = names.get(name, True) and _left(known)
        return names

    def _path_of(self, name: str) -> str:
        return f"{self._root}/{name}"


def _left(known: dict[str, Any]) -> bool:
    """Return True if an object is old enough to be a leftover, according to its listing. False if its age is unknown."""
    at = known.get("LastModified") or known.get("last_modified") or known.get("created")
    return isinstance(at, datetime) and at.timestamp() < time.time() - LEFT_AFTER


class BucketSink(FileSink):
    """Writes a file in a bucket."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self._file: Any = None

    def write(self, content: bytes) -> None:
        if self._file is None:
            self._file = self._system.open(self._path, "wb", block_size=SENT_AT_ONCE, autocommit=False)
        self._file.write(content)

    def commit(self) -> None:
        self._file.close()
        self._file.commit()
        self._file = None

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.closed = True  # Otherwise its finalizer would upload the buffer.
            file.discard()


class BucketLog(PartLog):
    """Log in a bucket."""

    def __init__(self, system: Any, stem: str) -> None:
        self._system, self._stem = system, stem
        self._number, self._content = 0, b""

    def append(self, pieces: Iterable[bytes]) -> None:
        """Replace the last object with one that also contains the new records."""
        content = b"".join((self._content, *pieces))
        self._system.pipe_file(f"{self._stem}.{self._number}.part", content)
        self._content = content
        if len(content) >= PART:
            self._number, self._content = self._number + 1, b""

    def close(self) -> None:
        """Do nothing: no file is open."""
