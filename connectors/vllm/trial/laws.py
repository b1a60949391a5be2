"""The laws of kvpipe, and the register of the checks that enforce these laws.

A trial itself makes the checks of `SEEN_BY_TRIALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from kvpipe.connectors.vllm.trial.trial import DRAIN_STEPS_MAX

LawCheck = Callable[[Any], Iterator[str]]
"""A check of a law: a function that gets a `Watched`, and yields a sentence for each violation.

The argument has the type Any, because the module of `Watched` imports this module.
"""
When = Literal["schedule", "update", "drain"]

OVER_MAX = 6
"""The number of finished requests that are looked up again after every step."""

LAWS = {
    1: "kvpipe raises no exception into vLLM. A failure costs a cache miss and is counted.",
    2: "All or nothing: a lookup finds a chunk only after every layer of the chunk has landed on every rank.",
    3: "Copies do not race with compute: a block is reused only after its save has read it, and is read only "
    "after its load has landed.",
    4: "All confirmed tokens are saved, and no other tokens.",
    5: "A layer is identified by its name, never by a count of calls.",
    6: "Every lease has an owner, which is one admission of a request. The lease ends with that admission.",
    7: "In each step the scheduler's thread does work for what is new in that step, and for nothing else.",
    8: "Every extra, empty, repeated or missing call is a cell in a table of a state machine.",
    9: "Every queue, retry and wait has a limit.",
    10: "A key covers everything on which the bytes of its chunk depend.",
}

SEEN_BY_TRIALS = {
    "right_answers": (1, "Every request gets the answer that it would get without a connector."),
    "no_hang": (9, f"Every request ends within {DRAIN_STEPS_MAX} steps after the last arrival."),
    "nothing_raises": (1, "No exception leaves vLLM or the connector."),
    "lookups_are_idempotent": (8, "A lookup that is repeated in one scheduler pass returns the same answer."),
    "only_failed_blocks_are_reported": (
        3,
        "The blocks of a failed load are reported in the step of that load, and in no other step.",
    ),
}
"""The checks that a trial makes itself: for each check, the number of its law and its sentence."""


class Invariant(NamedTuple):
    """One check. `laws` are the numbers of the laws that the check enforces."""

    name: str
    laws: tuple[int, ...]
    sentence: str
    check: LawCheck
    when: When
    outside: bool


INVARIANTS: dict[str, Invariant] = {}


def invariant(
    *laws: int, sentence: str, when: When = "update", outside: bool = False
) -> Callable[[LawCheck], LawCheck]:
    """Register a check under its function's name."""

    def register(check: LawCheck) -> LawCheck:
        INVARIANTS[check.__name__] = Invariant(check.__name__, laws, sentence, check, when, outside)
        return check

    return register
