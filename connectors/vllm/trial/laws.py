"""The laws, and the register of the checks that hold them. `SEEN_BY_TRIALS` are those that a trial notices itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvpipe.connectors.vllm.trial.trial import DRAIN_STEPS_MAX

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.watched import Watched

Check = Callable[["Watched"], Iterator[str]]
When = Literal["schedule", "update", "drain"]

OVER_MAX = 6
"""The number of finished requests that are looked up again and again."""

LAWS = {
    1: "Nothing raises into vLLM. A failure costs a cache miss, and is counted.",
    2: "All or nothing: a chunk can be found only after every layer on every rank has landed.",
    3: "No race with compute: no block is reused before its copy has read it, none read before its copy has landed.",
    4: "Confirmed tokens only, and all of them.",
    5: "Layers by name, never by the number of calls.",
    6: "Leases have an owner, a request's admission, and end with it.",
    7: "The scheduler's thread does what is new in a step, and no more.",
    8: "Every extra, empty, repeated or missing call is a cell in a table.",
    9: "Everything is bounded.",
    10: "A key covers everything that the bytes depend on.",
}

SEEN_BY_TRIALS = {
    "right_answers": (1, "Every request gets the answer that it gets without a connector."),
    "no_hang": (9, f"With no more arrivals everything ends, within {DRAIN_STEPS_MAX} steps."),
    "nothing_raises": (1, "No exception comes out of vLLM or of the connector."),
    "lookups_are_idempotent": (8, "Asked twice in a pass, a lookup answers the same."),
    "only_failed_blocks_are_reported": (3, "Blocks are reported in the step whose load of them failed, and only then."),
}
"""What a trial notices itself, with the law that it holds and its sentence."""


class Invariant(NamedTuple):
    """One check. `laws` are the numbers of those that it holds."""

    name: str
    laws: tuple[int, ...]
    sentence: str
    check: Check
    when: When
    outside: bool


INVARIANTS: dict[str, Invariant] = {}


def invariant(*laws: int, sentence: str, when: When = "update", outside: bool = False) -> Callable[[Check], Check]:
    """Register a check under its function's name."""

    def register(check: Check) -> Check:
        INVARIANTS[check.__name__] = Invariant(check.__name__, laws, sentence, check, when, outside)
        return check

    return register
