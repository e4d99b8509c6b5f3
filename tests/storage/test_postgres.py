"""Peculiarities of PostgreSQL: privileges, constraints, isolation levels, and a pooler in front."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headway.errors import SettingError
from headway.runtime.request_id import new_id
from headway.storage.postgres import PostgresKeys, PostgresLedger
from tests.contracts.ledgers import POOLED, opened
from tests.contracts.test_key_stores import key
from tests.contracts.test_ledgers import AT, record, waiting
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, SharedPostgres

pytestmark = pytest.mark.processes


async def nothing(ledger: PostgresLedger) -> None: ...


@pytest.mark.parametrize(
    "rule",
    [
        "ALTER TABLE headway_requests ADD CHECK (tenant <> 'globex')",
        "CREATE UNIQUE INDEX ON headway_requests ((1 / (CASE tenant WHEN 'globex' THEN 0 ELSE 1 END)), id)",
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN IF NEW.tenant = ''globex'' THEN RAISE EXCEPTION ''not that one''; END IF; RETURN NEW; END';
        CREATE TRIGGER refuse BEFORE INSERT ON headway_requests FOR EACH ROW EXECUTE FUNCTION refuse()
        """,
        """
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN IF NEW.tenant = ''globex'' THEN RAISE check_violation; END IF; RETURN NEW; END';
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON headway_requests DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refuse()
        """,
    ],
    ids=["check", "index", "trigger", "deferred"],
)
def test_a_row_that_the_database_refuses_is_no_outage(postgres: SharedPostgres, rule: str) -> None:
    server = postgres.server()
    url = server.fresh()
    opened(lambda: PostgresLedger(url), nothing)
    for statement in rule.split(";\n"):
        server.query(statement, url=url)

    async def story(ledger: PostgresLedger) -> None:
        first, good, bad = record(), record(), record(tenant="globex")
        await ledger.write([first])
        connections = await backends(server, url)
        for bulk in ([good, bad], [first, bad]):  # The second way is for rows of which some exist already.
            with pytest.raises(ValueError, match="PostgreSQL rejects one of the values"):
                await ledger.write(bulk)
        assert await ledger.find(good.id) == []
        await ledger.write([good])
        assert await ledger.find(good.id) == [good]
        assert connections <= await backends(server, url), "another connection was made for a row that was refused"

    opened(lambda: PostgresLedger(url), story)


async def backends(server: PostgresServer, url: str) -> set[int]:
    asked = "SELECT pid FROM pg_stat_activity WHERE application_name = 'headway' AND datname = current_database()"
    return {row[0] for row in await asyncio.to_thread(server.query, asked, url=url)}


def test_processes_that_change_keys_together_isolate_them(postgres: SharedPostgres) -> None:
    server = postgres.server()
    url = server.fresh()
    server.query(f"ALTER DATABASE {urlsplit(url).path[1:]} SET default_transaction_isolation = serializable")

    async def story(*stores: PostgresKeys) -> None:
        await asyncio.gather(*(store.add(key(f"{number}")) for number, store in enumerate(stores)))
        await asyncio.gather(*(store.expire(key("0").id, AT + 9) for store in stores))
        assert len(await stores[0].keys()) == 4
        assert (await stores[0].latest()).revision == 8

    opened(lambda: PostgresKeys(url), story, count=4)


@pytest.mark.parametrize("kind", POOLED)
async def test_ledger_and_keys_go_through_pgbouncer(tmp_path: Path, postgres: SharedPostgres, kind: str) -> None:
    database = await asyncio.to_thread(POOLED[kind], tmp_path, postgres)
    ledgers = [PostgresLedger(database.url) for _ in range(3)]
    keys = PostgresKeys(database.url)
    try:
        await asyncio.gather(keys.open(), *(ledger.open() for ledger in ledgers))
        twice = record()
        for _ in range(5):
            await asyncio.gather(*(ledger.write([twice, record()]) for ledger in ledgers))
            assert await ledgers[0].find(twice.id) == [twice]
        await asyncio.gather(*(ledger.note_open([waiting(new_id())], []) for ledger in ledgers))
        await keys.add(key("1"))
        assert await keys.expire(key("1").id, AT + 5)
        kept = await keys.get(key("1").id)
        assert kept is not None and kept.expires_at == AT + 5
        assert await ledgers[0].prune(AT + 1, 100) == 16
    finally:
        await asyncio.gather(keys.close(), *(ledger.close() for ledger in ledgers))


@pytest.mark.parametrize(
    ("mode", "option", "hint"),
    [("transaction", "?work_mem=8MB", "ignore_startup_parameters"), ("statement", "", "pool sessions or transactions")],
)
def test_what_pgbouncer_never_takes_is_refused(postgres: SharedPostgres, mode: str, option: str, hint: str) -> None:
    server = postgres.server()
    with PgBouncer(server.url, mode) as bouncer, pytest.raises(SettingError, match=hint):
        opened(lambda: PostgresLedger(bouncer.front_of(server.url) + option), nothing)
