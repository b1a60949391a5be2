"""The picture and the page of the benchmark of coding agents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import agents_picture
from benchmarks.agents_picture import RESULTS


def test_the_page_is_fresh() -> None:
    """It has what the JSON has; regenerate it with `python -m benchmarks.agents_picture`."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert RESULTS.with_suffix(".html").read_text(encoding="utf-8") == agents_picture.html(found)
    assert RESULTS.with_suffix(".svg").read_text(encoding="utf-8") == agents_picture.picture(found)


def _found(tried: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """Return what the JSON has. `tried`: of each engine the users, and within how many seconds 95 % of them wait."""
    some = {
        name: [{"users": users, "per_s": users / 4, "ttft_s": late_s / 2, "late_s": late_s} for users, late_s in ours]
        for name, ours in tried.items()
    }
    return json.loads(RESULTS.read_text(encoding="utf-8")) | {"limit_s": 0.5, "tried": some, "figures": []}


def test_any_engine_has_its_line_and_its_bar() -> None:
    """Of any name; a variant of one has its colour; who is late with the fewest users serves nobody in time."""
    found = _found({"kvpipe": [(8, 0.2), (4, 0.1), (16, 0.9)], "kvpipe, large": [(8, 0.4)], "<new>": [(8, 0.6)]})
    page = agents_picture.html(found)
    for shown in ("8 users: 2 requests/s", "&lt;new&gt;", "kvpipe, large", "nobody"):
        assert shown in page
    assert "<new>" not in page
    looks = agents_picture._looks(list(found["tried"]))
    assert looks["kvpipe"] == (looks["kvpipe, large"][0], False)
    assert looks["kvpipe, large"][1]
    assert len({colour for colour, _ in looks.values()}) == 2
    assert page.count("<circle") == 5
    assert page.index("<td>4</td>") < page.index("<td>8</td>") < page.index("<td>16</td>")


@pytest.mark.parametrize("late_s", [0.1, 0.9])
def test_one_number_of_users_is_enough(late_s: float) -> None:
    """Whether they are in time or not."""
    assert agents_picture.html(_found({"kvpipe": [(8, late_s)]}))
