"""Tests of the search for the number of users in the benchmark of coding agents."""

from __future__ import annotations

import pytest

from benchmarks.agents import FINER, USERS_MAX, Search, Tried, main


def _search(most: int, first: int, given: list[int] | None = None) -> list[int]:
    """Return the numbers of users that the search tries if up to `most` users are served in time."""
    search = Search(1.0, first, given or [])
    while users := search.next():
        assert len(search.tried) < 100, "it does not end"
        search.tried.append(Tried(users, float(users), 0.1, 0.5 if users <= most else 2.0))
    return [one.users for one in search.tried]


@pytest.mark.parametrize("most", [1, 2, 5, 30, 63, 64, 200, 777, USERS_MAX - 1])
@pytest.mark.parametrize("first", [4, 130, 1000])
def test_the_most_users_in_time_are_found(most: int, first: int) -> None:
    """The search finds the largest number of users in time, with an error of at most a tenth.

    The search tries no number twice.
    """
    tried = _search(most, first)
    best = max(users for users in tried if users <= most)
    assert best + max(1, best // FINER) > most
    assert len(set(tried)) == len(tried)


def test_search_ends_when_all_users_or_none_are_in_time() -> None:
    """If all users are in time, the search ends with the largest number. If none are, it ends with one user."""
    assert _search(USERS_MAX, 4)[-1] == USERS_MAX
    assert _search(0, 4) == [4, 2, 1]


def test_given_numbers_are_tried_in_their_order() -> None:
    """Given numbers of users are tried in their order. Results do not change the order."""
    assert _search(10, 4, [12, 8, 40]) == [12, 8, 40]


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("vllm=10", "'vllm': no such engine; there are no cache; "),
        ("no cache=ten", "'no cache=ten': users are whole numbers from 1 on"),
        ("no cache=4,", "'no cache=4,': users are"),
        ("no cache=", "'no cache=': users are"),
        ("no cache=0", "'no cache=0': users are"),
        ("no cache=4,-1", "'no cache=4,-1': users are"),
    ],
)
def test_an_argument_that_is_no_engine_with_users_is_refused(
    argument: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The argument is refused before anything starts. The message has the wrong argument and the known engines."""
    with pytest.raises(SystemExit) as stops:
        main([argument])
    assert stops.value.code == 2
    assert why in " ".join(capsys.readouterr().err.split())
