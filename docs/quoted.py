"""Measured numbers: taken from what the benchmarks left in bench/out, and written into the pages that quote them.

python docs/quoted.py              # writes the pages anew from benchmarks/numbers.json
python docs/quoted.py NAME …       # takes over the last run of these benchmarks first: `peer`, `cases`, …

A page quotes a number with a comment behind it, `149.7 ms<!-- promised: H1: p95 -->`: the program's name, and what it checked.
The quote keeps its number of decimals.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "bench" / "out"
KEPT = ROOT / "docs" / "benchmarks" / "numbers.json"
TABLE = KEPT.with_suffix(".md")
QUOTE = re.compile(
    r"(?<![\w.])(?P<number>\d[\d,]*(?:\.\d+)?)(?P<unit>[*a-zA-Z µ%×]{0,9})<!-- (?P<program>\w+): (?P<what>[^>]+?) -->"
)
HEAD = """# Numbers

One run of each program on one machine, by `python docs/quoted.py NAME`; README and the other pages quote these.
Ratios and simulated figures travel between machines, microseconds and milliseconds do not. Edit nothing here by hand.
"""


def pages() -> list[Path]:
    """Every page that may quote a number."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def take(kept: dict[str, Any], name: str) -> None:
    """Take over the last run of a benchmark."""
    run = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
    machine = run["machine"]
    kept[name] = {
        "date": run["started_at"][:10],
        "command": " ".join(run["command"]).removeprefix(f"{ROOT}/"),
        "machine": f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}",
        "checks": [{**check, "value": round(check["value"], 4)} for check in run["checks"]],
    }


def table(kept: dict[str, Any]) -> str:
    """The page with all numbers."""
    return "\n".join([HEAD, *(line for name in sorted(kept) for line in _section(name, kept[name]))]) + "\n"


def renewed(text: str, kept: dict[str, Any]) -> str:
    """A page's text with each quote as the number is now; raises ValueError for a quote of what was never measured."""

    def quoted(found: re.Match[str]) -> str:
        checks = kept.get(found["program"], {"checks": []})["checks"]
        value = next((check["value"] for check in checks if check["what"] == found["what"]), None)
        if value is None:
            raise ValueError(f"nothing is kept of <!-- {found['program']}: {found['what']} -->")
        decimals = len(found["number"].partition(".")[2])
        return f"{value:,.{decimals}f}{found['unit']}<!-- {found['program']}: {found['what']} -->"

    return QUOTE.sub(quoted, text)


def _section(name: str, run: dict[str, Any]) -> Iterator[str]:
    yield f"## {name} · {run['date']}\n"
    yield f"`{run['command']}` on {run['machine']}.\n"
    yield "| what | value | bound | met |"
    yield "|---|---|---|---|"
    for check in run["checks"]:
        met = "" if not check["bound"] else "yes" if check["passed"] else "**no**"
        yield f"| {check['what']} | {check['value']:,.15g} | {check['bound']} | {met} |"
    yield ""


def main() -> None:
    """Take over the runs that the command line names, and write all pages anew."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for name in sys.argv[1:]:
        take(kept, name)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    TABLE.write_text(table(kept), encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text, kept)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
