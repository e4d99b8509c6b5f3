"""Builds the parts of a gateway that run bulk jobs: their store and folder, and the line feeder and line runner."""

from __future__ import annotations

import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

from headway.app.input_policy import PolicyResource
from headway.app.stores import postgres_needed
from headway.bulk.feeder import Feeder
from headway.bulk.folder import BulkFolder
from headway.bulk.job_run import JobContext
from headway.bulk.jobs import BulkJobs
from headway.bulk.lines import Turns
from headway.bulk.seat_runner import SeatRunner
from headway.config import Settings
from headway.config.extras import install_hint, needing
from headway.errors import RequestError, SettingError
from headway.gateway.gateway import Gateway
from headway.gateway.ledger_writer import LedgerWriter
from headway.http.openai.bulk_lines import OpenAILines
from headway.model import LedgerRecord
from headway.model.bulk import BulkJob, JobStatus, Stored
from headway.ports import Broker, BulkRunner, BulkStore, Identity, KeyIdentity
from headway.runtime.request_id import new_id


def build_runner(
    settings: Settings, gateway: Gateway, broker: Broker, policy: PolicyResource | None, clock: Callable[[], float]
) -> SeatRunner:
    """Build the line runner. The input policy treats lines as requests of the lowest tier."""
    name, gate = f"{settings.name}-bulk-{secrets.token_hex(4)}", None if policy is None else policy.gate
    return SeatRunner(broker, gateway.served, name, len(settings.tier_names), gate, clock, random.random, new_id)


def make_bulk_jobs(
    settings: Settings,
    gateway: Gateway,
    runner: BulkRunner,
    lines: defaultdict[str, int],
    ledger: LedgerWriter | None,
    identity: Identity,
    clock: Callable[[], float],
) -> BulkJobs:
    """Build the bulk jobs of a gateway without opening them. `lines` counts lines by outcome. `ledger` records each ended job.
    Raises SettingError if a chat template can't be used, or a package is missing."""
    store, folder, turns = make_store(settings), make_folder(settings.bulk_dir), Turns()
    form = OpenAILines(settings, gateway.served, new_id)
    context = JobContext(
        store, folder, runner, form, turns, lambda model: None, clock, time.time, new_id, settings.max_body_bytes,
        settings.bulk_max_lines, Stored(settings.bulk_max_bytes, settings.bulk_max_files), lines,
        partial(allowed_models, identity if isinstance(identity, KeyIdentity) else None),
    )  # fmt: skip

    def ended(job: BulkJob) -> None:
        if ledger is not None:
            ledger.add(job_record(job, time.time()))

    feeder = Feeder(f"{settings.name}-{secrets.token_hex(4)}", context, ended)
    return BulkJobs(store, folder, feeder, settings, clock, time.time)


def allowed_models(keys: KeyIdentity | None, job: BulkJob) -> tuple[str, ...] | None:
    """Return the models that a job's API key allows, or None if the key is no longer valid. If it can't be looked up, return
    the last known models, which are in `job`."""
    if keys is None or not job.key:
        return job.models
    try:
        principal = keys.principal_of(job.key)
    except RequestError:
        return job.models
    return None if principal is None or principal.tenant != job.tenant else tuple(sorted(principal.models))


def make_folder(name: str) -> BulkFolder:
    """Build the folder for bulk files, from a path or the URL of a bucket."""
    if "://" not in name:
        return BulkFolder(name)
    with needing("bucket", "bulk_dir", name, "needs a package that is not installed"):
        from headway.bulk.bucket import Bucket
    try:
        return Bucket(name)
    except (ImportError, ValueError) as exc:
        hint = (
            f"Name a folder, or a bucket whose package is installed. For s3://BUCKET/FOLDER: {install_hint('bucket')}"
        )
        raise SettingError("bulk_dir", name, str(exc), hint) from None


def make_store(settings: Settings) -> BulkStore:
    """Build the job store, in the ledger's database or, without one, in a file in the bulk folder."""
    from headway.storage.sqlite import SqliteBulkStore

    if not settings.ledger:
        return SqliteBulkStore(f"sqlite:///{Path(settings.bulk_dir).absolute()}/jobs.db")
    if settings.ledger.startswith("sqlite:"):
        return SqliteBulkStore(settings.ledger)
    with postgres_needed(settings.ledger):
        from headway.storage.postgres import PostgresBulkStore
    return PostgresBulkStore(settings.ledger)


def job_record(job: BulkJob, at: float) -> LedgerRecord:
    """Return the ledger record for all lines of a bulk job that ended at Unix time `at`."""
    done = job.status is JobStatus.COMPLETED
    return LedgerRecord(
        id=str(UUID(job.id.removeprefix("batch_"))),
        user=job.user,
        tenant=job.tenant,
        tier="bulk",
        model=job.model,
        status="completed" if done else "failed",
        created_at=job.created_at,
        completed_at=at,
        latency_ms=(at - job.created_at) * 1000.0,
        error="" if done else job.status.value.upper(),
        requests=max(job.total, 1),
    )
