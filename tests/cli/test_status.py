"""`headway status`: the text it makes of an admin port's answers, and of a process described by its environment."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.cli.admin import Admin
from headway.cli.status import costs, look, overview, serves
from headway.cli.trust import described
from headway.errors import SettingError
from tests.authority import Authority
from tests.cli.command import code_of
from tests.cli.test_operate import Running, service
from tests.cli.test_tls import Files, files
from tests.client.scripted import Asked, Step, scripted

HEALTH: dict[str, Any] = {
    "status": "ok", "role": "gateway", "id": "edge-1", "broker": "redis://…@broker:6379/0", "policy": "paced",
    "version": "1.0", "requests_per_second": 12.0, "pending": 3, "gpu_utilization": 0.5, "queue_depth": 7,
    "queue_oldest_seconds": 0.25, "dead_letters": 2, "workers": {"healthy": 1},
    "queues": [
        {"model": "default", "tier": "paid", "depth": 4, "oldest_seconds": 0.25},
        {"model": "default", "tier": "free", "depth": 3, "oldest_seconds": 0.1},
        {"model": "default", "tier": "enterprise", "depth": 0, "oldest_seconds": 0.0},
    ],
}  # fmt: skip
WORKERS: list[dict[str, Any]] = [
    {
        "worker_id": f"{host}/gpu-0", "model": "default", "status": status, "utilisation": 0.5, "in_flight": 1,
        "last_heartbeat": "2026-11-21T08:15:11.354+00:00", "restarts": 0, "pid": 17,
    }
    for host, status in (("host-b", "healthy"), ("host-a", "degraded"))
]  # fmt: skip


def member(id: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "role": role, "host": "far", "pid": 7, "admin": "http://127.0.0.1:9000", "version": "1.0", "pending": 0,
        "requests_per_second": 0.0, "leads": False, "age_seconds": 0.25, **more,
    }  # fmt: skip


FLEET: dict[str, Any] = {
    "workers": WORKERS, "dead_letters": 2, "age_seconds": 0.0, "away": "",
    "members": [
        member("edge-1", "gateway", pending=2, requests_per_second=11.0),
        member("edge-2", "gateway", pending=5, requests_per_second=8.5),
        member("host-b", "worker"),
        member("control", "controller", leads=True),
    ],
    "capacities": [
        {"model": model, "healthy": 1, "degraded": degraded, "items_per_second": items, "usable_per_second": 0.7 * items,
         "estimated": items > 0, "scarce": scarce, "age_seconds": age}
        for model, degraded, items, age, scarce in (("default", 1, 1000.0, 0.5, True), ("other", 0, 0.0, 12.3, False))
    ],
}  # fmt: skip


class Port:
    """An admin port with given answers: status and body by path. `asked` holds the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/internal/health": (200, HEALTH),
            "/internal/workers": (200, {"workers": WORKERS}),
            "/internal/snapshot": (200, FLEET),
        }
        self.asked: list[Asked] = []
        self.url = ""

    def answer(self, asked: Asked) -> Step:
        code, content = self.answers[asked.path]
        return code, {}, content.encode() if isinstance(content, str) else msgspec.json.encode(content)


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    with scripted(made.answer) as service:
        made.url, made.asked = service.url, service.asked
        yield made


def test_a_port_other_than_admin_is_recognised(port: Port, capsys: pytest.CaptureFixture[str]) -> None:
    nothing: tuple[Any, ...] = ({"message": "nothing is served at /internal/health; /docs lists what is"}, {}, ["x"])
    for answer in nothing:
        port.answers["/internal/health"] = (404, answer)
        assert code_of(["status", "--admin", port.url]) == 1
        says = "This is not an admin port, perhaps the public one: name the port of --admin-port, 9000 unless set"
        assert says in capsys.readouterr().err
    port.answers["/internal/health"] = (200, "<html>\x1b[31m hello")
    assert code_of(["status", "--admin", port.url]) == 1
    error = capsys.readouterr().err
    assert "is not an admin port of Headway" in error and "\x1b" not in error


def test_a_process_that_starts_has_no_fleet_and_no_broker_that_is_away(port: Port) -> None:
    starting = {"worker_id": "a/gpu-0", "status": "starting", "reason": "has been loading for 12 s"}
    port.answers["/internal/health"] = 200, {**HEALTH, "status": "starting"}
    port.answers["/internal/workers"] = 200, {"workers": [WORKERS[0] | starting]}
    port.answers["/internal/snapshot"] = (
        503,
        {"message": "this process is starting; try again when /readyz returns 200"},
    )
    found = look(Admin(port.url, ""))
    told = overview(found)
    assert "broker away" not in told
    assert "a/gpu-0 is starting: has been loading for 12 s" in told
    assert not serves(found)


def test_the_whole_fleet_is_shown(port: Port) -> None:
    told = overview(look(Admin(port.url, ""))).splitlines()
    assert told[:10] == [
        "status        ok",
        "asked         gateway edge-1",
        "broker        redis://…@broker:6379/0",
        "load          20.5 requests/s, 8 held",
        "workers busy  50%",
        "waiting       4 paid, 3 free, oldest 250 ms",
        "dead letters  2",
        (
            "capacity      default: 700 of 1000 inputs/s (estimated), 1 healthy, 1 degraded, the broker's memory is scarce; "
            "other: not measured yet, 1 healthy, 12 s ago"
        ),
        "policy        paced",
        "version       1.0",
    ]
    rows = [line.split() for line in told[10:]]
    names = [row[0] for row in rows if row]
    assert names == ["PROCESS", "control", "edge-1", "edge-2", "host-b", "WORKER", "host-a/gpu-0", "host-b/gpu-0"]
    [leader] = [row for row in rows if row[:1] == ["control"]]
    assert "yes" in leader


def test_a_process_alone_shows_no_fleet(port: Port) -> None:
    port.answers["/internal/health"] = (200, {**HEALTH, "broker": ""})
    port.answers["/internal/snapshot"] = (200, {**FLEET, "members": [member("edge-1", "serve")]})
    told = overview(look(Admin(port.url, "")))
    assert "PROCESS" not in told
    assert not any(line.startswith("broker") for line in told.splitlines())
    assert "load          12 requests/s, 3 held" in told


def shown(**changed: Any) -> str:
    return overview({**HEALTH, **FLEET, **changed})


def test_workers_that_are_missing_or_not_healthy_are_told_of() -> None:
    assert "expected are healthy" not in shown() and "missing" not in shown()
    assert "workers       1 of 3 expected are healthy\n" in shown(expected_workers=3)
    failed = {"worker_id": "c/gpu-0", "status": "failed", "reason": "it raised\x1b; it is tried again in 4 s"}
    told = shown(workers=[WORKERS[0] | {"reason": ""}, WORKERS[1] | failed]).splitlines()[-1]
    assert told == r"c/gpu-0 is failed: it raised\x1b; it is tried again in 4 s"
    scaling = {"desired": 1, "current": 0, "late": 1, "awaited_seconds": 95.2}
    there = {"default": scaling | {"desired": 2}, "idle": scaling | {"desired": 0}}
    missing = "missing       greeter: 1 wanted, on the way for 95 s, longer than a start should take\n"
    assert missing in shown(scaling=there | {"greeter": scaling})
    assert "missing" not in shown(scaling=there)


def test_gpus_that_are_watched_have_a_table_with_what_is_known_of_them() -> None:
    known = {
        "name": "H100", "memory_used_bytes": 60 << 30, "memory_total_bytes": 80 << 30, "utilisation": 0.734, "power_watts": 310.5,
        "temperature_celsius": 61, "ecc_errors": 2, "xids": {"31": 1, "94": 2},
    }  # fmt: skip
    nothing: dict[str, Any] = {**dict.fromkeys(known), "name": "", "xids": {}}
    table = """
WORKER        GPU   MEMORY         COMPUTES  POWER  TEMPERATURE  ECC ERRORS  XIDS
host-a/gpu-0  -     -              -         -      -            -           -
host-b/gpu-0  H100  75% of 80 GiB  73%       310 W  61 °C        2           31 (1), 94 (2)
"""
    assert table in shown(workers=[WORKERS[0] | {"gpu_figures": known}, WORKERS[1] | {"gpu_figures": nothing}]) + "\n"
    assert "TEMPERATURE" not in shown(workers=[{**WORKERS[0], "gpu_figures": None}, WORKERS[1]])


def test_what_stands_in_a_name_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in shown(members=[member("\x1b[31mred", "worker")], policy="\x1b[31mred")


def test_a_gateway_in_direct_mode_shows_what_it_knows(port: Port) -> None:
    own = ("role", "id", "broker", "policy", "version", "requests_per_second", "pending")
    away = {"status": "degraded", "message": "the broker does not answer", **{name: HEALTH[name] for name in own}}
    refusal = (503, {"error": "SERVICE_OVERLOADED", "message": "the broker does not answer"})
    port.answers |= {"/internal/health": (200, away), "/internal/snapshot": refusal}
    found = look(Admin(port.url, ""))
    assert serves(found)
    assert overview(found).splitlines() == [
        "status        degraded",
        "broker away   the broker does not answer",
        "fleet         not known",
        "asked         gateway edge-1",
        "broker        redis://…@broker:6379/0",
        "load          12 requests/s, 3 held by this process",
        "policy        paced",
        "version       1.0",
    ]


def test_without_the_broker_the_fleet_is_shown_as_it_was(port: Port) -> None:
    own = ("role", "id", "broker", "policy", "version", "requests_per_second", "pending")
    away = {"status": "unavailable", "message": "connection refused", **{name: HEALTH[name] for name in own}}
    port.answers["/internal/health"] = (503, away)
    port.answers["/internal/snapshot"] = (200, {**FLEET, "away": "connection refused", "age_seconds": 12.3})
    found = look(Admin(port.url, ""))
    told = overview(found).splitlines()
    assert not serves(found)
    assert told[:3] == [
        "status        unavailable",
        "broker away   connection refused",
        "fleet         as it was 12 s ago",
    ]
    assert "load          12 requests/s, 3 held by this process" in told
    assert "dead letters  2" in told
    assert {"edge-2", "host-a/gpu-0"} <= {line.split()[0] for line in told if line}


def test_a_port_that_answers_503_and_no_health_says_why(port: Port, capsys: pytest.CaptureFixture[str]) -> None:
    port.answers["/internal/health"] = (503, {"status": "unavailable", "message": "the broker does not answer"})
    assert code_of(["status", "--admin", port.url]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"headway: {port.url}: the broker does not answer (503)\n")


@pytest.mark.parametrize(
    ("depths", "waiting"),
    [
        ({"": 0, "1": 4}, "4 paid, oldest"),
        ({"": 4, "1": 0}, "4 paid, oldest"),
        ({"": 1, "1": 4}, "1 paid of default, 4 paid of default version 1, oldest"),
        ({"": 0, "1": 4, "2": 0}, "4 paid of default version 1, oldest"),
    ],
)
def test_what_waits_is_told_by_version_where_there_are_several(depths: dict[str, int], waiting: str) -> None:
    queues = [
        {"model": "default", "version": version, "tier": "paid", "depth": depth, "oldest_seconds": 0.1}
        for version, depth in depths.items()
    ]
    assert f"waiting       {waiting}" in shown(queues=queues)


def test_what_a_call_costs_is_told_where_its_time_goes_by_length() -> None:
    line = {"shape": "padded", "alpha": 0.0081, "beta": 1.18e-6, "longest": 900.0, "error": 0.021}
    text = "\n\n".join(costs([{**WORKERS[0], "cost": line}, {**WORKERS[1], "cost": {**line, "alpha": 9.0}}]))
    assert text.startswith("a call of default takes 8.1 ms and 1.18 µs for each input, times the weight of the longest")
    assert text.endswith("(mean error 2%)")
    assert costs([{**WORKERS[0], "cost": None}, {**WORKERS[0], "cost": {**line, "shape": "number"}}]) == []


def test_stores_that_do_not_answer_have_a_line_each() -> None:
    told = shown(ledger="takes nothing", keys="as of 33 s ago", bulk_folder="its disk is full")
    assert "\nledger        takes nothing\nkeys          as of 33 s ago\nbulk folder   its disk is full\n" in told


__all__ = ["files", "service"]


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:9000"),
        ({"HEADWAY_ADMIN_PORT": "9100"}, "http://127.0.0.1:9100"),
        ({"HEADWAY_ADMIN_HOST": "0.0.0.0", "HEADWAY_ADMIN_PORT": ""}, "http://127.0.0.1:9000"),
        ({"HEADWAY_ADMIN_HOST": "::"}, "http://[::1]:9000"),
        ({"HEADWAY_ADMIN_HOST": "[fd00::7]"}, "http://[fd00::7]:9000"),
        ({"HEADWAY_ADMIN_HOST": "10.0.0.5"}, "http://10.0.0.5:9000"),
        ({"HEADWAY_ADMIN_HOST": "localhost", "HEADWAY_TLS_CERT": "a.pem"}, "https://localhost:9000"),
    ],
)
def test_the_address_is_that_of_the_environment(environ: dict[str, str], url: str) -> None:
    assert described(environ) == (url, environ.get("HEADWAY_TLS_CERT", ""))


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "headway.toml"
    file.write_text('admin_port = 9100\ntls_cert = "a.pem"\n[models.m]\n')
    assert described({"HEADWAY_CONFIG": str(file)}) == ("https://127.0.0.1:9100", "a.pem")
    monkeypatch.chdir(tmp_path)
    assert described({})[0] == "https://127.0.0.1:9100"
    assert described({"HEADWAY_CONFIG": str(file), "HEADWAY_ADMIN_PORT": "9200"})[0] == "https://127.0.0.1:9200"


def test_a_port_that_is_none_and_a_file_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for port in ("0", "70000", "http", "-1"):
        with pytest.raises(SettingError, match="--admin"):
            described({"HEADWAY_ADMIN_PORT": port})
    broken = tmp_path / "headway.toml"
    broken.write_text("admin_port =")
    for file in (broken, tmp_path / "none.toml"):
        with pytest.raises(SettingError, match="HEADWAY_CONFIG"):
            described({"HEADWAY_CONFIG": str(file)})


def test_a_headway_toml_that_is_no_file_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert described({})[0] == "http://127.0.0.1:9000"
    file = tmp_path / "headway.toml"
    file.mkdir()
    with pytest.raises(SettingError, match=r"headway\.toml"):
        described({})
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(SettingError, match=r"headway\.toml"):
        described({})


def test_commands_ask_the_port_of_the_environment(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_ADMIN")
    monkeypatch.setenv("HEADWAY_ADMIN_HOST", "0.0.0.0")
    monkeypatch.setenv("HEADWAY_ADMIN_PORT", service.url.rpartition(":")[2])
    for command in (["status"], ["top", "--once"], ["dlq", "list"]):
        assert code_of(command) == 0


def test_commands_trust_exactly_the_certificate_of_their_own_process(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_ADMIN_PORT", files.url.rpartition(":")[2])
    monkeypatch.setenv("HEADWAY_CERT", str(files.client[0]))
    monkeypatch.setenv("HEADWAY_CERT_KEY", str(files.client[1]))
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files.service[0].read_bytes() + files.authority.file.read_bytes())
    for certificate in (files.service[0], chain):
        monkeypatch.setenv("HEADWAY_TLS_CERT", str(certificate))
        assert code_of(["status"]) == 0
    other = files.authority.issue("other-service")[0]
    other.write_bytes(other.read_bytes() + files.authority.file.read_bytes())  # The CAs that it trusts don't matter.
    monkeypatch.setenv("HEADWAY_TLS_CERT", str(other))
    capsys.readouterr()
    assert code_of(["status"]) == 1
    assert "certificate is not trusted" in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_CA", str(files.authority.file))
    assert code_of(["status"]) == 0
    monkeypatch.setenv("HEADWAY_CA", str(Authority(tmp_path, "stranger").file))
    assert code_of(["status"]) == 1
    for file in (tmp_path / "none.pem", files.service[1]):
        monkeypatch.delenv("HEADWAY_CA", raising=False)
        monkeypatch.setenv("HEADWAY_TLS_CERT", str(file))
        assert code_of(["status"]) == 3
