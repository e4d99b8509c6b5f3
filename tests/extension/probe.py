"""Runs a process of a copy with additions, and prints as JSON how each of them worked."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
import urllib.error
import urllib.request
from typing import Any

import headway
from headway import cli, errors
from headway.app import wiring
from headway.app.brokers import make_broker_bundle
from headway.config import load
from headway.core.policies import build
from headway.dialects.table import reach
from headway.errors import SettingError
from headway.model import Role
from headway.runtime.counters import BrokerCounts, GatewayCounts

ANYWHERE = {"port": "0", "admin_port": "0", "broker": "kettle://here", "policy": "patient", "steep_s": "4"}


def asked(port: int, path: str, body: dict[str, str] | None = None) -> tuple[int, str]:
    """GET a path, or POST `body` to it. Returns the status and text of the answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


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
    """Start a process with all additions, and call each."""
    process = wiring.build(load(ANYWHERE, {}), Role.SERVE, "kettle://boil")
    await process.service.start()
    try:
        assert process.public is not None
        ports = {"public": process.public.port, "admin": process.admin.port}

        async def ask(door: str, path: str, body: dict[str, str] | None = None) -> tuple[int, Any]:
            status, text = await asyncio.to_thread(asked, ports[door], path, body)
            return status, json.loads(text) if text.startswith("{") else text

        seen["dialect"] = type(reach("http://h/kettle").dialect).__name__
        seen["backend"] = (await ask("public", "/v1/inference", {"input": "water"}))[1]["output"]
        seen["route"] = await ask("public", "/tea")
        seen["error"] = await ask("public", "/tea?coffee")
        contract = (await ask("public", "/openapi.json"))[1]
        seen["contract"] = [error for error in contract["x-headway-errors"] if error["error"] == "TEAPOT"]
        seen["answers"] = sorted(contract["paths"]["/v1/inference"]["post"]["responses"])
        seen["paths"] = sorted(contract["paths"])
        seen["policy"] = (await ask("admin", "/internal/health"))[1]["policy"]
        seen["best route"] = await ask("public", "/tea/best")
        seen["metric"] = "# TYPE headway_cups_total counter" in (await ask("admin", "/metrics"))[1]
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
    seen["help"] = {name: shown(name, "--help-all") for name in ("serve", "simulate")}
    asyncio.run(serve(seen))
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
