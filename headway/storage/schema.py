"""Tables of the database, created by numbered migrations.

Only add migrations at the end. `headway_schema` records which were applied. If a database has more migrations than this version
knows, it is from a later version, and isn't touched.

The primary key of requests starts with the id, by which they are looked up. Ids sort by time, so new rows go to the end of
the index. The completion time distinguishes two requests with the same id from one request that was written twice. The
other index is for removing old rows. The column is called `user_id` because `user` is an SQL keyword. Recent key changes
have random marks, so that readers notice if the database was replaced with a backup or a different database."""

from __future__ import annotations

from headway.errors import SettingError

Steps = tuple[tuple[str, ...], ...]

_BULK = (  # For both databases. `document` is a JSON object with the fields that have no column.
    """
    CREATE TABLE headway_bulk_files (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, size BIGINT NOT NULL, purpose TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL
    )
    """,
    "CREATE INDEX headway_bulk_files_tenant ON headway_bulk_files (tenant, id)",
    """
    CREATE TABLE headway_bulk_jobs (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, input_file TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL, cancelling_at DOUBLE PRECISION, owner TEXT NOT NULL,
        generation BIGINT NOT NULL, held_until DOUBLE PRECISION NOT NULL, document TEXT NOT NULL
    )
    """,
    "CREATE INDEX headway_bulk_jobs_tenant ON headway_bulk_jobs (tenant, id)",
    "CREATE INDEX headway_bulk_jobs_status ON headway_bulk_jobs (status)",
)

_COLUMNS: Steps = (  # For both databases. Migrations are numbered, so add new ones to the end of both lists, not here.
    ("ALTER TABLE headway_requests ADD COLUMN requests INTEGER NOT NULL DEFAULT 1",),
    ("ALTER TABLE headway_requests ADD COLUMN version TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE headway_keys ADD COLUMN model_limits TEXT NOT NULL DEFAULT '[]'",),
    (
        "ALTER TABLE headway_requests ADD COLUMN batch_id TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE headway_requests ADD COLUMN part_of TEXT NOT NULL DEFAULT ''",
    ),
    ("ALTER TABLE headway_requests ADD COLUMN tokens INTEGER",),
)

VERSIONS = "CREATE TABLE headway_schema (version INTEGER PRIMARY KEY)"

SQLITE: Steps = (  # Times are Unix time in seconds. Request ids are the bytes of a UUID. `model_limits` is JSON.
    (
        """
        CREATE TABLE headway_requests (
            id BLOB NOT NULL, user_id TEXT NOT NULL, tenant TEXT NOT NULL, tier TEXT NOT NULL, model TEXT NOT NULL,
            status TEXT NOT NULL, created_at REAL NOT NULL, completed_at REAL NOT NULL, latency_ms REAL NOT NULL,
            batch_size INTEGER NOT NULL, worker TEXT NOT NULL, error TEXT NOT NULL, input TEXT, output TEXT,
            PRIMARY KEY (id, tenant, completed_at)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX headway_requests_completed ON headway_requests (completed_at)",
        """
        CREATE TABLE headway_keys (
            id TEXT PRIMARY KEY, revision INTEGER NOT NULL UNIQUE, digest BLOB NOT NULL, user_id TEXT NOT NULL,
            tenant TEXT NOT NULL, tier TEXT NOT NULL, models TEXT NOT NULL, rate REAL, burst REAL,
            created_at REAL NOT NULL, expires_at REAL, replaces TEXT NOT NULL
        ) WITHOUT ROWID
        """,
    ),
    (
        "ALTER TABLE headway_keys ADD COLUMN changed_at REAL",
        "CREATE INDEX headway_keys_ends ON headway_keys (expires_at)",
        "CREATE TABLE headway_key_changes (revision INTEGER PRIMARY KEY, mark TEXT NOT NULL)",
        """
        INSERT INTO headway_key_changes
        SELECT max(revision), lower(hex(randomblob(8))) FROM headway_keys HAVING count(*) > 0
        """,
    ),
    *_COLUMNS,
    (
        """
        CREATE TABLE headway_open_requests (
            id BLOB NOT NULL, user_id TEXT NOT NULL, tenant TEXT NOT NULL, tier TEXT NOT NULL, model TEXT NOT NULL,
            version TEXT NOT NULL, part_of TEXT NOT NULL, created_at REAL NOT NULL, due_at REAL NOT NULL,
            PRIMARY KEY (id, tenant)
        ) WITHOUT ROWID
        """,
    ),
    _BULK,
)

POSTGRES: Steps = (  # The same tables. Times of requests are `timestamptz`, which is easier to query.
    (
        """
        CREATE TABLE headway_requests (
            id uuid NOT NULL, user_id text NOT NULL, tenant text NOT NULL, tier text NOT NULL, model text NOT NULL,
            status text NOT NULL, created_at timestamptz NOT NULL, completed_at timestamptz NOT NULL,
            latency_ms real NOT NULL, batch_size smallint NOT NULL, worker text NOT NULL, error text NOT NULL,
            input text, output text, PRIMARY KEY (id, tenant, completed_at)
        )
        """,
        "CREATE INDEX headway_requests_completed ON headway_requests (completed_at)",
        """
        CREATE TABLE headway_keys (
            id text PRIMARY KEY, revision bigint NOT NULL UNIQUE, digest bytea NOT NULL, user_id text NOT NULL,
            tenant text NOT NULL, tier text NOT NULL, models text NOT NULL, rate double precision,
            burst double precision, created_at double precision NOT NULL, expires_at double precision,
            replaces text NOT NULL
        )
        """,
    ),
    (
        "ALTER TABLE headway_keys ADD COLUMN changed_at double precision",
        "CREATE INDEX headway_keys_ends ON headway_keys (expires_at)",
        "CREATE TABLE headway_key_changes (revision bigint PRIMARY KEY, mark text NOT NULL)",
        """
        INSERT INTO headway_key_changes
        SELECT max(revision), md5(random()::text) FROM headway_keys HAVING count(*) > 0
        """,
    ),
    *_COLUMNS,
    (
        """
        CREATE TABLE headway_open_requests (
            id uuid NOT NULL, user_id text NOT NULL, tenant text NOT NULL, tier text NOT NULL, model text NOT NULL,
            version text NOT NULL, part_of text NOT NULL, created_at timestamptz NOT NULL, due_at timestamptz NOT NULL,
            PRIMARY KEY (id, tenant)
        )
        """,
    ),
    _BULK,
)


def missing(steps: Steps, version: int, shown: str) -> list[tuple[int, tuple[str, ...]]]:
    """Return the migrations after number `version`, numbered. Raises SettingError if `version` is from a later Headway."""
    if version > len(steps):
        reason = f"has tables of a later version of Headway (migration {version}; this version has {len(steps)})"
        raise SettingError("ledger", shown, reason, "Run that version, or name another database.")
    return list(enumerate(steps, 1))[version:]
