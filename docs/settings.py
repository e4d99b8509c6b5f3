"""The table of settings in settings.md, made from the fields of headway/config/settings.py.

python docs/settings.py        # writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headway.config import FIELDS, PREFIX, flag, kind

PAGE = Path(__file__).with_name("settings.md")
BEGIN = "<!-- settings: made by docs/settings.py -->\n"
END = "<!-- end of settings -->\n"


def table() -> str:
    """One row for each setting, under a row for each group."""
    return "\n".join(_lines()) + "\n"


def renewed(page: str) -> str:
    """Return the page with the table as it is now; raise ValueError if the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table()}{END}{after}"


def _lines() -> Iterator[str]:
    yield "| flag | environment | `headway.toml` | default | what |"
    yield "|---|---|---|---|---|"
    group = ""
    for name, field in FIELDS.items():
        if field.group != group:
            group = field.group
            yield f"| **{group}** | | | | |"
        switch = f" / `--no-{flag(name)[2:]}`" if kind(name) is bool else ""
        spelt = f"`{flag(name)}`{switch}"
        cells = (spelt, f"`{PREFIX}{name.upper()}`", f"`{name}`", _default(name))
        yield f"| {' | '.join(cells)} | {field.help.replace('|', '&#124;')} |"


def _default(name: str) -> str:
    value, unit = FIELDS[name].default, FIELDS[name].unit
    if value is None or value == "":
        return "–"
    shown = "off" if value is False else f"{value:.15g}" if isinstance(value, float) else str(value)
    return f"{shown} {unit}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
