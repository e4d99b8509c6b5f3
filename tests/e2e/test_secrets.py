"""Secrets are seen nowhere: keys, tokens and inputs are searched in all that a service says and writes."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from tests.e2e.client import PATIENCE, wait_until
from tests.e2e.server import Server, serving
from tests.identity.writing import entry, key_of

FLAGS = ("--keys", "keys.toml", "--jwt", "issuers.toml", "--ledger", "sqlite:///ledger.db", "--cache")
ISSUERS = """
[[issuers]]
issuer = "https://login.example"
audience = "headway"
jwks = "jwks.json"
algorithm = "RS256"
"""
ASKED = (
    "/internal/health", "/internal/workers", "/internal/fleet", "/internal/dlq", "/metrics", "/readyz?verbose",
)  # fmt: skip


def made_tokens(folder: Path) -> dict[str, str]:
    """Tokens of an issuer whom the service knows: a good one, one that has expired, one that somebody else signed."""
    own, other = generate_private_key(65537, 2048), generate_private_key(65537, 2048)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(own.public_key()))
    (folder / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "1", "alg": "RS256", "use": "sig"}]}))
    (folder / "issuers.toml").write_text(ISSUERS)
    now = int(time.time())
    claims = {"iss": "https://login.example", "aud": "headway", "sub": "v", "tenant": "t", "tier": "paid"}
    header = {"kid": "1"}
    return {
        "good": jwt.encode({**claims, "exp": now + 3600}, own, "RS256", header),
        "expired": jwt.encode({**claims, "exp": now - 3600}, own, "RS256", header),
        "forged": jwt.encode({**claims, "exp": now + 3600}, other, "RS256", header),
    }


def ask(server: Server, credential: str, text: str, **fields: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        body = json.dumps({"input": text, "parameters": {"note": text}}).encode()
        header = {name.replace("_", "-"): value for name, value in fields.items()}
        connection.request("POST", "/v1/inference", body, {"authorization": f"Bearer {credential}", **header})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("readable", [False, True])
def test_no_key_token_or_input_is_to_be_seen(tmp_path: Path, readable: bool) -> None:
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
    with serving(
        tmp_path, *FLAGS, "--log-level", "debug", target="tests.targets.runs:Picky",
        logs_json=not readable, lawful=False,
    ) as server:  # fmt: skip
        server.expected = {"worker process ended", "batch failed", "the ledger is out of reach"}
        statuses = {
            name: ask(server, credential, f"{canary} {name}")[0]
            for name, credential in {"key": key, "wrong": wrong, "nonsense": canary, **tokens}.items()
        }
        assert statuses == {
            "key": 200, "wrong": 401, "nonsense": 401, "good": 200, "expired": 401, "forged": 401,
        }  # fmt: skip
        for text in (f"{canary} poison", f"{canary} killer"):
            status, body = ask(server, key, text)
            assert status == 422, body
            said.append(body)
        ask(server, key, canary, idempotency_key=canary, x_request_tier=canary, prefer=f"wait={canary}")
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
