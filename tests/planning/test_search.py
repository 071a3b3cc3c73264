"""What searches have in common, and the way of a plan's values, which the page of the design lists."""

from __future__ import annotations

import re
from pathlib import Path

from quire.placement.rejected import Reason
from quire.planning.search import Search

ROOT = Path(__file__).parents[2]


def test_a_search_notes_what_it_does_not_take_and_when_its_time_is_over() -> None:
    now = 3.0
    search = Search[str](clock=lambda: now, deadline=4.0)
    search.reject("slow", Reason.SLOWER, "2 requests/s", 2.0)
    search.reject("late", Reason.UNTRIED, "the time was over")
    assert [(each.option, each.why, each.rate_per_unit) for each in search.rejected] == [
        ("slow", "slower", 2.0), ("late", "untried", None),
    ]  # fmt: skip
    assert not search.is_over(search.deadline)
    now = 4.0
    assert search.is_over(search.deadline) and Search[str]().rejected == []


def test_the_page_lists_functions_that_there_are_in_at_most_fifteen_files_none_twice() -> None:
    text = (ROOT / "docs" / "design" / "planning.md").read_text()
    part = text.partition("## From the command line to the file")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", part, re.MULTILINE)
    assert 10 < len(rows) <= 15 and len({file for file, _ in rows}) == len(rows)
    for file, name in rows:
        source = (ROOT / "src" / "quire" / file).read_text()
        for word in name.split("."):
            assert re.search(rf"^ *(def|class) {word}\b", source, re.MULTILINE), (file, name)
