"""A few hundred damaged inputs for every parser, the same in every run. `make fuzz` runs a million."""

from __future__ import annotations

import itertools
import math
import resource
import sys
from pathlib import Path

import pytest
import structlog

from headway.http.server.head import read_head
from headway.http.server.reader import Chunks
from headway.identity.api_keys import credential
from headway.identity.jwt.keysets import read_keys
from tests.fuzz import __main__ as program
from tests.fuzz import credentials, requests, wire
from tests.fuzz.parsers import Parser, parsers

NAMES = [parser.name for parser in parsers(Path())]
CASES = 500
"""Damaged inputs for one parser."""


def parser(name: str, folder: Path) -> Parser:
    return next(parser for parser in parsers(folder) if parser.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_and_short_inputs_break_no_promise_of_a_parser(name: str, tmp_path: Path) -> None:
    chosen = parser(name, tmp_path)
    short = [b"", *(bytes([octet]) for octet in range(256))] if chosen.weight >= 1 and chosen.draw is None else [b""]
    for data in (*short, *itertools.islice(chosen.inputs(0), math.ceil(CASES * min(chosen.weight, 1)))):
        try:
            chosen.check(data)
        except Exception as exc:
            exc.add_note(f"input: {data!r}")
            raise


def test_what_is_good_gets_through(tmp_path: Path) -> None:
    """Otherwise a parser that refuses everything would keep all promises."""
    for head in requests.HEADS:
        read_head(head)
    for body in requests.CHUNKED:
        chunks = Chunks(1000, 1000)
        chunks.feed(body)
        assert chunks.done
    assert credential.parse(credentials.KEYS[0]) is not None
    assert all(read_keys(text, "ES256") for text in credentials.KEY_SETS)
    assert read_keys(credentials.KEY_SETS[0], "RS256")
    for text in credentials.TOKENS[: len(credentials._GENUINE)]:
        assert credentials._EITHER.identify(text) is not None
    for name in NAMES:
        chosen = parser(name, tmp_path)
        for seed in chosen.seeds:
            chosen.check(seed)
    assert all(wire.read_reply(reply) for reply in wire.REPLIES)


def test_the_same_seed_makes_the_same_inputs(tmp_path: Path) -> None:
    for name in NAMES:
        first, again, other = (list(itertools.islice(parser(name, tmp_path).inputs(seed), 30)) for seed in (1, 1, 2))
        assert first == again
        assert first != other


def test_a_broken_promise_is_shown_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fragile(data: bytes) -> None:
        if b"!" in data:
            raise KeyError("fragile")

    broken = Parser("fragile", fragile, [b"good"], [b"!"], slow=math.inf)
    assert program.fuzz(broken, 2000, seed=1) == program.SHOWN
    shown = capsys.readouterr().out
    assert "KeyError: 'fragile'" in shown
    assert "fragile, seed 1, case " in shown
    assert program.fuzz(Parser("sturdy", lambda data: None, [b"good"]), 100, seed=1) == 0
    monkeypatch.setattr(program, "parsers", lambda folder: [broken])
    monkeypatch.setattr(resource, "setrlimit", lambda *limits: None)
    monkeypatch.setattr(structlog, "configure", lambda **options: None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "2000", "--seed", "1"])
    assert program.main() == 1
