"""Results of a benchmark and checks against bounds, printed as tables and saved as JSON."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

OUT = Path(__file__).parent.parent / "out"
"""Folder of results and logs."""

_WIDTH = 200
_PACKAGES = ("headway", "mosec", "litserve", "mlcommons-loadgen", "uvloop", "httptools", "msgspec", "torch")


class Findings:
    """Findings of one benchmark, whose results file is named after it."""

    def __init__(self, name: str, **conditions: object) -> None:
        self._name = name
        self._conditions = conditions
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = _WIDTH
        self._checks: list[dict[str, object]] = []
        self._tables: dict[str, list[dict[str, object]]] = {}
        self._details: dict[str, Any] = {}
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Print and save a table. Each row maps columns to cells."""
        self._tables[title] = [dict(row) for row in rows]
        shown = Table(box=box.SIMPLE, title=title, title_justify="left")
        columns = list(dict.fromkeys(name for row in rows for name in row))
        for name in columns:
            number = all(isinstance(row.get(name), int | float | None) for row in rows)
            shown.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*(_cell(row.get(name)) for name in columns))
        self._console.print(shown)

    def keep(self, name: str, detail: object) -> None:
        """Save a detail in the file only."""
        self._details[name] = detail

    def check(self, what: str, value: float, bound: str, passed: bool) -> None:
        self._checks.append({"what": what, "value": value, "bound": bound, "passed": passed})

    def figure(self, what: str, value: float) -> None:
        """Save a number without a bound, for pages to quote."""
        self.check(what, value, "", True)

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self.check(what, value, f"≤ {bound:,.15g} {unit}".rstrip(), value <= bound)

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self.check(what, value, f"≥ {bound:,.15g} {unit}".rstrip(), value >= bound)

    def none(self, what: str, value: float) -> None:
        self.check(what, value, "0", value == 0)

    def close(self) -> int:
        """Print the checks, write the file, and return the exit code: 1 if a check failed."""
        rows = [{**check, "passed": "yes" if check["passed"] else "NO"} for check in self._checks if check["bound"]]
        if rows:
            self.table("Checks", rows)
            del self._tables["Checks"]
        path = OUT / f"{self._name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "benchmark": self._name,
            "started_at": self._started_at,
            "command": sys.argv,
            "machine": machine(),
            "conditions": self._conditions,
            "checks": self._checks,
            "tables": self._tables,
            "details": self._details,
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        self.say(f"Written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
        return 0 if all(check["passed"] for check in self._checks) else 1


def machine() -> dict[str, object]:
    """Return the facts about the machine that the results depend on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
