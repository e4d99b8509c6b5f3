"""What start-up prints is true of the settings it was started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import Settings
from headway.target import parse_target
from headway.wiring import banner

REMOTE = parse_target("http://127.0.0.1:9100/batch")
LOCAL = parse_target("somewhere:function")


def test_without_keys_it_says_which_tier_everybody_has() -> None:
    shown = banner(Settings(default_tier="free"), LOCAL, 8000, 9000)
    assert "no keys: everybody is free" in shown
    assert "YOUR_KEY" not in shown


def test_with_keys_it_says_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("keys = []")
    shown = banner(Settings(keys=str(file)), LOCAL, 8000, 9000)
    assert f"keys from {file}" in shown
    assert "everybody" not in shown
    assert "-H 'Authorization: Bearer YOUR_KEY'" in shown


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("paced", "at most 40 ms for batch-mates"),
        ("window", "at most 40 ms for batch-mates"),
        ("pid", "aiming at 40 ms of waiting"),
    ],
)
def test_the_wait_is_told_as_the_policy_takes_it(policy: str, words: str) -> None:
    assert words in banner(Settings(policy=policy, max_wait_ms=40.0), LOCAL, 8000, 9000)
    assert "40 ms" not in banner(Settings(policy=policy), LOCAL, 8000, 9000)


def test_one_is_not_many() -> None:
    assert "; 1 GPU worker process\n" in banner(Settings(), LOCAL, 8000, 9000)
    assert "; 2 GPU worker processes\n" in banner(Settings(workers=2), LOCAL, 8000, 9000)
    assert "; 1 call in flight\n" in banner(Settings(), REMOTE, 8000, 9000)
    assert "; 2 calls in flight\n" in banner(Settings(workers=2), REMOTE, 8000, 9000)
