import itertools
import json
import re
import unicodedata

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.input_policy import (
    CHARACTERS,
    FORMS,
    LEAST_RUN,
    MOST_MARKS,
    MOST_TEXTS,
    PIECE,
    TOO_MANY,
    Effect,
    Form,
    InputRule,
    Noted,
    Screen,
    Search,
    normalise,
    run_over,
    texts_of,
)
from headway.core.tensors import Tensor, TensorHead, join_elements, pack
from headway.model import Tensors, Value

UNSEEN = re.compile(f"[{''.join(CHARACTERS.values())}]")
REMOVE = InputRule(name="unseen", characters=tuple(CHARACTERS))
EVERYTHING = [chr(point) for point in (*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE1000))]
"""All characters but those of planes without any, or of private use."""
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("\u200b\u202e\u2066\U000e0041\ufe0f\u00ad\u0301\u0316\u212b\ufb03\uff49e\ufdfa\u3164\uffa0"),
    ),
    max_size=30,
)


def has(word: str) -> Search:
    return lambda text: word in text


def screen(*rules: InputRule) -> Screen:
    return Screen(rules, {rule.name: has(rule.patterns[0]) for rule in rules if rule.patterns})


def look(screen: Screen, value: Value) -> tuple[Value, str, Noted]:
    noted: Noted = set()
    return *screen.value(value, noted), noted


@pytest.mark.parametrize("form", FORMS)
def test_no_normalisation_makes_a_character_that_a_rule_removes(form: Form) -> None:
    assert UNSEEN.findall(unicodedata.normalize(form, UNSEEN.sub("", "\n".join(EVERYTHING)))) == []


def test_classes_hold_every_character_of_formatting_that_is_not_seen() -> None:
    """Except visible ones: signs before Arabic and Kaithi digits, and hieroglyph joiners."""
    left = {one for one in EVERYTHING if unicodedata.category(one) == "Cf" and UNSEEN.match(one) is None}
    names = {unicodedata.name(one).split()[0] for one in left}
    assert names <= {"ARABIC", "SYRIAC", "KAITHI", "EGYPTIAN"}


def test_control_characters_of_plain_texts_are_removed_or_refused() -> None:
    controls = InputRule(name="controls", characters=("control",))
    assert look(screen(controls), "a\tb\x1b[0m\r\n\x7f") == ("a\tb[0m\r\n", "", {("controls", Effect.CHANGED)})
    assert look(screen(msgspec.structs.replace(controls, action="refuse")), "a\x07")[1] == "controls"
    assert look(screen(REMOVE), "a\tb\n") == ("a\tb\n", "", set())


def test_a_text_is_as_long_as_a_rule_says_whatever_would_be_removed() -> None:
    short = screen(InputRule(name="length", longest=3), REMOVE)
    assert look(short, "é😀x") == ("é😀x", "", set())
    assert look(short, "ab\u200bc")[1] == "length"
    assert look(short, b'["abc", "abcd"]')[1] == "length"


@given(TEXTS, st.sampled_from(FORMS))
def test_a_screened_text_holds_nothing_that_is_removed_and_is_not_changed_again(text: str, form: Form) -> None:
    both = screen(InputRule(name="form", normalise=form), REMOVE)
    screened, refusing, noted = look(both, text)
    assert isinstance(screened, str)
    assert refusing == ""
    assert UNSEEN.search(screened) is None
    assert unicodedata.is_normalized(form, screened)
    assert look(both, screened) == (screened, "", set())
    assert (screened != text) == any(effect is Effect.CHANGED for _, effect in noted)


@given(TEXTS)
def test_a_text_with_an_unseen_character_is_refused_where_these_are(text: str) -> None:
    rule = InputRule(name="unseen", characters=tuple(CHARACTERS), action="refuse")
    found = look(screen(rule), text)
    assert found[:2] == (text, "unseen" if UNSEEN.search(text) else "")


@pytest.mark.parametrize(
    "hidden", ["ev\u200bil", "\uff45\uff56\uff49\uff4c", "e\u202evil", "ev\U000e0069il", "e\ufeffvil", "ev\ufe0fil"]
)
def test_a_pattern_is_looked_for_in_what_the_model_gets(hidden: str) -> None:
    rules = (InputRule(name="words", patterns=("evil",)), InputRule(name="form", normalise="NFKC"), REMOVE)
    assert look(screen(*rules), hidden)[1] == "words"
    assert look(screen(rules[0]), hidden)[1] == ""


@given(st.lists(st.tuples(st.sampled_from("ab\u00e9"), st.integers(1, 30)), max_size=6), st.integers(LEAST_RUN, 20))
def test_a_run_is_found_where_it_is_too_long_and_nowhere_else(pieces: list[tuple[str, int]], longest: int) -> None:
    text = "".join(character * length for character, length in pieces)
    runs = (len(list(group)) for _, group in itertools.groupby(text))
    assert run_over(longest)(text) == any(length > longest for length in runs)


class Counted(str):
    """A string that counts how many of its characters are sliced out or searched by `count`."""

    looked = 0

    def __getitem__(self, place: object) -> str:
        found = str.__getitem__(self, place)  # type: ignore[index]
        Counted.looked += len(found)
        return found

    def count(self, sub: str, begin: int = 0, end: int = 0) -> int:  # type: ignore[override]
        Counted.looked += end - begin
        return str.count(self, sub, begin, end)


@pytest.mark.parametrize("text", ["a" * LEAST_RUN + "b", "abbb", "ab"])
@pytest.mark.parametrize("longest", [LEAST_RUN, 100])
def test_a_search_for_runs_looks_at_a_character_a_bounded_number_of_times(text: str, longest: int) -> None:
    for length in (1_000, 10_000):
        Counted.looked = 0
        run_over(longest)(Counted((text * length)[:length]))
        assert Counted.looked <= 8 * length


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mark", ["\u0315\u0316", "\u0301", "\u0f73", "\u0301\U0001e8d0"])
def test_a_text_with_marks_without_end_is_not_normalised(mark: str, form: Form) -> None:
    assert normalise("e" + mark * (MOST_MARKS // 2 // len(mark)), form) is not None
    assert normalise("text " * 50 + mark * MOST_MARKS * 500, form) is None
    assert look(screen(InputRule(name="form", normalise=form)), "e" + mark * 500)[1] == "form"


def test_a_text_that_grows_beyond_measure_is_not_normalised() -> None:
    assert normalise("\ufdfa" * PIECE, "NFKC") == unicodedata.normalize("NFKC", "\ufdfa") * PIECE
    assert normalise("a" * PIECE + "\ufdfa" * PIECE, "NFKC") is None
    assert normalise("\u212b" * 3 * PIECE, "NFKC") == "\u00c5" * 3 * PIECE


def escaped(text: str) -> str:
    units = text.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[place]:02x}{units[place + 1]:02X}" for place in range(0, len(units), 2)) + '"'


@pytest.mark.parametrize(
    "value",
    [
        b'["evil"]',
        b'{"evil": 1}',
        b'{"a": [1, {"b": ["x", "an evil one"]}]}',
        b'{"a": "evil", "a": "good"}',
        b'["' + rb"\u0065\u0076\u0069\u006c" + b'"]',
        b'["ev\\u200bil"]',
        '["\\"\uff45vil"]'.encode(),
        b'["\\\\", "evil"]',
        b'["ev' + rb"\udb40\udc69" + b'il"]',
        b"[" + escaped("an evil\U000e0041 one").encode() + b"]",
    ],
)
def test_nothing_is_hidden_in_a_json_value(value: bytes) -> None:
    all_of_it = screen(InputRule(name="words", patterns=("evil",)), InputRule(name="form", normalise="NFKC"), REMOVE)
    assert look(all_of_it, value) == (value, "words", look(all_of_it, value)[2])


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


def each_text(tree: object, screen: Screen) -> object:
    if isinstance(tree, str):
        return screen.text(tree, set())[0]
    if isinstance(tree, list):
        return [each_text(one, screen) for one in tree]
    if isinstance(tree, dict):
        return {screen.text(name, set())[0]: each_text(one, screen) for name, one in tree.items()}
    return tree


@settings(max_examples=50)
@given(st.lists(JSON, max_size=4), st.booleans())
def test_a_json_value_keeps_all_but_what_is_changed_in_its_texts(tree: list[object], ascii_only: bool) -> None:
    both = screen(InputRule(name="form", normalise="NFKC"), REMOVE)
    text = json.dumps(tree, ensure_ascii=ascii_only).encode()
    screened, refusing, _ = look(both, text)
    assert isinstance(screened, bytes)
    assert refusing == ""
    assert json.loads(screened) == each_text(tree, both)
    assert all(UNSEEN.search(one) is None for one in texts_of(screened))
    if each_text(tree, both) == tree and not any(UNSEEN.search(one) for one in texts_of(text)):
        assert screened == text
    assert look(both, screened)[0] == screened


def test_a_json_value_without_a_text_to_change_keeps_each_of_its_bytes() -> None:
    value = b'{"n": [1.0, 1e2, 123456789012345678901234567890], "s": "\\u0041\\/", "d": {"x": 1, "x": 2}}'
    assert look(screen(REMOVE, InputRule(name="form", normalise="NFKC")), value) == (value, "", set())


def test_a_json_value_with_too_many_different_texts_is_refused() -> None:
    few, many = (json.dumps([f"text {number}" for number in range(count)]).encode() for count in (10, MOST_TEXTS + 1))
    same = json.dumps(["text"] * (MOST_TEXTS + 1)).encode()
    rule = InputRule(name="words", patterns=("evil",))
    assert [look(screen(rule), value)[1] for value in (few, same, many)] == ["", "", TOO_MANY]
    shadow = InputRule(name="words", patterns=("evil",), shadow=True)
    assert look(screen(shadow), many) == (many, "", {(TOO_MANY, Effect.SHADOW)})


def test_a_rule_in_shadow_changes_and_refuses_nothing() -> None:
    rules = (
        InputRule(name="words", patterns=("evil",), shadow=True),
        InputRule(name="form", normalise="NFKC", shadow=True),
        InputRule(name="unseen", characters=("zero-width",), shadow=True),
        InputRule(name="barred", characters=("zero-width",), action="refuse", shadow=True),
        InputRule(name="runs", longest_run=8, shadow=True),
    )
    text = "evil ﬁ\u200b" + "a" * 9
    assert look(screen(*rules), text) == (text, "", {(rule.name, Effect.SHADOW) for rule in rules})


def test_a_rule_is_for_its_tiers_and_models() -> None:
    rule = InputRule(name="words", patterns=("evil",), tiers=("free", "paid"), models=("chat",))
    assert [rule.applies(*asked) for asked in (("free", "chat"), ("gold", "chat"), ("free", "code"))] == [
        True,
        False,
        False,
    ]
    assert InputRule(name="all").applies("any", "one")


def texts_as_tensors(*elements: bytes) -> Tensors:
    numbers = Tensor(TensorHead("n", "FP32", (1, 2)), b"evil" + bytes(4))
    return pack([numbers, Tensor(TensorHead("t", "BYTES", (1, len(elements))), join_elements(elements))], single=True)


def test_texts_in_tensors_are_looked_at_and_numbers_are_not() -> None:
    rules = screen(InputRule(name="words", patterns=("evil",)), REMOVE)
    value = texts_as_tensors(b"good", "o\u200bk".encode(), b"\xff evil")
    changed = texts_as_tensors(b"good", b"ok", b"\xff evil")
    assert look(rules, value) == (changed, "", {("unseen", Effect.CHANGED)})
    assert texts_of(value) == ["good", "o\u200bk"]
    assert look(rules, texts_as_tensors(b"an evil one"))[1] == "words"
    numbers = pack([Tensor(TensorHead("n", "FP32", (1, 2)), b"evil" + bytes(4))])
    assert look(rules, numbers) == (numbers, "", set())
    assert texts_of(numbers) == []
    assert look(rules, texts_as_tensors(*[b"a"] * (MOST_TEXTS + 1)))[1] == TOO_MANY
