"""Compares the output that a page shows with the real one: numbers, times and ids may differ, words may not."""

import re
from collections.abc import Iterable, Mapping, Sequence

KEY = "hw_live_"
_ID = r"(?:req_|hw_live_)[\w-]+"
_TOKEN = re.compile(
    rf"(?P<cut>{_ID}…)|(?P<id>{_ID})|(?P<gap>…)|(?P<date>\b[A-Z][a-z]{{2}}, \d+ [A-Z][a-z]{{2}} \d{{4}})|(?P<zone>\+00:00|\bZ\b)"
    r"|(?P<host>\b(?:store|gpu-[ab])-\d+(?:-[0-9a-f-]{36})?)|(?P<number>\d(?:[\d.,]*\d)?)|(?P<rule>─+)|(?P<slot>\b[cg]pu-(?=\d))|(?P<blank>\s+)"
)
_ANY = {
    "cut": f"{_ID}.*",
    "gap": ".*",
    "date": r"\w{3}, \d+ \w{3} \d{4}",
    "zone": r"(?:\+00:00|Z)",
    "host": r"[\w.-]+",
    "number": r"\d(?:[\d.,]*\d)?",
    "rule": "─+",
    "slot": "[cg]pu-",
    "blank": r"\s+",
}


def missing(shown: Sequence[str], came: str, ids: dict[str, str]) -> str | None:
    """Return the first shown line that didn't come, in this order, or None. Adds to `ids`, from the page's ids to the real ones."""
    left = iter(came.splitlines())
    for line in shown:
        if line.strip() in ("", "…"):
            continue
        names, pattern = _pattern(line.strip(), ids)
        if not _found(pattern, names, left, ids):
            return line
    return None


def _found(pattern: re.Pattern[str], names: Sequence[str], left: Iterable[str], ids: dict[str, str]) -> bool:
    for line in left:
        if match := pattern.fullmatch(line.strip()):
            for name, came in zip(names, match.groups(), strict=True):
                ids[name] = came
                if name.startswith(KEY):
                    ids[name.split("_")[2]] = came.split("_")[2]
            return True
    return False


def _pattern(line: str, ids: Mapping[str, str]) -> tuple[list[str], re.Pattern[str]]:
    """Return the unknown ids in a line, and a pattern with a group for each of them."""
    for name, came in ids.items():
        line = line.replace(name, came)
    names: list[str] = []
    parts: list[str] = []
    end = 0
    for token in _TOKEN.finditer(line):
        parts.append(re.escape(line[end : token.start()]))
        if token.lastgroup == "id":
            known = token[0] in ids.values()
            names += [] if known else [token[0]]
            parts.append(re.escape(token[0]) if known else f"({_ID})")
        else:
            parts.append(_ANY[token.lastgroup or ""])
        end = token.end()
    return names, re.compile("".join([*parts, re.escape(line[end:])]))
