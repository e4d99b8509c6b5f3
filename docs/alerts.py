"""The alerts of operations.md and fleet.md as a rule file of Prometheus, deploy/alerts.yml.

python docs/alerts.py        # writes it anew
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("operations.md", "fleet.md")
RULES = DOCS / "deploy" / "alerts.yml"

_ROW = re.compile(r"^\| ([^|]+) \| `((?:[^`|]|\\\|)+)`[^|]* \| ([^|]*) ?\| (page|ticket)\b[^|]*\|$", re.MULTILINE)
_HEADING = "| alert | expression | for | severity |\n"


def rules() -> str:
    """Text of the rule file."""
    lines = ["# Made by docs/alerts.py from the tables of operations.md and fleet.md.", "groups:"]
    for page in PAGES:
        lines += [f"  - name: headway {page.removesuffix('.md')}", "    rules:"]
        for told, expression, lasting, severity in alerts((DOCS / page).read_text(encoding="utf-8")):
            name = "".join(word[0].upper() + word[1:] for word in re.findall(r"\w+", told))
            lines += [f"      - alert: Headway{name}", f"        expr: {expression}"]
            lines += [f"        for: {lasting}"] if lasting else []
            lines += [f"        labels: {{severity: {severity}}}", f"        annotations: {{summary: {told}}}"]
    return "\n".join(lines) + "\n"


def alerts(page: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, expression, duration and severity of each alert in a page's table; raises ValueError where a row cannot be read."""
    _, heading, rest = page.partition(_HEADING)
    table = rest.partition("\n\n")[0].splitlines()[1:]
    if not heading or not table:
        raise ValueError("the page has no table of alerts")
    for line in table:
        row = _ROW.match(line)
        if not row:
            raise ValueError(f"no alert: {line}")
        told, expression, lasting, severity = row.groups()
        yield told, expression.replace(r"\|", "|"), lasting.replace(" ", ""), severity


if __name__ == "__main__":
    RULES.write_text(rules(), encoding="utf-8")
