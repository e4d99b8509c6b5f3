import itertools

import pytest

from headway.input_policy import BadPattern, check_pattern, search_for

BACKTRACKING = [r"(a+)+$", r"^(a|a)*$", r"^(a|aa)+$", r"(.*a){20}$", r"^(a?){500}a{500}$"]
"""Patterns for which a search that backtracks takes time that doubles with each character."""


@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_a_pattern_that_would_backtrack_ends_on_a_long_text(pattern: str) -> None:
    """With 2 ** 100000 steps it would not."""
    assert not search_for([pattern])("a" * 100_000 + "b\u00e9")


def test_a_pattern_with_many_states_goes_on_when_its_automaton_runs_out_of_memory() -> None:
    """A set of RE2's would say then that nothing was found."""
    search = search_for([r"(?i)x[a-z]{900}y.{900}z", r"[a-q][^u-z]{13}x", "needle"])
    letters = "".join(map("".join, itertools.product("abqxyz", repeat=6)))
    assert search(letters + "needle")
    assert not search_for(["needles"])(letters + "needle")


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("evil", "an evil one", True),
        ("evil", "an Evil one", False),
        ("(?i)\u00c9vil", "\u00e9VIL", True),
        ("^evil", "an evil", False),
        ("(?m)^evil$", "an\nevil\none", True),
        (r"\bevil\b", "devil", False),
        ("e.il", "e\u20acil", True),
        ("e.il", "e\nil", False),
        (r"\p{Greek}", "\u03b1", True),
        ("a|b|c", "xxc", True),
    ],
)
def test_patterns_are_searched_for_in_unicode_text(pattern: str, text: str, found: bool) -> None:
    assert search_for([pattern])(text) is found


def test_patterns_of_a_rule_do_not_touch_each_other() -> None:
    search = search_for(["(?i)one", "two|three", "^four"])
    assert [search(text) for text in ("ONE", "TWO", "a three", "four", "a four", "one\ntwo")] == [
        True, False, True, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", "escape"),
        ("(?=a)", "perl operator"),
        ("(", "missing"),
        ("a{2000}", "repetition"),
        (r"a\Qb", "Q is not"),
    ],
)
def test_a_pattern_that_cannot_be_searched_for_in_linear_time_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(BadPattern, match=reason):
        check_pattern(pattern)


def test_patterns_that_are_too_large_together_are_refused() -> None:
    with pytest.raises(BadPattern):
        search_for([rf"[\p{{L}}\p{{N}}]{{1000}}{number}" for number in range(2)])
