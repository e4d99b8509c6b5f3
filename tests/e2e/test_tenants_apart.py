"""Two tenants try everything to reach each other's data, with the same ids, the same keys and the same inputs.

Every output carries a mark of its run. No mark may be seen by both tenants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.e2e.client import Answer
from tests.e2e.server import ask_at, launched
from tests.identity.writing import entry, key_of
from tests.servers.redis import RedisServer

TARGET = "tests.targets.runs:Numbered"
TENANTS = ("acme", "globex")
IDS = tuple(f"0192c8a4-5f6e-7d01-9abc-00000000000{number}" for number in range(3))
"""Both tenants choose their ids from these."""
SHARED = ("--cache", "--collapse", "--keys", "keys.toml", "--user-rate", "0")
TOKEN = "hw-operator-canary"

tenants = st.sampled_from(TENANTS)
ids = st.sampled_from(IDS)
texts = st.sampled_from(("one", "two"))
idempotency_keys = st.sampled_from(("", "", "k1", "k2"))


def mark_of(answer: Answer) -> str:
    """Return the mark of the run that made an output."""
    return str(answer.json["output"]).rpartition("|")[2]


@dataclass
class Stage:
    """A service, its tenants' keys, and which tenant saw which run."""

    ports: list[int]
    admin_port: int
    keys: dict[str, list[str]]
    marks: dict[str, str] = field(default_factory=dict)
    """Maps the mark of a run to the tenant that saw it."""

    def saw(self, tenant: str, told: Answer) -> str:
        """Record which tenant saw a run. Only one tenant may see it."""
        assert self.marks.setdefault(mark_of(told), tenant) == tenant
        return mark_of(told)


class Adversaries(RuleBasedStateMachine):
    """Steps of the two tenants. The state persists from one history to the next, so each uses new names."""

    stage: Stage
    histories = 0

    @initialize()
    def begin(self) -> None:
        Adversaries.histories += 1
        self.suffix = f"{Adversaries.histories}-{id(self)}"
        self.bound: dict[tuple[str, str], tuple[str, str]] = {}
        """Maps (tenant, idempotency key) to the input it was used for and the mark of the answer."""
        self.tasks: dict[str, dict[str, str]] = {tenant: {} for tenant in TENANTS}
        """Maps each tenant's task ids to their marks, which are empty while unknown."""
        self.texts: dict[tuple[str, str], str] = {}
        """Maps (tenant, task id) to its input."""
        self.turn = 0

    def send(self, tenant: str, method: str, path: str, body: bytes = b"", **fields: str) -> Answer:
        """Send a request, alternating between the tenant's two keys and between the gateways."""
        stage, self.turn = self.stage, self.turn + 1
        key = stage.keys[tenant][self.turn % 2]
        port = stage.ports[self.turn // 2 % len(stage.ports)]
        return ask_at(port, method, path, body, authorization=f"Bearer {key}", **fields)

    def own(self, id: str) -> str:
        """Return an id that both tenants use in this history only."""
        return f"{id[:19]}{Adversaries.histories:04x}{id[23:]}"

    @rule(tenant=tenants, text=texts, key=idempotency_keys, route=st.sampled_from(("/v1/inference", "/api/inference")))
    def asks(self, tenant: str, text: str, key: str, route: str) -> None:
        body = json.dumps({"input": text}).encode()
        name = f"{key}-{self.suffix}" if key else ""
        told = self.send(tenant, "POST", route, body, idempotency_key=name)
        before = self.bound.get((tenant, key)) if key else None
        if before is not None and before[0] != text:
            assert told.status == 422
            assert told.json["error"] == "IDEMPOTENCY_CONFLICT"
            assert before[1] not in told.body.decode()
            return
        assert told.status == 200, told.body
        mark = self.stage.saw(tenant, told)
        if before is not None:
            assert mark == before[1]
            assert told.header["idempotency-replayed"] == "true"
        elif key:
            self.bound[tenant, key] = text, mark

    @rule(tenant=tenants, text=texts, id=ids)
    def leaves_a_task(self, tenant: str, text: str, id: str) -> None:
        id = self.own(id)
        body = json.dumps({"input": text}).encode()
        told = self.send(tenant, "POST", "/v1/inference", body, prefer="respond-async", x_request_id=id)
        if id not in self.tasks[tenant]:
            assert told.status == 202, told.body
            assert told.json["task_id"] == f"req_{id}"
            self.tasks[tenant][id], self.texts[tenant, id] = "", text
        elif told.status != 409:  # Status 409 means that one is in flight.
            assert told.status == (202 if self.texts[tenant, id] == text else 422), told.body

    @rule(tenant=tenants, id=ids, wait=st.sampled_from(("", "?wait=20")))
    def looks(self, tenant: str, id: str, wait: str) -> None:
        id = self.own(id)
        told = self.send(tenant, "GET", f"/v1/result/req_{id}{wait}")
        if id not in self.tasks[tenant]:
            self.is_nothing(told)
            return
        assert told.status == 200, told.body
        assert told.json["status"] in (("SUCCESS",) if wait else ("PENDING", "SUCCESS"))
        if told.json["status"] == "SUCCESS":
            self.tasks[tenant][id] = self.stage.saw(tenant, told)

    @rule(tenant=tenants, id=ids)
    def forgets(self, tenant: str, id: str) -> None:
        id = self.own(id)
        told = self.send(tenant, "DELETE", f"/v1/result/{id}")
        if self.tasks[tenant].pop(id, None) is None:
            self.is_nothing(told)
        else:
            assert told.status == 204
            self.is_nothing(self.send(tenant, "GET", f"/v1/result/{id}"))

    @rule(
        tenant=tenants, path=st.sampled_from(("/internal/health", "/internal/dlq", "/internal/requests/x", "/metrics"))
    )
    def tries_the_admin_port(self, tenant: str, path: str) -> None:
        stage = self.stage
        for key in stage.keys[tenant]:
            told = ask_at(stage.admin_port, "GET", path, authorization=f"Bearer {key}")
            assert told.status == 403, told.body

    @rule(forged=st.sampled_from(("cut", "changed", "operator", "none", "both")))
    def comes_with_a_credential_that_is_none(self, forged: str) -> None:
        stage = self.stage
        first, second = stage.keys["acme"][0], stage.keys["globex"][0]
        credential = {
            "cut": first[:-1],
            "changed": first[:-1] + ("A" if first[-1] != "A" else "B"),
            "operator": TOKEN,
            "none": "",
            "both": f"{first},{second}",
        }[forged]
        for method, path in (("POST", "/v1/inference"), ("GET", f"/v1/result/{IDS[0]}")):
            body = b'{"input": "x"}' if method == "POST" else b""
            fields = {"authorization": f"Bearer {credential}"} if credential else {}
            told = ask_at(stage.ports[0], method, path, body, **fields)
            assert told.status == 401, told.body
            assert first not in told.body.decode() and second not in told.body.decode()

    @invariant()
    def others_keep_what_is_theirs(self) -> None:
        """Check that neither tenant has removed anything of the other's."""
        if self.turn % 5 != 0:
            return
        for tenant in TENANTS:
            for id, mark in self.tasks[tenant].items():
                told = self.send(tenant, "GET", f"/v1/result/{id}")
                assert told.status == 200, told.body
                if mark:
                    assert mark_of(told) == mark

    def is_nothing(self, told: Answer) -> None:
        """Check for the answer that is the same for missing objects and for those of other tenants."""
        assert told.status == 404, told.body
        document = told.json
        assert (document["error"], document["message"]) == (
            "NOT_FOUND",
            "no such task: unknown, expired, cancelled, or not yours",
        )


def made_keys(folder: Path) -> dict[str, list[str]]:
    """Write two keys for each tenant to keys.toml. The users have the same names."""
    users = ("ann", "bob")
    rows = [entry(tenant + user, user, tenant) for tenant in TENANTS for user in users]
    (folder / "keys.toml").write_text("".join(rows))
    return {tenant: [key_of(tenant + user) for user in users] for tenant in TENANTS}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Run two gateways that share Redis."""
    keys = made_keys(tmp_path)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer("valkey", tmp_path / "redis"))
        broker = ("--broker", redis.url, "--broker-timeout-ms", "20000")
        up = [stack.enter_context(launched(tmp_path, *broker, target=TARGET, role="worker"))]
        up += [stack.enter_context(launched(tmp_path, *broker, *SHARED, role="gateway")) for _ in range(2)]
        for server in up:
            server.ready()
        gateways = up[1:]
        yield Stage([gateway.port for gateway in gateways], gateways[0].admin_port, keys)
        for server in reversed(up):
            server.signal()
            server.check_end()


def test_nothing_of_one_tenant_is_reachable_by_the_other(stage: Stage) -> None:
    class Here(Adversaries):
        pass

    Here.stage = stage
    run: Callable[..., None] = run_state_machine_as_test
    run(
        Here,
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert set(stage.marks.values()) == set(TENANTS)
