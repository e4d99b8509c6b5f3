"""Lets the code that is reached guide the inputs, with libFuzzer by way of atheris, which is no dependency of ours.

    pip install atheris
    python -m tests.fuzz.guided "request head" -max_total_time=60

The first argument is the name of a parser, the others are libFuzzer's. It ends at the first broken promise, and shows the
input.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["headway", "jwt", "json"]):
    from tests.fuzz.parsers import parsers


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    folder = Path(tempfile.mkdtemp())
    known = {parser.name: parser for parser in parsers(folder)}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in known:
        sys.exit(f"name one of: {', '.join(known)}")
    chosen = known[name]
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for place, seed in enumerate(chosen.seeds):
        (corpus / str(place)).write_bytes(seed)
    words.write_text("".join(map(_line, chosen.words)))
    own = [f"-dict={words}", f"-artifact_prefix={folder}/", "-max_len=4096", "-timeout=5", "-rss_limit_mb=1500"]
    atheris.Setup([sys.argv[0], str(corpus), *own, *sys.argv[2:]], chosen.check)
    atheris.Fuzz()


def _line(word: bytes) -> str:
    """A word as libFuzzer's dictionaries have it."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word[:60]) + '"\n'


if __name__ == "__main__":
    main()
