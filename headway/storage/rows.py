"""SQL and rows shared by both databases: bulk jobs and their files, API keys, and unfinished requests.

Each statement for bulk jobs is atomic. Ids start with the creation time, so they sort by age. Only the holder with the
current generation can change a job. A client's cancellation has its own column, which holders never write. Unfinished
requests have their own small table, so that the ledger's table only grows at its end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.model import ApiKey, LedgerRecord, ModelLimit
from headway.model.bulk import MOST_ENDED, OPEN_STATUSES, BulkFile, BulkJob, JobStatus, Stored
from headway.ports import BulkStore, KeyChanges, KeyMark

_OPEN = ", ".join(f"'{status.value}'" for status in OPEN_STATUSES)
_FILE = "id, tenant, name, size, purpose, created_at"
_JOB = "document, status, cancelling_at, owner, generation"
_ADD_FILE = f"""
INSERT INTO headway_bulk_files ({_FILE})
SELECT CAST($1 AS TEXT), CAST($2 AS TEXT), CAST($3 AS TEXT), CAST($4 AS BIGINT), CAST($5 AS TEXT), CAST($6 AS DOUBLE PRECISION)
WHERE (CAST($7 AS BIGINT) < 0 OR (
    SELECT coalesce(sum(size), 0) + CAST($4 AS BIGINT) <= CAST($7 AS BIGINT) AND count(*) < CAST($8 AS BIGINT)
    FROM headway_bulk_files WHERE tenant = CAST($2 AS TEXT)
)) AND (CAST($9 AS TEXT) = '' OR EXISTS (
    SELECT 1 FROM headway_bulk_jobs WHERE id = CAST($9 AS TEXT) AND generation = CAST($10 AS BIGINT)
))
ON CONFLICT (id) DO UPDATE SET size = excluded.size RETURNING id
"""  # noqa: S608
_FILE_OF = f"SELECT {_FILE} FROM headway_bulk_files WHERE tenant = $1 AND id = $2"  # noqa: S608
_FILES = f"""
SELECT {_FILE} FROM headway_bulk_files WHERE tenant = $1 AND ($2 = '' OR id < $2) AND ($4 = '' OR purpose = $4)
ORDER BY id DESC LIMIT $3
"""  # noqa: S608
_STORED = "SELECT CAST(coalesce(sum(size), 0) AS BIGINT), count(*) FROM headway_bulk_files WHERE tenant = $1"
_FILE_IDS = "SELECT id FROM headway_bulk_files WHERE id > $1 ORDER BY id LIMIT $2"
_REMOVE_FILE = f"""
DELETE FROM headway_bulk_files WHERE tenant = $1 AND id = $2 AND NOT EXISTS (
    SELECT 1 FROM headway_bulk_jobs WHERE tenant = $1 AND input_file = $2 AND status IN ({_OPEN})
) RETURNING id
"""  # noqa: S608
_OLD_FILES = f"""
SELECT {_FILE} FROM headway_bulk_files WHERE created_at < $1 AND id NOT IN (
    SELECT input_file FROM headway_bulk_jobs WHERE status IN ({_OPEN})
) ORDER BY created_at LIMIT $2
"""  # noqa: S608
_ADD_JOB = f"""
INSERT INTO headway_bulk_jobs (id, tenant, status, input_file, created_at, cancelling_at, owner, generation, held_until, document)
SELECT CAST($1 AS TEXT), CAST($2 AS TEXT), CAST($3 AS TEXT), CAST($4 AS TEXT), CAST($5 AS DOUBLE PRECISION), NULL, '', 0, 0,
    CAST($6 AS TEXT)
WHERE CAST($7 AS BIGINT) > (
    SELECT count(*) FROM headway_bulk_jobs WHERE tenant = CAST($2 AS TEXT) AND status IN ({_OPEN})
)
RETURNING id
"""  # noqa: S608
_FORGET_OLDEST = f"""
DELETE FROM headway_bulk_jobs WHERE id IN (
    SELECT id FROM headway_bulk_jobs WHERE tenant = $1 AND status NOT IN ({_OPEN}) ORDER BY id DESC LIMIT 1000 OFFSET $2
) RETURNING id
"""  # noqa: S608
_OPEN_JOBS = f"""
SELECT {_JOB} FROM headway_bulk_jobs WHERE status IN ({_OPEN}) AND id > $1 ORDER BY id LIMIT $2
"""  # noqa: S608
_JOB_OF = f"SELECT {_JOB} FROM headway_bulk_jobs WHERE tenant = $1 AND id = $2"  # noqa: S608
_JOBS = f"""
SELECT {_JOB} FROM headway_bulk_jobs WHERE tenant = $1 AND ($2 = '' OR id < $2) ORDER BY id DESC LIMIT $3
"""  # noqa: S608
_CANCEL = f"""
UPDATE headway_bulk_jobs SET cancelling_at = coalesce(cancelling_at, CASE WHEN status IN ({_OPEN}) THEN {{now}} END)
WHERE tenant = $1 AND id = $2 RETURNING {_JOB}
"""  # noqa: S608
_CLAIM = f"""
UPDATE headway_bulk_jobs SET owner = $1, generation = generation + 1, held_until = {{now}} + $2
WHERE id = (
    SELECT id FROM headway_bulk_jobs AS free WHERE status IN ({_OPEN}) AND held_until <= {{now}} AND $3 > (
        SELECT count(*) FROM headway_bulk_jobs AS held
        WHERE held.tenant = free.tenant AND held.status IN ({_OPEN}) AND held.held_until > {{now}}
    ) ORDER BY id LIMIT 1
) RETURNING {_JOB}
"""  # noqa: S608
_KEEP = f"""
UPDATE headway_bulk_jobs SET document = $1, status = $2, held_until = {{now}} + $3, owner = $4
WHERE id = $5 AND generation = $6 AND status IN ({_OPEN}) RETURNING {_JOB}
"""  # noqa: S608
_REMOVE_JOBS = f"""
DELETE FROM headway_bulk_jobs WHERE id IN (
    SELECT id FROM headway_bulk_jobs WHERE created_at < $1 AND status NOT IN ({_OPEN}) ORDER BY id LIMIT $2
) RETURNING id
"""  # noqa: S608
_COUNTS = "SELECT status, count(*) FROM headway_bulk_jobs GROUP BY status"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BulkJob).decode


class BulkRows(BulkStore):
    """Bulk store (see `headway.ports.BulkStore`). Subclasses define how to run statements."""

    now: str  # SQL expression for the database's current Unix time in seconds.

    async def _write(self, sql: str, *values: object) -> Sequence[Any]:
        """Run a statement that changes something, and return its rows. Exclude other writers while it runs."""
        raise NotImplementedError

    async def _read(self, sql: str, *values: object) -> Sequence[Any]:
        raise NotImplementedError

    async def add_file(self, file: BulkFile, most: Stored | None = None, holder: BulkJob | None = None) -> bool:
        row = msgspec.structs.astuple(file)
        most_bytes, most_files = most or (-1, 0)
        job, generation = ("", 0) if holder is None else (holder.id, holder.generation)
        return bool(await self._write(_ADD_FILE, *row, most_bytes, most_files, job, generation))

    async def file(self, tenant: str, id: str) -> BulkFile | None:
        return next(iter(_files(await self._read(_FILE_OF, tenant, id))), None)

    async def files(self, tenant: str, after: str, limit: int, purpose: str = "") -> Sequence[BulkFile]:
        return _files(await self._read(_FILES, tenant, after, limit, purpose))

    async def stored(self, tenant: str) -> Stored:
        [[size, number]] = await self._read(_STORED, tenant)
        return Stored(size, number)

    async def file_ids(self, after: str, limit: int) -> Sequence[str]:
        return [id for [id] in await self._read(_FILE_IDS, after, limit)]

    async def remove_file(self, tenant: str, id: str) -> bool:
        return bool(await self._write(_REMOVE_FILE, tenant, id))

    async def old_files(self, before: float, limit: int) -> Sequence[BulkFile]:
        return _files(await self._read(_OLD_FILES, before, limit))

    async def add_job(self, job: BulkJob, most: int, most_ended: int = MOST_ENDED) -> bool:
        values = job.id, job.tenant, job.status.value, job.input_file, job.created_at, _text(job), most
        added = bool(await self._write(_ADD_JOB, *values))
        await self._write(_FORGET_OLDEST, job.tenant, most_ended)
        return added

    async def open_jobs(self, after: str, limit: int) -> Sequence[BulkJob]:
        return [_job(row) for row in await self._read(_OPEN_JOBS, after, limit)]

    async def job(self, tenant: str, id: str) -> BulkJob | None:
        return _first(await self._read(_JOB_OF, tenant, id))

    async def jobs(self, tenant: str, after: str, limit: int) -> Sequence[BulkJob]:
        return [_job(row) for row in await self._read(_JOBS, tenant, after, limit)]

    async def cancel(self, tenant: str, id: str) -> BulkJob | None:
        return _first(await self._write(_CANCEL.format(now=self.now), tenant, id))

    async def claim(self, owner: str, seconds: float, share: int) -> BulkJob | None:
        return _first(await self._write(_CLAIM.format(now=self.now), owner, seconds, share))

    async def keep(self, job: BulkJob, seconds: float) -> BulkJob | None:
        owner = job.owner if seconds else ""
        values = _text(job), job.status.value, seconds, owner, job.id, job.generation
        return _first(await self._write(_KEEP.format(now=self.now), *values))

    async def remove_jobs(self, before: float, limit: int) -> int:
        return len(await self._write(_REMOVE_JOBS, before, limit))

    async def counts(self) -> Mapping[str, int]:
        return {status: int(number) for status, number in await self._read(_COUNTS)}


def _text(job: BulkJob) -> str:
    return _encode(job).decode()


def _files(rows: Sequence[Any]) -> list[BulkFile]:
    return [BulkFile(*row) for row in rows]


def _first(rows: Sequence[Any]) -> BulkJob | None:
    return _job(rows[0]) if rows else None


def _job(row: Sequence[Any]) -> BulkJob:
    """Decode a row with a job. Fields with a column of their own are taken from it, because the JSON document may be older."""
    document, status, cancelling_at, owner, generation = row
    return replace(
        _decode(document), status=JobStatus(status), cancelling_at=cancelling_at, owner=owner, generation=generation
    )


KEY_COLUMNS = "id, digest, user_id, tenant, tier, models, rate, burst, created_at, expires_at, replaces, model_limits"
"""Columns of a key, in the order used by `row_of` and `keys_of`."""
NUMBERS = frozenset(("rate", "burst", "created_at", "expires_at"))  # Columns with fractional values.
NEXT = """
SELECT 1 + max(revision) FROM (
    SELECT coalesce(max(revision), 0) AS revision FROM headway_keys
    UNION ALL SELECT coalesce(max(revision), 0) FROM headway_key_changes
) AS both_tables
"""  # The next revision. Rows may have been removed from either table.
LATEST = """
SELECT revision, mark FROM (
    SELECT revision, mark FROM (SELECT revision, mark FROM headway_key_changes ORDER BY revision DESC LIMIT 1) AS marked
    UNION ALL SELECT coalesce(max(revision), 0), '' FROM headway_keys
) AS both_tables ORDER BY revision DESC, mark DESC LIMIT 1
"""  # The latest change and its mark. Early versions of Headway didn't write marks.
MARKS = 10_000  # Number of changes that keep their marks. Readers that are further behind must reread all keys.
SELECT = f"SELECT {KEY_COLUMNS} FROM headway_keys"  # noqa: S608
_Row = tuple[str, bytes, str, str, str, str, float | None, float | None, float, float | None, str, str]
_WIDTH = 12
_models = msgspec.json.Decoder(tuple[str, ...]).decode
_model_limits = msgspec.json.Decoder(list[tuple[str, float, float | None]]).decode
IN_ORDER = f"{SELECT} ORDER BY created_at, id"
CHANGES = f"""
SELECT {KEY_COLUMNS}, revision, coalesce(mark, '') AS mark
FROM headway_keys LEFT JOIN headway_key_changes USING (revision)
"""  # noqa: S608 - keys with their revision, and its mark if it is still there


def new_mark() -> str:
    """Return a random string that distinguishes a change from others with the same revision."""
    return secrets.token_hex(8)


def changes_of(keys: Sequence[ApiKey], rows: Sequence[Sequence[Any]], since: KeyMark, limit: int) -> KeyChanges:
    """Create the result of `KeyStore.changes` from the first `limit` rows of CHANGES after `since`."""
    upto = KeyMark(rows[-1][_WIDTH], rows[-1][_WIDTH + 1]) if rows else since
    return KeyChanges(keys, upto, len(rows) == limit)


def row_of(key: ApiKey) -> tuple[object, ...]:
    """Return the column values of a key."""
    models = msgspec.json.encode(key.models).decode()
    return (
        key.id, key.digest, key.user, key.tenant, key.tier, models, key.rate, key.burst, key.created_at, key.expires_at,
        key.replaces, msgspec.json.encode([msgspec.structs.astuple(model_limit) for model_limit in key.model_limits]).decode(),
    )  # fmt: skip


def keys_of(rows: Iterable[Sequence[Any]]) -> list[ApiKey]:
    """Convert rows to keys. Raises ValueError, which doesn't quote the row, if a row isn't a key."""
    try:
        sound = msgspec.convert([tuple(row)[:_WIDTH] for row in rows], list[_Row], builtin_types=(bytes,))
        return [_key(row) for row in sound]
    except (msgspec.MsgspecError, UnicodeError):
        raise ValueError("a key's row is invalid") from None


def _key(row: _Row) -> ApiKey:
    id, digest, user, tenant, tier, models, rate, burst, created_at, expires_at, replaces, model_limits = row
    return ApiKey(
        id=id,
        digest=digest,
        user=user,
        tenant=tenant,
        tier=tier,
        models=() if models == "[]" else _models(models),
        rate=rate,
        burst=burst,
        created_at=created_at,
        expires_at=expires_at,
        replaces=replaces,
        model_limits=() if model_limits == "[]" else tuple(ModelLimit(*limit) for limit in _model_limits(model_limits)),
    )


OPEN_COLUMNS = ("id", "user_id", "tenant", "tier", "model", "version", "part_of", "created_at", "due_at")


def open_row(record: LedgerRecord) -> tuple[Any, ...]:
    """Return the row of an unfinished request, with its id as a string and Unix times."""
    return (
        record.id, record.user, record.tenant, record.tier, record.model, record.version, record.part_of,
        record.created_at, record.completed_at,
    )  # fmt: skip


def open_record(row: Sequence[Any]) -> LedgerRecord:
    """Return the unfinished request in a row."""
    id, user, tenant, tier, model, version, part_of, created_at, due_at = row
    return LedgerRecord(
        id=id, user=user, tenant=tenant, tier=tier, model=model, status="queued", created_at=created_at, completed_at=due_at,
        latency_ms=0.0, version=version, part_of=part_of,
    )  # fmt: skip


def together(ended: Sequence[LedgerRecord], open: Sequence[LedgerRecord]) -> Sequence[LedgerRecord]:
    """Combine the ended and open records with one id. Leave out the open record of an ended request."""
    last = {record.tenant: record.completed_at for record in reversed(ended)}
    still_open = (record for record in open if last.get(record.tenant, record.created_at) <= record.created_at)
    return [*ended, *still_open]
