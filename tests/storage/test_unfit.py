"""Files that can't be a ledger are refused when opened, and one that doesn't answer is reported as that."""

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headway import storage
from headway.app import stores
from headway.app.lifecycle import Resource
from headway.app.stores import make_ledger
from headway.cli import EXIT_SETTING
from headway.config import Settings
from headway.errors import SettingError, StoreUnavailable
from headway.ports import Identity, Ledger
from headway.runtime.counters import StoreCounts
from headway.storage import postgres as postgres_database
from headway.storage import sqlite
from headway.storage.postgres import PostgresKeys
from tests.authority import Authority
from tests.cli.command import code_of
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import AT, record
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.processes

LONG = 60.0
UNREACHABLE = "postgresql://headway:canary@127.0.0.1:1/headway"


async def opened(url: str) -> Ledger:
    ledger = make_ledger(url)
    try:
        await ledger.open()
    except BaseException:
        await ledger.close()
        raise
    return ledger


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite:///text", "not a database"),
        ("sqlite:///missing/ledger.db", "{here}/missing/ledger.db: No such file or directory"),
        ("sqlite:///folder", "Is a directory"),
        ("sqlite:////dev/null", "is not a regular file"),
        ("sqlite:///pipe", "is not a regular file"),
        ("sqlite:///:memory:", "is not a path"),
        ("sqlite:///file:ledger.db?mode=memory", "is not a path"),
        ("sqlite:///nul\0byte", "null byte"),
        ("postgresql://headway:canary@127.0.0.1:port/x", "is not a URL that asyncpg understands"),
        ("postgresql://headway:canary@127.0.0.1:99999/x", "is not a URL that asyncpg understands"),
        ("postgresql://headway:canary@127.0.0.1:1/x?sslmode=canary", "is not a URL that asyncpg understands"),
    ],
)
def test_a_hopeless_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("this is no database, but long enough to look like one" * 10)
    Path("folder").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(SettingError) as caught:
        asyncio.run(opened(url))
    assert caught.value.setting == "ledger"
    assert reason.format(here=tmp_path) in caught.value.reason
    assert "canary" not in str(caught.value)


def test_who_only_looks_for_keys_makes_no_file_and_reads_where_it_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, *action in (
        (f"{tmp_path}/typo.db", "list"),
        ("typo.db", "revoke", "a" * 12),
        ("typo.db", "rotate", "a" * 12),
    ):
        assert code_of(["keys", *action, "--ledger", f"sqlite:///{path}"]) == EXIT_SETTING
        assert f"--ledger = 'sqlite:///{path}': no such file: {tmp_path}/typo.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_service_and_a_first_key_make_the_file(tmp_path: Path) -> None:
    async def main(identity: Identity, beside: Sequence[Resource]) -> None:
        for resource in beside:
            await resource.open()
        for resource in beside:
            await resource.close()

    served, first = tmp_path / "served.db", tmp_path / "first.db"
    asyncio.run(main(*stores.make_identity(Settings(keys="ledger", ledger=f"sqlite:///{served}"), StoreCounts())))
    who = ("--user", "alice", "--tenant", "acme", "--tier", "paid")
    assert code_of(["keys", "create", *who, "--ledger", f"sqlite:///{first}"]) == 0
    for path in (served, first):
        assert code_of(["keys", "list", "--ledger", f"sqlite:///{path}"]) == 0


async def test_what_another_process_has_locked_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_WITHIN", 0.01)
    path = tmp_path / "ledger.db"
    ledger = await opened(f"sqlite:///{path}")
    kept = record()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            await ledger.write([kept])
        assert await ledger.find(kept.id) == []
        other.execute("ROLLBACK")
    await ledger.write([kept])
    assert await ledger.find(kept.id) == [kept]
    await ledger.close()


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is given up, and later calls don't wait for it either. When the disk is back they go on."""
    monkeypatch.setattr(sqlite, "BUSY_WITHIN", LONG)
    path = tmp_path / "ledger.db"
    ledger = await opened(f"sqlite:///{path}")
    monkeypatch.setattr(sqlite, "CALL_WITHIN", 0.02)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=r"within 0\.02 s"):
                await ledger.write([record()])
        other.execute("ROLLBACK")
    monkeypatch.setattr(sqlite, "CALL_WITHIN", LONG)
    kept = record()
    await ledger.write([kept])
    assert await ledger.find(kept.id) == [kept]
    await ledger.close()


def test_a_server_that_is_not_there_does_not_answer_and_its_password_is_not_told() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        asyncio.run(opened(UNREACHABLE))
    told = str(caught.value)
    assert "canary" not in told
    assert told.startswith("PostgreSQL at postgresql://…@127.0.0.1:1/headway does not respond: ")
    assert "check that it is running" in told


@pytest.mark.parametrize(
    ("option", "reason", "hint"),
    [
        ("sslcanary=require", 'unrecognized configuration parameter "sslcanary"', "options after the ?"),
        ("work_mem=canary", 'invalid value for parameter "work_mem"', "options after the ?"),
        ("max_connections=5", "cannot be changed", "options after the ?"),
        ("sslmode=verify-full&sslrootcert=missing.pem", "sslrootcert 'missing.pem': No such file", "in PEM format"),
        ("sslmode=verify-full&sslrootcert=text", "sslrootcert 'text'", "in PEM format"),
        ("sslmode=verify-full&sslcrl=missing.pem", "sslcrl 'missing.pem': No such file", "in PEM format"),
        ("sslcert=missing.pem", "sslcert 'missing.pem': No such file", "in PEM format"),
        ("sslmode=verify-full", "does not say which certificates to trust", "sslrootcert=FILE"),
    ],
)
def test_an_option_of_the_url_that_will_not_do_is_a_wrong_setting(
    own: PostgresServer, option: str, reason: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("text").write_text("this is no certificate")
    with pytest.raises(SettingError) as caught:
        asyncio.run(opened(f"{own.url}?{option}"))
    assert caught.value.setting == "ledger"
    assert reason in caught.value.reason
    assert hint in caught.value.hint


def test_a_certificate_without_its_key_is_a_wrong_setting(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).file
    for options in (f"sslcert={certificate}&sslkey={tmp_path}/none", f"sslcert={certificate}&sslkey={certificate}"):
        with pytest.raises(SettingError, match="names a file that cannot be used, sslkey "):
            asyncio.run(opened(f"{UNREACHABLE}?{options}"))


async def test_a_server_that_stands_still_is_reached_later(
    own: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await asyncio.to_thread(own.fresh)
    ledger = await opened(url)
    kept = record()
    with own.silent():
        monkeypatch.setattr(postgres_database, "CALL_WITHIN", 0.05)
        for _ in range(2):  # On the existing connection, and on a new one.
            with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
                await ledger.write([kept])
        with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
            await ledger.find(kept.id)
    monkeypatch.setattr(postgres_database, "CALL_WITHIN", LONG)
    await ledger.write([kept])
    assert await ledger.find(kept.id) == [kept]
    await ledger.close()


async def test_a_server_that_was_restarted_is_reached_again(own: PostgresServer) -> None:
    url = await asyncio.to_thread(own.fresh)
    ledger = await opened(url)
    kept = record()
    own.kill()
    with pytest.raises(StoreUnavailable):
        await ledger.write([kept])
    await asyncio.to_thread(own.start)
    await ledger.write([kept])
    assert await ledger.find(kept.id) == [kept]
    await ledger.close()


async def test_a_user_needs_the_privileges_that_the_docs_ask_for_once_the_tables_are_there(own: PostgresServer) -> None:
    url = await asyncio.to_thread(own.fresh)
    await asyncio.to_thread(own.query, "CREATE ROLE keeper LOGIN")
    keeper = url.replace("headway@", "keeper@")
    with pytest.raises(SettingError, match="permission denied"):
        await opened(keeper)
    await (await opened(url)).close()
    first = "SELECT ON headway_schema", "SELECT, INSERT, DELETE ON headway_requests"
    for privileges in (*first, "SELECT, INSERT, UPDATE, DELETE ON headway_open_requests"):
        await asyncio.to_thread(own.query, f"GRANT {privileges} TO keeper", url=url)
    ledger = await opened(keeper)
    await ledger.write([record(), record(completed_at=AT + 1)])
    assert await ledger.prune(AT + 1, 10) == 1
    await asyncio.to_thread(own.query, "REVOKE DELETE ON headway_requests FROM keeper", url=url)
    with pytest.raises(StoreUnavailable, match="permission denied"):
        await ledger.prune(AT + 2, 10)
    await ledger.close()


async def test_a_gateway_whose_user_may_only_read_keys_hears_of_all_changes(own: PostgresServer) -> None:
    url = await asyncio.to_thread(own.fresh)
    await asyncio.to_thread(own.query, "CREATE ROLE reader LOGIN")
    owner, reader = PostgresKeys(url), PostgresKeys(url.replace("headway@", "reader@"))
    await owner.open()
    for table in ("headway_schema", "headway_keys", "headway_key_changes"):
        await asyncio.to_thread(own.query, f"GRANT SELECT ON {table} TO reader", url=url)
    await reader.open()
    before = await reader.latest()
    await owner.add(key("a"))
    found = await reader.changes(before, 10)
    assert found is not None and list(found.keys) == [key("a")]
    assert await reader.changes(found.upto, 10) is not None
    with pytest.raises(StoreUnavailable, match="permission denied"):
        await reader.remove_ended(AT, 10)
    for store in (owner, reader):
        await store.close()


def test_a_missing_client_is_named_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("headway.storage.postgres") or name.partition(".")[0] == "asyncpg":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(storage, "postgres")  # A module imported anew would stay after the test.
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(SettingError, match=r"pip install 'asyncpg>=") as caught:
        stores.make_ledger(UNREACHABLE)
    assert "canary" not in str(caught.value)


async def test_a_file_that_is_moved_takes_no_rows_until_it_is_back(tmp_path: Path) -> None:
    path, away = tmp_path / "ledger.db", tmp_path / "elsewhere.db"
    before, meanwhile, after = record(), record(), record()
    ledger = await opened(f"sqlite:///{path}")
    try:
        await ledger.write([before])
        path.rename(away)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="moved or removed"):
                await ledger.write([meanwhile])
        assert not path.exists()
        path.write_text("another file in its place")
        with pytest.raises(StoreUnavailable, match="moved or removed"):
            await ledger.write([meanwhile])
        away.rename(path)
        await ledger.write([after])
        assert [len(await ledger.find(one.id)) for one in (before, meanwhile, after)] == [1, 0, 1]
    finally:
        await ledger.close()
