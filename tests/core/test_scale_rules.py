"""Rules of the autoscaler as they are written: what they mean, and what is wrong with those that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.scaling.rules import (
    QUEUE_ABOVE,
    USUAL,
    UTILISATION_ABOVE,
    UTILISATION_BELOW,
    NoRules,
    ScaleRule,
    read,
    write,
)

RULE = st.one_of(
    st.builds(
        ScaleRule, st.just(QUEUE_ABOVE), st.integers(0, 10_000).map(float), st.floats(0, 86_400), st.integers(1, 1000)
    ),
    st.builds(ScaleRule, st.just(UTILISATION_ABOVE), st.floats(0.6, 10), st.floats(0, 86_400), st.integers(1, 1000)),
    st.builds(ScaleRule, st.just(UTILISATION_BELOW), st.floats(0, 0.5), st.floats(0, 86_400), st.integers(-1000, -1)),
)


def test_no_text_means_the_usual_rules() -> None:
    assert read("") == USUAL
    assert [rule.change for rule in USUAL] == [3, 1, 1, -1]


@given(st.lists(RULE, min_size=1, max_size=32))
def test_rules_are_read_as_they_were_written(rules: list[ScaleRule]) -> None:
    assert read(write(rules)) == tuple(rules)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("{}", "not a list"),
        ("[]", "0 rules"),
        ("[1]", "rule 1 is not a table"),
        ('[{"queue_above": 1, "for_s": 1}]', "lacks add or remove"),
        ('[{"for_s": 1, "add": 1}]', "lacks queue_above, .* or utilisation_below"),
        ('[{"queue_above": 1, "add": 1}]', "lacks for_s"),
        ('[{"queue_above": 1, "for_s": 1, "add": 1, "remove": 1}]', "both add and remove.*two rules"),
        ('[{"queue_above": 1, "for_s": 1, "adds": 1}]', "'adds'.* it may have queue_above, .*, add, remove"),
        ('[{"queue_above": 1, "for_s": 1, "add": 0}]', "whole number"),
        ('[{"queue_above": 1, "for_s": 1, "add": 1.5}]', "whole number"),
        ('[{"queue_above": 1, "for_s": 1, "add": true}]', "not a number"),
        ('[{"queue_above": -1, "for_s": 1, "add": 1}]', "queue_above = -1"),
        ('[{"queue_above": 1, "for_s": "30", "add": 1}]', "for_s = '30'"),
        ('[{"queue_above": 1, "for_s": 1, "remove": 1}]', "remove with queue_above.*write add"),
        ('[{"utilisation_below": 0.4, "for_s": 1, "add": 1}]', "add with utilisation_below.*write remove"),
        (
            '[{"utilisation_below": 0.9, "for_s": 1, "remove": 1}, {"utilisation_above": 0.8, "for_s": 1, "add": 1}]',
            "it would flap",
        ),
    ],
)
def test_what_is_no_list_of_rules_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NoRules, match=reason):
        read(text)


def test_a_rule_says_what_it_means() -> None:
    assert [str(rule) for rule in USUAL] == [
        "queue above 500 for 30 s",
        "queue above 100 for 60 s",
        "utilisation above 0.85 for 300 s",
        "utilisation below 0.4 for 900 s",
    ]
