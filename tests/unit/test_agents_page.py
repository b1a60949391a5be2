"""Tests of the picture and the page of the benchmark of coding agents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import agents_picture
from benchmarks.agents_picture import RESULTS


def test_the_page_is_fresh() -> None:
    """The page has the numbers of the JSON file. `python -m benchmarks.agents_picture` regenerates the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert RESULTS.with_suffix(".html").read_text(encoding="utf-8") == agents_picture.html(found)
    assert RESULTS.with_suffix(".svg").read_text(encoding="utf-8") == agents_picture.picture(found)


def _found(tried: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """Return a result as the JSON file has it.

    `tried`: for each engine, (number of users, time within which 95 % of the users are served).
    """
    some = {
        name: [{"users": users, "per_s": users / 4, "ttft_s": late_s / 2, "late_s": late_s} for users, late_s in ours]
        for name, ours in tried.items()
    }
    return json.loads(RESULTS.read_text(encoding="utf-8")) | {"limit_s": 0.5, "tried": some, "figures": []}


def test_any_engine_has_a_bar() -> None:
    """An engine of any name has a bar.

    An engine that is late even with the smallest number of users has a bar of 0 requests/s.
    """
    found = _found({"kvpipe": [(8, 0.2), (4, 0.1), (16, 0.9)], "kvpipe, large": [(8, 0.4)], "<new>": [(8, 0.6)]})
    page = agents_picture.html(found)
    for shown in ("2 for 8 users", "&lt;new&gt;", "kvpipe, large", "without kvpipe"):
        assert shown in page
    assert "<new>" not in page
    assert page.index("<td>4</td>") < page.index("<td>8</td>") < page.index("<td>16</td>")


def test_title_compares_the_best_engines_with_and_without_kvpipe() -> None:
    """The title compares the best engine with kvpipe to the best engine without kvpipe.

    An engine whose cache has room for everything is left out.
    """
    tried = {"kvpipe": [(16, 0.1)], "vLLM": [(8, 0.1)], "none": [(4, 0.1)], "a cache that holds all": [(32, 0.1)]}
    assert "serves 2 times as many requests" in agents_picture.picture(_found(tried))


@pytest.mark.parametrize("late_s", [0.1, 0.9])
def test_one_number_of_users_is_enough(late_s: float) -> None:
    """The chart needs only one number of users, whether or not these users are served in time."""
    assert "<svg" in agents_picture.html(_found({"kvpipe": [(8, late_s)]}))
