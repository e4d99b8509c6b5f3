"""Runs a process of a house with additions, and prints what was seen of each as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import sys
import urllib.error
import urllib.request
from typing import Any

import grpc

import headway
from headway import cli, errors
from headway.app import wiring
from headway.app.brokers import make_broker_bundle
from headway.config import load
from headway.core.policies import build
from headway.dialects.table import reach
from headway.errors import SettingError
from headway.grpc import messages
from headway.model import Role
from headway.runtime.counters import BrokerCounts, GatewayCounts

ANYWHERE = {"port": "0", "admin_port": "0", "broker": "kettle://here", "policy": "patient", "steep_s": "4"}
CODE = "x-headway-error"


def asked(port: int, path: str, body: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and text of the answer to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def poured(port: int, leaves: str) -> str:
    """Cup that a call of the added method of gRPC gives, or status and code of its error."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        pour = channel.unary_unary(f"/{messages.TEA}/Pour")  # type: ignore[attr-defined]
        try:
            body = pour(messages.message("headway.v1.PourRequest")(leaves=leaves).SerializeToString(), timeout=20)
        except grpc.RpcError as exc:
            return f"{exc.code().name} {dict(exc.trailing_metadata())[CODE]}"
        return str(messages.message("headway.v1.PourResponse").FromString(body).cup)


def shown(*arguments: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return text.getvalue()


def refusal(**flags: str) -> str:
    try:
        load(flags, {})
    except SettingError as exc:
        return str(exc)
    return ""


async def serve(seen: dict[str, Any]) -> None:
    """Start a process that has all of them, and ask it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = wiring.build(load({**ANYWHERE, "grpc_port": str(port)}, {}), Role.SERVE, "kettle://boil")
    await process.service.start()
    try:
        assert process.public is not None
        ports = {"public": process.public.port, "admin": process.admin.port}

        async def ask(door: str, path: str, body: dict[str, str] | None = None) -> tuple[int, Any]:
            status, text = await asyncio.to_thread(asked, ports[door], path, body)
            return status, json.loads(text) if text.startswith("{") else text

        seen["dialect"] = type(reach("http://h/kettle").dialect).__name__
        seen["backend"] = (await ask("public", "/v1/inference", {"input": "water"}))[1]["output"]
        seen["inference route"] = await ask("public", "/brew", {"leaves": "oolong"})
        seen["inference error"] = await ask("public", "/brew", {"leaves": "oolong", "model": "nobody's"})
        seen["native error"] = (await ask("public", "/v1/inference", {"leaves": "oolong"}))[1]["error"]
        seen["route"] = await ask("public", "/tea")
        seen["error"] = await ask("public", "/tea?coffee")
        contract = (await ask("public", "/openapi.json"))[1]
        seen["contract"] = [one for one in contract["x-headway-errors"] if one["error"] == "TEAPOT"]
        seen["answers"] = sorted(contract["paths"]["/v1/inference"]["post"]["responses"])
        seen["paths"] = sorted(contract["paths"])
        seen["method of gRPC"] = [await asyncio.to_thread(poured, port, leaves) for leaves in ("oolong", "coffee")]
        seen["policy"] = (await ask("admin", "/internal/health"))[1]["policy"]
        seen["best route"] = await ask("public", "/tea/best")
        exported = (await ask("admin", "/metrics"))[1]
        seen["metric"] = "# TYPE headway_cups_total counter" in exported
        seen["gauge"] = "\nheadway_tea_seconds 4.0\n" in exported
    finally:
        await process.service.stop()


async def work(seen: dict[str, Any]) -> None:
    """Start a process of the role that was added, and ask it."""
    process = wiring.build(load(ANYWHERE, {}), Role("butler"), "kettle://boil")
    await process.service.start()
    try:
        health = json.loads((await asyncio.to_thread(asked, process.admin.port, "/internal/health"))[1])
        seen["role"] = (health["role"], (await asyncio.to_thread(asked, process.admin.port, "/readyz"))[0])
        seen["port"] = process.public is not None
    finally:
        await process.service.stop()


def main() -> None:
    seen: dict[str, Any] = {"where": headway.__file__}
    seen["rule"] = type(build("patient", None)).__name__
    seen["broker"] = type(make_broker_bundle(load(ANYWHERE, {}), BrokerCounts(), lambda: 0.0).broker).__name__
    seen["setting"] = load({}, {"HEADWAY_STEEP_S": "5"}).steep_s  # type: ignore[attr-defined]
    seen["bounds"] = refusal(steep_s="601")
    seen["unknown policy"] = refusal(policy="impatient")
    seen["refusal"] = "TEAPOT" in errors.REFUSALS
    counts = GatewayCounts()
    counts.cups["m"] += 1  # type: ignore[attr-defined]
    counts.forget("m")
    seen["forgotten"] = not counts.cups  # type: ignore[attr-defined]
    seen["help"] = {name: shown(name, "--help-all") for name in ("serve", "simulate", "butler")}
    seen["no broker"] = ""
    try:
        wiring.build(load({}, {}), Role("butler"), "kettle://boil")
    except SettingError as exc:
        seen["no broker"] = str(exc)
    asyncio.run(serve(seen))
    asyncio.run(work(seen))
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
