"""`headway keys`, in this process."""

import asyncio
import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.cli import keys as command
from headway.cli import main
from headway.errors import SettingError
from headway.identity.api_keys.credential import digest, parse
from headway.identity.api_keys.file import KeysFile
from headway.model import ApiKey, ModelLimit

WHO = ("--user", "alice", "--tenant", "acme", "--tier", "paid")
TWO_RATES = ("--model-rate", "big=1", "--model-rate", "big=2")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without settings from outside the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "KEYS", "LEDGER", "TIERS", "DEFAULT_TIER"):
        monkeypatch.delenv(f"HEADWAY_{name}", raising=False)


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str]) -> Any:
    def act(*arguments: str, file: str = "keys.toml") -> Result:
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments, *(["--keys", file] if file else [])])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return act


def kept(path: str = "keys.toml") -> Sequence[ApiKey]:
    return asyncio.run(KeysFile(Path(path)).keys())


def test_a_key_is_shown_once_and_its_digest_is_kept(keys: Any) -> None:
    began = time.time()
    done = keys("create", *WHO, "--rate", "20/s", "--burst", "5", "--models", "a, b", "--expires", "90d")
    assert done.code == 0
    found = parse(done.out.strip().encode())
    assert found is not None
    assert "Running gateways accept the key within about two seconds. It cannot be shown again." in done.err
    [key] = kept()
    assert (key.id, key.digest) == (found[0], digest(found[1]))
    assert (key.user, key.tenant, key.tier, key.models) == ("alice", "acme", "paid", ("a", "b"))
    assert (key.rate, key.burst, key.replaces) == (1200.0, 5.0, "")
    assert began - 1 <= key.created_at <= time.time() + 1
    assert key.expires_at == pytest.approx(key.created_at + 90 * 86_400)
    assert found[1].decode() not in Path("keys.toml").read_text()


def test_limits_for_models_are_kept_and_listed(keys: Any) -> None:
    keys("create", *WHO)
    assert "MODEL LIMITS" not in keys("list").out
    of_big = "--model-rate", "big=20/s", "--model-burst", "big=5"
    assert keys("create", *WHO, *of_big, "--model-rate", "a=b=60").code == 0
    _, key = kept()
    assert key.model_limits == (ModelLimit("big", 1200.0, 5.0), ModelLimit("a=b", 60.0))
    assert (key.models, key.rate, key.burst, key.expires_at) == ((), None, None, None), "what is left out is left open"
    listed = keys("list").out.splitlines()
    assert listed[0].endswith("MODEL LIMITS")
    assert listed[2].endswith("big=1200 (burst 5),a=b=60")
    [_, shown] = json.loads(keys("list", "--json").out)["keys"]
    assert shown["model_limits"] == {"big": {"rate": 1200.0, "burst": 5.0}, "a=b": {"rate": 60.0, "burst": None}}
    keys("rotate", key.id)
    assert kept()[2].model_limits == key.model_limits


def test_the_list_shows_the_rate_that_holds(keys: Any) -> None:
    for rate in ((), ("--rate", "60"), ("--rate", "0")):
        keys("create", *WHO, *rate)

    def shown(*flags: str) -> list[str]:
        head, *rows = keys("list", *flags).out.splitlines()
        return [row[head.index("RATE") : head.index("BURST")].strip() for row in rows]

    assert shown() == ["1000 (user)", "60", "no limit"]
    assert shown("--user-rate", "0") == ["no limit (user)", "60", "no limit"]
    assert [row["rate"] for row in json.loads(keys("list", "--json").out)["keys"]] == [None, 60.0, 0.0]


def test_the_list_has_no_secrets(keys: Any) -> None:
    Path("keys.toml").write_text("")
    assert keys("list").out == "no keys\n"
    assert json.loads(keys("list", "--json").out) == {"keys": []}
    assert keys("create", *WHO).code == 0
    text = keys("create", *WHO, "--expires", "45s", "--rate", "0").out.strip()
    secrets = [text, *(key.digest.hex() for key in kept())]
    table, listed = keys("list").out, keys("list", "--json").out
    for key in kept():
        assert key.id in table
    rows = json.loads(listed)["keys"]
    assert [row["id"] for row in rows] == [key.id for key in kept()]
    assert {row["state"] for row in rows} == {"live"}
    assert [row["expires_at"] is None for row in rows] == [True, False]
    for secret in secrets:
        assert secret[-28:] not in table + listed
        assert secret not in table + listed


@pytest.mark.parametrize("form", ["{id}", "hw_live_{id}", "{text}"])
def test_a_revoked_key_has_ended(keys: Any, form: str) -> None:
    text = keys("create", *WHO).out.strip()
    [key] = kept()
    named = form.format(id=key.id, text=text)
    done = keys("revoke", named)
    assert (done.code, done.out) == (0, f"{key.id} revoked: alice of acme\n")
    [ended] = kept()
    assert ended.expires_at == 0.0, "whatever a gateway's clock says"
    assert "had ended already" in keys("revoke", named).out
    assert kept() == [ended]
    assert json.loads(keys("list", "--json").out)["keys"][0]["state"] == "revoked"


def test_rotation_makes_a_second_key_and_gives_the_first_an_end(keys: Any) -> None:
    keys("create", *WHO, "--rate", "60", "--models", "m", "--expires", "10d")
    [old] = kept()
    done = keys("rotate", old.id, "--grace", "2h")
    found = parse(done.out.strip().encode())
    assert found is not None
    first, second = kept()
    assert first.id == old.id
    assert first.expires_at == pytest.approx(second.created_at + 7200)
    assert (second.id, second.replaces) == (found[0], old.id)
    assert (second.user, second.tenant, second.tier) == ("alice", "acme", "paid")
    assert (second.models, second.rate, second.burst) == (("m",), 60.0, None)
    assert second.expires_at == pytest.approx(second.created_at + 10 * 86_400)


def test_no_more_than_two_keys_of_a_line_live(keys: Any) -> None:
    keys("create", *WHO)
    keys("create", *WHO)
    first, other = kept()
    keys("rotate", first.id)
    second = next(key for key in kept() if key.replaces == first.id)
    for id in (first.id, second.id):
        refused = keys("rotate", id)
        assert refused[:2] == (1, "")
        assert f"{first.id} and {second.id} are both live, and no more may be; wait until one expires" in refused.err
    assert keys("rotate", other.id).code == 0, "another line"
    keys("revoke", first.id)
    assert keys("rotate", first.id).code == 1, "one that has ended"
    assert "which expires immediately" in keys("rotate", second.id, "--grace", "0s", "--expires", "1d").err
    assert next(key for key in kept() if key.id == second.id).expires_at == 0.0, "whatever a gateway's clock says"
    third = next(key for key in kept() if key.replaces == second.id)
    assert third.expires_at == pytest.approx(third.created_at + 86_400)
    assert keys("rotate", third.id).code == 0, "a grace of nothing leaves one"


def test_who_is_replaced_once_more_is_told_to_say_how_long_the_new_one_lives(keys: Any) -> None:
    """By then, the first key's expiry is that of its grace period."""
    keys("create", *WHO)
    [first] = kept()
    assert f"replaces {first.id}, which expires at 20" in keys("rotate", first.id, "--grace", "1h").err
    second = next(key for key in kept() if key.replaces == first.id)
    assert second.expires_at is None
    keys("revoke", second.id)
    refused = keys("rotate", first.id)
    assert (refused.code, refused.out) == (1, "")
    assert f"{first.id} was replaced by {second.id} and ends at 20" in refused.err
    assert "give --expires for the lifetime of the new key" in refused.err
    done = keys("rotate", first.id, "--grace", "90d", "--expires", "10d")
    third = max(kept(), key=lambda key: key.created_at)
    assert third.expires_at == pytest.approx(third.created_at + 10 * 86_400)
    [ended] = [key for key in kept() if key.id == first.id]
    assert ended.expires_at is not None
    assert ended.expires_at == pytest.approx(second.created_at + 3600), "sooner than the grace"
    told = datetime.fromtimestamp(int(ended.expires_at), UTC).isoformat().replace("+00:00", "Z")
    assert f"which expires at {told}" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("create", *WHO[:4], "--tier", "gold"), "--tier = 'gold': is not a tier. Use enterprise or"),
        (("create", "--tenant", "b"), "--user, --tier = '': must be given"),
        (("create", "--tenant", "b", "--tier", "paid", "--user", "a" * 129), "must be 1 to 128 printable"),
        (("create", *WHO[:2], "--tenant", "a\nb", *WHO[4:]), "--tenant = 'a\\nb': must be"),
        (("create", *WHO, "--models", "a,,b"), "--models = '': must be"),
        (("create", *WHO, "--rate", "fast"), "--rate = 'fast': is not a rate. For example 1000/min"),
        (("create", *WHO, "--rate", "999999999/s"), "is not a rate"),
        (("create", *WHO, "--burst", "5"), "--burst = '5': has no effect without"),
        (("create", *WHO, "--rate", "0/min", "--burst", "5"), "--burst = '5': has no effect with a rate of 0"),
        (("create", *WHO, "--rate", "60", "--burst", "0"), "--burst = '0': is not a whole number"),
        (("create", *WHO, "--expires", "-3d"), "--expires = '-3d': is not a duration"),
        (("create", *WHO, "--expires", "0d"), "--expires = '0d': must lie between"),
        (("create", *WHO, "--expires", "99999d"), "must lie between 1s and 36500d"),
        (("create", *WHO, "--expires", "tomorrow"), "For example 90d, 12h, 30m or 45s"),
        (("create", *WHO, "--model-rate", "60"), "--model-rate = '60': lacks a model or a value"),
        (("create", *WHO, "--model-rate", "big="), "--model-rate = 'big=': lacks a model or a value"),
        (("create", *WHO, "--model-rate", "big=fast"), "--model-rate = 'big=fast': is not a rate"),
        (("create", *WHO, "--model-rate", "big=0"), "--model-rate.big.rate = 0"),
        (("create", *WHO, *TWO_RATES), "--model-rate = 'big=2': is a second value for the model"),
        (("create", *WHO, "--model-burst", "big=2"), "--model-burst = 'big=2': has no effect without a rate for this"),
        (
            ("create", *WHO, *TWO_RATES[:2], "--model-burst", "big=0"),
            "--model-burst = 'big=0': is not a whole number above 0",
        ),
        (
            ("create", *WHO, *TWO_RATES[:2], "--models", "small"),
            "--model-rate = 'big': is not a model that this credential may",
        ),
        (("rotate", "a" * 12, "--grace", "soon"), "--grace = 'soon': is not a duration"),
        (("revoke", "canary"), "ID = '…': is not the id of a key"),
        (("rotate", "canary"), "headway keys list shows the ids"),
    ],
)
def test_what_is_wrong_is_said_with_value_and_mend(keys: Any, arguments: Sequence[str], says: str) -> None:
    done = keys(*arguments)
    assert (done.code, done.out) == (3, "")
    assert says in done.err
    assert "canary" not in done.err
    assert not Path("keys.toml").exists()


def test_revoking_or_rotating_an_unknown_key_fails_and_names_it(keys: Any) -> None:
    keys("create", *WHO)
    for action in ("revoke", "rotate"):
        done = keys(action, "a" * 12)
        assert (done.code, done.out) == (1, "")
        assert f"there is no key with the id {'a' * 12}" in done.err


def test_no_place_or_one_that_will_not_do(keys: Any) -> None:
    nowhere = keys("list", file="")
    assert (nowhere.code, nowhere.out) == (3, "")
    assert "--keys = ''" in nowhere.err and "--ledger URL" in nowhere.err
    missing = keys("list", file="missing.toml")
    assert missing.code == 3
    assert "--keys = 'missing.toml': cannot be read" in missing.err
    assert keys("create", *WHO, file="no/folder/keys.toml").code == 1


def test_a_database_that_is_away_is_said_to_be(keys: Any) -> None:
    done = keys("list", "--ledger", "postgresql://user:canary@127.0.0.1:1/headway", file="")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("headway: ")
    assert "canary" not in done.err


def test_a_service_token_is_kept_nowhere(keys: Any, tmp_path: Path) -> None:
    done = keys("create", "--service", file="")
    assert done.code == 0
    assert re.fullmatch(r"hw_svc_[0-9A-Za-z]{12}_[0-9A-Za-z]{28}\n", done.out)
    assert "HEADWAY_ADMIN_TOKEN" in done.err
    assert list(tmp_path.iterdir()) == []
    assert keys("create", "--service", *WHO, file="").code == 2


def test_a_time_to_expiry_is_read_in_days_hours_minutes_or_seconds() -> None:
    for text, seconds in (("90d", 7_776_000), ("12h", 43_200), ("30m", 1800), ("45s", 45), ("1.5h", 5400)):
        assert command.duration("--expires", text, 1.0) == seconds
    for text in ("", "90", "d", "90 d", "1h30m", "\N{ARABIC-INDIC DIGIT ONE}d", "1e3s", "nan", "-1s"):
        with pytest.raises(SettingError):
            command.duration("--expires", text, 0.0)


def test_environment_and_file_say_where_keys_are_too(
    keys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = f"sqlite:///{tmp_path}/headway.db"
    with monkeypatch.context() as patch:
        patch.setenv("HEADWAY_LEDGER", ledger)
        made = keys("create", *WHO, file="")
    found = parse(made.out.strip().encode())
    assert found is not None
    assert "ledger's database" in made.err
    (tmp_path / "headway.toml").write_text(f'keys = "ledger"\nledger = "{ledger}"\ntiers = "paid,gold"\n')
    assert keys("create", *WHO[:4], "--tier", "gold", file="").code == 0
    listed = json.loads(keys("list", "--json", file="").out)["keys"]
    assert listed[0]["id"] == found[0]
    assert len(listed) == 2
    with contextlib.closing(sqlite3.connect(tmp_path / "headway.db")) as database:
        assert found[1] not in b"".join(digest for (digest,) in database.execute("SELECT digest FROM headway_keys"))
    monkeypatch.setenv("HEADWAY_KEYS", "keys.toml")
    assert keys("create", *WHO, file="").code == 0
    assert len(kept()) == 1
