"""The glossary of docs/architecture.md."""

import re
from collections import Counter
from pathlib import Path

ARCHITECTURE = Path(__file__).parent.parent / "docs" / "architecture.md"


def test_the_glossary_has_each_word_once() -> None:
    glossary = ARCHITECTURE.read_text(encoding="utf-8").split("## Glossary", 1)[1].split("\n## ", 1)[0]
    words = Counter(re.findall(r"^\| ([a-z][a-z ]*) \|", glossary, re.MULTILINE))
    words -= Counter({"word": glossary.count("| word |")})
    assert words
    assert [word for word, count in words.items() if count > 1] == []
