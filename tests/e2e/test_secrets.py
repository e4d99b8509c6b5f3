"""Secrets never leak: everything that a service prints and writes is searched for keys, tokens and inputs."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from tests.e2e.client import wait_until
from tests.e2e.fleet import CUT_OFF
from tests.e2e.server import Server, launched, run_cli, serving
from tests.identity.issuing import ISSUER, jwk, jwks, token
from tests.identity.writing import entry, key_of
from tests.servers.redis import RedisServer

FLAGS = ("--keys", "keys.toml", "--jwt", "issuers.toml", "--ledger", "sqlite:///ledger.db", "--cache")
ISSUERS = f"""
[[issuers]]
issuer = "{ISSUER}"
audience = "headway"
jwks = "jwks.json"
algorithm = "RS256"
"""
ASKED = [f"/internal/{name}" for name in ("health", "workers", "fleet", "dlq")] + ["/metrics", "/readyz?verbose"]


def made_tokens(folder: Path) -> dict[str, str]:
    """Make tokens from a trusted issuer: a valid one, an expired one, and one signed by another issuer."""
    (folder / "jwks.json").write_bytes(jwks(jwk("RS256")))
    (folder / "issuers.toml").write_text(ISSUERS)
    later = time.time() + 3600
    return {
        "good": token("RS256", exp=later).decode(),
        "expired": token("RS256", exp=later - 7200).decode(),
        "forged": token("RS256", "stranger", {"kid": "first"}, exp=later).decode(),
    }


def ask(server: Server, credential: str, text: str, *fields: str) -> tuple[int, bytes]:
    body = {"input": text, "parameters": {"note": text}}
    answer = server.post("/v1/inference", body, f"Authorization: Bearer {credential}", *fields)
    return answer.status, answer.body


def test_no_key_token_or_input_is_to_be_seen(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("canary"))
    key, tokens = key_of("canary"), made_tokens(tmp_path)
    (private := tmp_path / "private").mkdir()
    for name in ("keys.toml", "jwks.json", "issuers.toml"):
        (tmp_path / name).rename(private / name)
        (tmp_path / name).symlink_to(private / name)
    canary = f"canary{uuid.uuid4().hex}"
    wrong = f"hw_live_{canary[:12]}_{canary}"
    secrets = [
        key.rpartition("_")[2],
        wrong,
        canary,
        canary.upper(),
        *(token.split(".")[2] for token in tokens.values()),
    ]
    said = []
    with serving(tmp_path, *FLAGS, "--log-level", "debug", target="tests.targets.runs:Picky", lawful=False) as server:
        server.expected = {"worker process ended", "batch failed", "the ledger is out of reach"}
        statuses = {
            name: ask(server, credential, f"{canary} {name}")[0]
            for name, credential in {"key": key, "wrong": wrong, "nonsense": canary, **tokens}.items()
        }
        assert {name for name, status in statuses.items() if status == 200} == {"key", "good"}
        assert set(statuses.values()) == {200, 401}
        for text in (f"{canary} poison", f"{canary} killer"):
            status, body = ask(server, key, text)
            assert status == 422, body
            said.append(body)
        ask(server, key, canary, f"Idempotency-Key: {canary}", f"X-Request-Tier: {canary}", f"Prefer: wait={canary}")
        ask(server, key, canary + "\0")
        wait_until(lambda: server.admin("/internal/dlq").json.get("count") == 2)
        said += [server.admin(path).body for path in ASKED]
        ids = [letter["id"] for letter in server.letters()]
        said += [server.admin(f"/internal/requests/{id}").body for id in ids]
    said.append(server.banner().encode())
    said += [path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()]
    assert (tmp_path / "ledger.db").stat().st_size > 0
    for secret in secrets:
        assert not any(secret.encode() in text for text in said), secret[:10]


def test_the_password_of_the_broker_is_to_be_seen_nowhere(tmp_path: Path) -> None:
    with RedisServer("valkey", tmp_path / "redis") as redis:
        redis.command("CONFIG", "SET", "requirepass", "canary")
        address = redis.url.removeprefix("redis://")
        environ = {"HEADWAY_BROKER": f"redis://:canary@{address}"}
        with launched(tmp_path, "--log-level", "debug", role="controller", environ=environ) as server:
            server.ready()
            said = [server.banner(), run_cli(server, tmp_path, "status").stdout]
            said += [server.admin(path).body.decode() for path in ASKED]
            assert f"redis://…@{address}" in said[0]
            server.expected |= CUT_OFF
            redis.kill()
            server.logged("the broker is out of reach")
            said += [server.admin(path).body.decode() for path in ASKED]
            server.signal()
            server.check_end()
        assert "canary" not in "".join((*said, server.log_text()))
