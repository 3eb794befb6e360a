"""Plans: many, the same each time, and every beat filled in."""

from __future__ import annotations

import re

import pytest
from toy_maker import words
from toy_maker.plots import PLOTS
from toy_maker.prompts import draw_plan, with_article


def test_a_number_is_always_the_same_story_and_another_number_another() -> None:
    assert draw_plan(7) == draw_plan(7)
    assert len({draw_plan(n).ask for n in range(2000)}) > 1500
    assert {draw_plan(n).plot for n in range(2000)} == set(PLOTS)


def test_nothing_is_left_to_fill_in_and_articles_fit() -> None:
    for number in range(3000):
        plan = draw_plan(number)
        texts = [plan.subject, plan.ask, *(part for beat in plan.beats for part in (beat.text, beat.opener))]
        assert not any(re.search(r"[{}~|]|\b[Aa] [aeio]|\ban [^aeiou]", text) for text in texts), texts
        assert plan.name in plan.beats[0].text and plan.friend != plan.name
        assert sum(bool(beat.opener) for beat in plan.beats) >= 4


def test_every_variant_leads_the_teacher_on_or_is_whole() -> None:
    for key, plot in PLOTS.items():
        assert len(plot.asks) >= 3 and len(plot.topics) >= 4, key
        for beat in plot.beats:
            for variant in beat:
                text, mark, opener = variant.partition("~")
                assert "~" not in opener and (not mark or opener), variant
                assert not text or text.strip()[-1] in '.!?"' or (not text.strip()), variant


@pytest.mark.parametrize(
    ("noun", "said"),
    [("fox", "a fox"), ("owl", "an owl"), ("unicorn", "a unicorn"), ("a cake", "a cake"), ("umbrella", "an umbrella")],
)
def test_articles(noun: str, said: str) -> None:
    assert with_article(noun) == said


def test_word_lists_have_no_empty_or_broken_entries() -> None:
    for name, values in vars(words).items():
        if name.isupper():
            assert all(value and value == value.strip() and "\n" not in value for value in values), name
