"""Checks that the documents' names, numbers and paths are true."""

import json
import re
import runpy
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import headway
from headway import dialects, errors
from headway.cli import COMMANDS
from headway.config.extras import PACKAGES
from headway.core import policies
from headway.grpc.status import pushback, status_of
from headway.runtime.counters import Counters
from headway.telemetry.figures import ProcessFigures, State
from headway.telemetry.metrics import families
from tests.cli.command import code_of

ROOT = Path(headway.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOR_USERS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
FOREIGN_FLAGS = {
    "--build-arg", "--cap-drop", "--create-namespace", "--data-binary", "--debug", "--deploy-hook", "--detach",
    "--enable-feature", "--generate-hashes", "--gpus", "--grpc", "--home-dir", "--namespace", "--no-deps", "--now",
    "--offline", "--python", "--read-only", "--require-hashes", "--sample", "--security-opt", "--shell", "--stop-timeout",
    "--strict", "--syntax-only", "--system", "--tmpfs", "--values", "--wait",
}  # fmt: skip
"""Flags of other programs on the pages for users."""
FROM_OTHERS = {"Connection reset by peer"}
"""Messages in troubleshooting.md that come from other programs."""
TABLES = {"headway_key_changes", "headway_keys", "headway_open_requests", "headway_requests", "headway_schema"}
"""Tables of the ledger's database, whose names have the same prefix as metrics."""


def content(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_the_table_of_settings_is_that_of_the_settings() -> None:
    renewed, page = runpy.run_path(str(DOCS / "settings.py"))["renewed"], content("settings")
    assert renewed(page) == page, "run: python docs/settings.py"


NUMBERS = runpy.run_path(str(DOCS / "quoted.py"))
KEPT = json.loads(NUMBERS["KEPT"].read_text(encoding="utf-8"))


def test_pages_quote_numbers_as_they_were_measured() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert NUMBERS["renewed"](text, KEPT) == text, f"{page}: run: python docs/quoted.py"
        if page.parent.name in ("benchmarks", "decisions"):
            continue
        beside_peers = re.findall(r"^.*(?:mosec|Triton).*\d\.\d\d.*$", text, re.MULTILINE)
        unquoted = [line for line in beside_peers if "<!-- " not in line and "| Headway 0.1.0 |" not in line]
        assert unquoted == [], f"{page}: a figure beside a peer's is quoted from numbers.json: see docs/quoted.py"


def test_the_page_of_numbers_is_that_of_the_last_runs() -> None:
    assert NUMBERS["TABLE"].read_text(encoding="utf-8") == NUMBERS["table"](KEPT), "run: python docs/quoted.py"


def test_a_quote_follows_its_number_and_one_of_nothing_is_told() -> None:
    kept = {"peer": {"checks": [{"what": "paced: against mosec", "value": 0.4567}]}}
    assert NUMBERS["renewed"]("**0.9 ms**<!-- peer: paced: against mosec -->!", kept) == (
        "**0.5 ms**<!-- peer: paced: against mosec -->!"
    )
    with pytest.raises(ValueError, match=r"nothing is kept of <!-- peer: window -->"):
        NUMBERS["renewed"]("0.98 × <!-- peer: window -->", kept)


def test_every_error_is_in_its_page_with_its_status() -> None:
    told = re.findall(r"^\| (\d{3}) \| `([A-Z_]+)` \|", content("errors"), re.MULTILINE)
    shown = {(status, errors.SHOWN.get(code, code)) for code, status in errors.STATUS.items()}
    assert {(int(status), code) for status, code in told} == shown
    assert len(told) == len(errors.STATUS)


def test_every_error_is_in_the_page_of_grpc_with_its_status() -> None:
    table = content("grpc").split("\n## Errors\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([A-Z_]+) \| (.*) \| (later|never) \|$", table, re.MULTILINE)
    told = [(code, status, retry) for status, cell, retry in rows for code in re.findall(r"`([A-Z_]+)`", cell)]
    over_http = {errors.METHOD_NOT_ALLOWED, errors.HEADERS_TOO_LARGE}
    assert set(told) == {
        (errors.SHOWN.get(code, code), status_of(code).name, "later" if pushback(code, 1.0) > 0 else "never")
        for code in errors.CODES.keys() - over_http
    }
    assert len(told) == len(set(told))


def test_every_refusal_is_in_the_page_of_the_ledger() -> None:
    told = content("ledger").split("\nThis applies to ", 1)[1].split(". ", 1)[0]
    assert set(re.findall(r"`([A-Z_]+)`", told)) == {errors.SHOWN.get(code, code) for code in errors.REFUSALS}


def test_every_metric_is_in_its_page_and_no_other() -> None:
    made = families(State(Counters(), ProcessFigures(["free"])))
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in made}
    assert set(re.findall(r"^\| `(headway_[a-z_]+)` \|", content("metrics"), re.MULTILINE)) == names
    texts = "".join(page.read_text(encoding="utf-8") for page in FOR_USERS)
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bheadway_[a-z_]+", texts)}
    assert used - names - TABLES - {"headway_"} == set()


@pytest.mark.parametrize(
    ("page", "head", "names"),
    [("batching", "| `--policy` |", policies.NAMES), ("remote", "| dialect | URL |", dialects.NAMES)],
)
def test_every_policy_and_dialect_is_in_its_pages_table(page: str, head: str, names: tuple[str, ...]) -> None:
    table = content(page).split(head, 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == set(names)


def test_every_flag_in_the_documents_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [[name] for name in COMMANDS] + [["dlq", name] for name in ("list", "show", "replay", "purge")]
    commands += [["keys", name] for name in ("create", "list", "revoke", "rotate")]
    commands += [["bulk", name] for name in ("submit", "status", "list", "fetch", "cancel")]
    commands += [["rollout", name] for name in ("start", "status", "promote", "abort")]
    for command in commands:
        assert code_of([*command, "--help-all"]) == 0
    known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    texts = "".join(page.read_text(encoding="utf-8") for page in FOR_USERS)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", texts)) - known - FOREIGN_FLAGS == set()


def test_troubleshooting_quotes_messages_as_they_are_printed() -> None:
    joined = re.compile(r'"\s*\n\s*[rf]?"')
    glued = re.compile(r"(?<=\w)\{[^{}]+\}")
    texts = [source for path, source in sources().items() if path.is_relative_to(ROOT / "headway")]
    printed = " ".join(glued.sub("", joined.sub("", source)) for source in texts)
    rows = re.findall(r"^\| (.+?) \|", content("troubleshooting"), re.MULTILINE)
    quoted = {message for row in rows for message in re.findall(r"`` (.+?) ``|(?<!`)`([^`]+)`(?!`)", row)}
    parts = {part.strip() for message in quoted for part in re.split(r"[…'=:]", "".join(message))}
    assert {part for part in parts if len(part.split()) > 2 and not is_printed(part, printed)} == FROM_OTHERS


def is_printed(part: str, printed: str) -> bool:
    """Return True if the sources have this string. F-string fields may replace some of its words."""
    words = [re.escape(word) for word in part.split()]
    spans = [(begin, end) for begin in range(len(words)) for end in range(begin + 1, min(begin + 3, len(words)) + 1)]
    patterns = [" ".join([*words[:begin], r"\{[^{}]+\}", *words[end:]]) for begin, end in spans]
    return part in printed or any(re.search(pattern, printed) for pattern in patterns)


def test_every_link_leads_somewhere() -> None:
    assert [(page, link) for page in PAGES for link in links(page) if not leads_somewhere(page, link)] == []


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in found if not link.startswith(("http://", "https://"))]


def leads_somewhere(page: Path, link: str) -> bool:
    """Return True if a link's file exists, and its anchor if it has one."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path) if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_decision_is_in_the_list() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    for record in (DOCS / "decisions").glob("0*.md"):
        heading = record.read_text(encoding="utf-8").partition("\n")[0]
        number, title = re.findall(r"^# (\d{4}) · (.+)$", heading)[0]
        assert list(record.parent.glob(f"{number}-*")) == [record], "each number is of one record"
        assert f"| [{number}]({record.name}) | {title} |" in listed


SOURCES = ("headway", "bench", "tests")
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that describe the project as it is now."""
FOREIGN_FILES = {"path/file.py", "path/to/file.py"}
"""File names in the documents that stand for the reader's own files."""


@cache
def folders() -> list[Path]:
    return [path for folder in SOURCES for path in (ROOT / folder, *(ROOT / folder).rglob("*")) if path.is_dir()]


@cache
def sources() -> dict[Path, str]:
    ours = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".lua")]
    return {path: path.read_text(encoding="utf-8") for path in ours}


def test_every_source_file_that_is_named_exists() -> None:
    missing = set[tuple[Path, str]]()
    for page in CURRENT:
        places = [page.parent, ROOT, *folders()]
        named = {*re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|lua))(?=[`:])", page.read_text(encoding="utf-8"))}
        missing |= {(page, one) for one in named - FOREIGN_FILES if not any((place / one).exists() for place in places)}
    assert missing == set()


def test_every_name_in_a_source_file_that_is_named_exists() -> None:
    missing = []
    for page in CURRENT:
        text = page.read_text(encoding="utf-8")
        for file, first, others in re.findall(r"`([\w/.]+\.(?:py|lua)): ([\w.]+)`((?:, `\w+`)*)", text):
            texts = [text for path, text in sources().items() if f"/{path}".endswith(f"/{file}")]
            for name in (*first.split("."), *re.findall(r"\w+", others)):
                defined = rf"(?:def|class|function|local) {name}\b|^\s*{name}\b.* = "
                if not any(re.search(defined, text, re.MULTILINE) for text in texts):
                    missing.append((page, file, name))
    assert missing == []


def test_every_member_of_a_class_that_is_named_exists() -> None:
    texts: dict[str, str] = {}
    for text in sources().values():
        for owner in re.findall(r"^class (\w+)", text, re.MULTILINE):
            texts[owner] = texts.get(owner, "") + text
    missing = []
    for page in CURRENT:
        for owner, member in re.findall(r"`([A-Z][a-zA-Z]+)\.([a-z_]\w*)`", page.read_text(encoding="utf-8")):
            if not re.search(rf"\b{member}\b", texts.get(owner, "")):
                missing.append((page, owner, member))
    assert missing == []


def test_no_hint_asks_a_package_index_for_headway() -> None:
    """Headway isn't on any, so that name is someone else's. Hints name the missing packages, or a checkout."""
    sources = [path for folder in ("headway", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    for page in [*PAGES, *sources]:
        found = re.search(r"headway\[\w|pip install '?headway\b", page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(ROOT)}: {found[0]}"


def test_the_packages_of_an_extra_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {name: tuple(extras[name]) for name in PACKAGES} == PACKAGES


def test_every_program_that_is_named_with_its_folder_exists() -> None:
    texts = [*PAGES, *(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))]
    named = {
        path
        for text in texts
        if text.name != "CHANGELOG.md"
        for path in re.findall(r"\b(?:bench|examples)/[\w/]+\.py\b", text.read_text(encoding="utf-8"))
    }
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_the_glossary_has_each_word_once() -> None:
    glossary = content("architecture").split("## Glossary", 1)[1].split("\n## ", 1)[0]
    words = Counter(re.findall(r"^\| ([a-z][a-z ]*) \|", glossary, re.MULTILINE))
    words -= Counter({"word": glossary.count("| word |")})
    assert words
    assert [word for word, count in words.items() if count > 1] == []
