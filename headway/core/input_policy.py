"""Input policy: rules for the strings that a model receives. A first line of defence against prompt injection, not a cure.

The rules that apply to a string's tier and model are checked by kind, whatever their order in the file:

    length → characters to refuse → characters to remove → normalisation → longest run → patterns

So patterns see the string as the model would. Removing and normalising once is enough: no normalised form contains a character that
a rule removes. A rule in shadow mode is only recorded. Everything takes time linear in the string."""

from __future__ import annotations

import enum
import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from headway.core.tensors import BYTES, Tensor, count_of, header_of, join_elements, pack, split_elements, unpack
from headway.model import Octets, Tensors, Value

Form = Literal["NFC", "NFKC"]  # Form of normalisation.
FORMS: tuple[Form, ...] = ("NFC", "NFKC")

# Invisible characters by class name, as ranges of a regular expression. Tab, line ends and U+0000 are not included.
CHARACTERS: Mapping[str, str] = {
    "control": "\u0001-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f",
    "zero-width": "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200d\u2060-\u2064\u206a-\u206f\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a",
    "bidi": "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069",
    "tags": "\U000e0000-\U000e007f",
    "variation-selectors": "\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef",
}

LEAST_RUN = 8  # Smallest limit for the longest run. Searching for shorter runs would take longer.
MOST_MARKS = 64  # Limit on consecutive combining marks in a string to normalise. Sorting them takes quadratic time.
GROWTH = 3  # Limit on how much a piece may grow when normalised. Some characters decompose into 18 others.
PIECE = 1024  # Characters in a piece of a string.
MOST_TEXTS = 10_000  # Limit on different strings in one JSON value, because each is checked separately.
TOO_MANY = "too-many-texts"  # Rule name for refusing a JSON value with more strings. No rule in a file has this name.

Search = Callable[[str], bool]  # Returns True if a string contains what it looks for.

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_read_text = msgspec.json.Decoder(str).decode
_ALIKE = re.compile(r"(?s)(.)(?=\1)")  # A character followed by itself.


class Effect(enum.Enum):
    """Effects of a rule on a request."""

    CHANGED = "changed"  # The string was normalised, or characters were removed.
    REFUSED = "refused"
    SHADOW = "shadow"  # The rule is in shadow mode, and would have changed or refused the string.
    FAILED = "failed"  # The rule's function returned no verdict.


Noted = set[tuple[str, Effect]]  # Names of rules, with their effects on one request.


class InputRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. Exactly one of the attributes that define its effect is set."""

    name: str  # Name of the rule, as clients and metrics see it.
    normalise: str = ""  # Form of normalisation.
    characters: tuple[str, ...] = ()  # Names of character classes.
    action: str = "remove"  # What to do with a string that contains one of these: `remove` them, or `refuse` it.
    longest: int = 0  # Limit on the characters of a text.
    longest_run: int = 0  # Limit on a run of one character.
    patterns: tuple[str, ...] = ()  # Regular expressions. A string that matches one is refused.
    function: str = ""  # Function that judges strings, written like a target.
    deadline_ms: float = 500.0  # Limit on the time of one call of the function.
    on_failure: str = "refuse"  # What to do with a request if the function returns no verdict: `refuse` or `admit`.
    processes: int = 1  # Processes that run the function.
    tiers: tuple[str, ...] = ()  # Names of the tiers that it applies to; empty for all.
    models: tuple[str, ...] = ()  # Names of the models that it applies to; empty for all.
    shadow: bool = False  # True if the rule is only recorded.

    def applies(self, tier: str, model: str) -> bool:
        return (not self.tiers or tier in self.tiers) and (not self.models or model in self.models)


class Screen:
    """Checks requests of one tier and model by their rules. Ignores rules that call a function. `searches` maps the names of
    rules with patterns to their search."""

    __slots__ = ("_barred", "_controls", "_enforced", "_forms", "_lengths", "_removed", "_searches")

    def __init__(self, rules: Sequence[InputRule], searches: Mapping[str, Search]) -> None:
        self._enforced = any(not rule.shadow for rule in rules)
        self._barred, self._removed = (
            [
                (rule.name, rule.shadow, re.compile(f"[{''.join(CHARACTERS[name] for name in rule.characters)}]"))
                for rule in rules
                if rule.characters and rule.action == action
            ]
            for action in ("refuse", "remove")
        )
        self._controls = any("control" in rule.characters for rule in rules)
        self._forms = [(rule.name, rule.shadow, form) for rule in rules for form in FORMS if rule.normalise == form]
        if self._forms:
            _marks()  # This takes a tenth of a second, so do it before any request has to wait for it.
        self._lengths = [(rule.name, rule.shadow, rule.longest) for rule in rules if rule.longest]
        runs = [(rule.name, rule.shadow, run_over(rule.longest_run)) for rule in rules if rule.longest_run]
        patterns = [(rule.name, rule.shadow, searches[rule.name]) for rule in rules if rule.patterns]
        self._searches: Sequence[tuple[str, bool, Search]] = (*runs, *patterns)

    def value(self, value: Value, noted: Noted) -> tuple[Value, str]:
        """Return the value as the model receives it, and the name of the rule that refuses it, or "". In JSON, all strings are
        checked, including member names, and members that a later member of the same name replaces. Octets and elements of BYTES
        tensors are checked if they are UTF-8."""
        if isinstance(value, str):
            return self.text(value, noted)
        if isinstance(value, Tensors):
            return self._tensors(value, noted)
        return self._json(value, noted) if isinstance(value, bytes) else self._octets(value, noted)

    def text(self, text: str, noted: Noted) -> tuple[str, str]:
        for name, shadow, longest in self._lengths:
            if len(text) > longest and _refused(name, shadow, noted):
                return text, name
        if not text.isascii() or (self._controls and not text.isprintable()):
            for name, shadow, pattern in self._barred:
                if pattern.search(text) is not None and _refused(name, shadow, noted):
                    return text, name
            for name, shadow, pattern in self._removed:
                text = _changed(name, shadow, text, pattern.sub("", text), noted)
            for name, shadow, form in self._forms:
                normalised = normalise(text, form)
                if normalised is not None:
                    text = _changed(name, shadow, text, normalised, noted)
                elif _refused(name, shadow, noted):
                    return text, name
        for name, shadow, search in self._searches:
            if search(text) and _refused(name, shadow, noted):
                return text, name
        return text, ""

    def _octets(self, value: Octets, noted: Noted) -> tuple[Octets, str]:
        text = text_of(value)
        if text is None:
            return value, ""
        changed, refusing = self.text(text, noted)
        return (value if changed == text else Octets(changed.encode())), refusing

    def _tensors(self, value: Tensors, noted: Noted) -> tuple[Tensors, str]:
        if not has_texts(value):
            return value, ""
        tensors = unpack(value)
        count = sum(count_of(tensor.head.shape) for tensor in tensors if tensor.head.datatype == BYTES)
        if count > MOST_TEXTS and _refused(TOO_MANY, not self._enforced, noted):
            return value, TOO_MANY
        changed = []
        for tensor in tensors:
            elements = []
            for element in split_elements(tensor.data) if tensor.head.datatype == BYTES else ():
                screened, refusing = self._octets(Octets(element), noted)
                if refusing:
                    return value, refusing
                elements.append(screened.content)
            changed.append(Tensor(tensor.head, join_elements(elements)) if elements else tensor)
        return pack(changed, single=header_of(value).single), ""

    def _json(self, value: bytes, noted: Noted) -> tuple[bytes, str]:
        strings = set(_STRING.findall(value))
        if len(strings) > MOST_TEXTS and _refused(TOO_MANY, not self._enforced, noted):
            return value, TOO_MANY
        changed: dict[bytes, bytes] = {}
        for string in strings:
            text = _read_text(string)
            screened, refusing = self.text(text, noted)
            if refusing:
                return value, refusing
            if screened != text:
                changed[string] = msgspec.json.encode(screened)
        if changed:
            value = _STRING.sub(lambda match: changed.get(match[0], match[0]), value)
        return value, ""


def texts_of(value: Value) -> list[str]:
    """Return the strings in a value, in order: a string itself, UTF-8 octets, or the distinct strings in JSON or tensors."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Tensors):
        return _texts_of_tensors(value)
    if isinstance(value, Octets):
        return [text] if (text := text_of(value)) else []
    return [_read_text(string) for string in dict.fromkeys(_STRING.findall(value))]


def has_texts(value: Tensors) -> bool:
    """Return True if any of the tensors has type BYTES. Raises NoTensors."""
    return any(head.datatype == BYTES for head in header_of(value).heads)


def _texts_of_tensors(value: Tensors) -> list[str]:
    elements = [
        element
        for tensor in (unpack(value) if has_texts(value) else ())
        if tensor.head.datatype == BYTES
        for element in split_elements(tensor.data)
    ]
    return [text for element in dict.fromkeys(elements) if (text := text_of(Octets(element))) is not None]


def text_of(octets: Octets) -> str | None:
    """Decode octets as UTF-8. Returns None if they aren't UTF-8."""
    try:
        return octets.content.decode()
    except UnicodeDecodeError:
        return None


def normalise(text: str, form: Form) -> str | None:
    """Normalise a string. Returns None if that would take too long or grow too much, which no text written by people does."""
    marks, too_many = _marks()
    if not marks.isdisjoint(text[::MOST_MARKS]) and too_many.search(text) is not None:
        return None
    if unicodedata.is_normalized(form, text):
        return text
    if len(text) > PIECE:
        pieces = (text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))
        if any(len(unicodedata.normalize(form, piece)) > GROWTH * PIECE for piece in pieces):
            return None
    return unicodedata.normalize(form, text)


@functools.cache
def _marks() -> tuple[frozenset[str], re.Pattern[str]]:
    """Return the combining marks (and characters that decompose into them), and an expression that finds too many in a row."""
    points = range(0x20000)
    marks = [all(map(unicodedata.combining, unicodedata.normalize("NFKD", chr(point)))) for point in points]
    edges = [point for point in points[1:] if marks[point] != marks[point - 1]]
    ranges = (f"{chr(first)}-{chr(end - 1)}" for first, end in zip(edges[::2], edges[1::2], strict=True))
    too_many = re.compile(f"[{''.join(ranges)}]{{{MOST_MARKS + 1}}}")
    return frozenset(chr(point) for point in points if marks[point]), too_many


def run_over(longest: int) -> Search:
    """Return a function that finds a run of more than `longest` equal characters. It first compares only characters that are
    `step` places apart, because every such run contains two of these. If two are equal, it looks at the characters between and
    around them."""
    step = (longest + 1) // 2

    def search(text: str) -> bool:
        if len(text) <= longest:
            return False
        for match in _ALIKE.finditer(text[::step]):
            character, begin = match[1], match.start() * step
            end = begin + step
            if text.count(character, begin, end) < step:
                continue
            before, after = text[max(0, begin - longest) : begin], text[end : end + longest]
            length = step + len(before) - len(before.rstrip(character)) + len(after) - len(after.lstrip(character))
            if length > longest:
                return True
        return False

    return search


def _refused(name: str, shadow: bool, noted: Noted) -> bool:
    noted.add((name, Effect.SHADOW if shadow else Effect.REFUSED))
    return not shadow


def _changed(name: str, shadow: bool, text: str, changed: str, noted: Noted) -> str:
    if changed == text:
        return text
    noted.add((name, Effect.SHADOW if shadow else Effect.CHANGED))
    return text if shadow else changed
