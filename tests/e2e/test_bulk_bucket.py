"""Bulk jobs whose files are in a bucket: whoever is killed, each line is answered once, and nothing else is left there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.server import launched, serving
from tests.e2e.test_bulk import TARGET, answers, done, job, submit
from tests.servers.s3 import S3Server

LINES = 1000


def test_each_line_is_answered_once_though_its_feeder_is_killed(tmp_path: Path) -> None:
    with S3Server(tmp_path) as bucket:
        flags = "--bulk-dir", "s3://jobs/headway", "--ledger", "sqlite:///ledger.db", "--max-batch-size", "20"
        with launched(tmp_path, *flags, target=TARGET, environ=bucket.environ) as first:
            first.ready()
            id = submit(first, [f"line {number}" for number in range(LINES)])
            wait_until(lambda: done(first, id) > LINES / 10)
            first.kill()
        with serving(tmp_path, *flags, target=TARGET, environ=bucket.environ, lawful=False) as second:
            before = done(second, id)
            assert f"headway/jobs/{id}/out.1.0.part" in bucket.names()
            wait_until(lambda: job(second, id)["status"] == "completed")
            assert 0 < before < LINES
            assert answers(second, id) == Counter(map(str, range(LINES)))
            wait_until(lambda: len(re.findall("<Key>", bucket.names())) == 3)
