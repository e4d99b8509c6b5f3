"""A bucket in place of the folder: valid names for it, and what is left behind in it."""

import asyncio
import sys
from datetime import UTC, datetime

import pytest

from headway.app.bulk import make_folder
from headway.config import Settings
from headway.errors import SettingError


def test_a_bucket_needs_a_ledger_a_package_and_a_kind_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="ledger"):
        Settings(bulk_dir="s3://jobs")
    Settings(bulk_dir="s3://jobs", ledger="sqlite:///ledger.db")
    pytest.importorskip("fsspec")
    with pytest.raises(SettingError, match="nothing://jobs"):
        make_folder("nothing://jobs")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(SettingError, match="pip install"):
        make_folder("s3://jobs")


def test_what_is_in_a_bucket_is_left_behind_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    old, new = datetime(2026, 1, 1, tzinfo=UTC), datetime.now(UTC)
    objects = {
        "b/files/file-1": {"LastModified": old},
        "b/files/file-2": {"LastModified": new},
        "b/files/file-3": {},
        "b/jobs/batch_1/out.1.0.part": {"LastModified": old},
        "b/jobs/batch_2/out.1.0.part": {"LastModified": old},
        "b/jobs/batch_2/out.1.1.part": {"LastModified": new},
    }

    async def main() -> dict[str, bool]:
        bucket = make_folder("memory://b")
        await bucket.open()
        monkeypatch.setattr(
            bucket._system,  # type: ignore[attr-defined]
            "find",
            lambda path, detail: {name: known for name, known in objects.items() if f"/{name}".startswith(f"{path}/")},
        )
        return await bucket.names()

    left = {"file-1": True, "file-2": False, "file-3": False, "batch_1": True, "batch_2": False}
    assert asyncio.run(main()) == left
