"""A tenant learns nothing about other tenants: their content changes nothing that the tenant can see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvpipe.connectors.vllm.trial.arrivals import DOCUMENTS
from kvpipe.connectors.vllm.trial.moves import random_moves
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Move, Trial
from kvpipe.scheduler.gauges import totals

if TYPE_CHECKING:
    from vllm.v1.request import Request

SEEDS, MOVES, TOKENS = 6, 120, 240
KINDS = frozenset(
    {"add", "follow", "reuse", "step", "schedule", "execute", "update", "tick", "abort", "reset", "drain"}
)
ANSWERED: tuple[Move, ...] = (("add", 0, 128, 0, 5, 1), ("drain",), ("add", 0, 128, 0, 5, 0), ("drain",))
"""Another tenant sends a document, and then a request without a salt sends the same document."""


class Seen(Trial):
    """A trial that records everything that a tenant can read, except times by the clock."""

    def __init__(self, shape: str, seed: int, *, apart: bool) -> None:
        """With `apart`, requests with a salt or an adapter have other documents than the other requests.

        Lengths are equal.
        """
        super().__init__(SHAPES[shape], seed)
        self.documents = [[self.rng.randrange(200) for _ in range(TOKENS)] for _ in range(DOCUMENTS)]
        self.theirs = [[199 - token for token in text] for text in self.documents] if apart else self.documents
        self.answers: list[Any] = []
        self.noted: list[dict[str, Any]] = []
        ask = self.scheduler.connector.get_num_new_matched_tokens  # type: ignore[union-attr]

        def lookup(request: Request, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self.answers.append((request.request_id, computed, answer))
            return answer

        self.scheduler.connector.get_num_new_matched_tokens = lookup  # type: ignore[method-assign, union-attr]

    def _add(self, document: int, take: int, own: int, answer: int, salt: int = 0, lora: int = 0) -> None:
        lora = 0 if self.tiers else lora  # with tiers, reading an adapter's files takes time that no move controls
        mine, self.documents = self.documents, self.theirs if salt or lora else self.documents
        super()._add(document, take, own, answer, salt, lora)
        self.documents = mine

    def replay_traces(self) -> None:
        """Record the trace without its times."""
        for recorder in self.tap.recorders:
            for event in recorder.take():
                self.replay.feed(event)
                message = msgspec.to_builtins(event)
                self.noted.append({key: value for key, value in message.items() if not key.endswith(("_ns", "_ms"))})

    def run(self, moves: Iterable[Move]) -> tuple[Any, ...]:
        """Make the moves. Return the lookups' answers, the trace, the metrics and the counters."""
        for move in moves:
            self.do(move)
        self.replay_traces()
        metrics = {name: dict(values) for name, values in totals(self.side).items() if not name.endswith("_seconds")}
        counted = [dict(one.counters) for one in self.engines_sides()]
        self.close()
        reported = sorted(map(repr, self.noted))  # a rank reports from two threads
        assert not any(key.hex() in line or repr(key) in line for key in self.prefixes for line in reported)
        return self.answers, reported, metrics, counted, self.side.stats()

    def engines_sides(self) -> list[Any]:
        """Return the connectors of all sides of the engine."""
        return [self.scheduler.connector, *(rank.connector for rank in self.ranks)]


def both(shape: str, seed: int, moves: Iterable[Move]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run the moves twice and return both records.

    In the first run, requests with a salt or an adapter send the same documents as requests without. In the second run,
    requests with a salt or an adapter send other documents.
    """
    made = list(moves)
    together, apart = (Seen(shape, seed, apart=one).run(made) for one in (False, True))
    return together, apart


def test_first_block_of_another_tenant_is_a_miss() -> None:
    """The miss of a request without the salt is counted, traced and answered as if no other request had arrived."""
    together, apart = both("sync", 0, ANSWERED)
    for name, one, other in zip(("answers", "trace", "metrics", "counters", "stats"), together, apart, strict=True):
        assert one == other, name
    assert together[2]["misses"] == {"not_saved": 2}


@pytest.mark.parametrize("shape", ["sync", "async-load", "hybrid", "tier"])
def test_answers_and_metrics_depend_on_no_other_salt(shape: str) -> None:
    """After any moves in any order, answers, trace, metrics and counters depend on no other salt's tokens."""
    hits = 0
    for seed in range(SEEDS):
        moves = [move for move in random_moves(f"tenants {seed}", 3 * MOVES) if move[0] in KINDS][:MOVES]
        together, apart = both(shape, seed, [*moves, ("drain",)])
        for name, one, other in zip(("answers", "trace", "metrics", "counters", "stats"), together, apart, strict=True):
            assert one == other, f"seed {seed}: {name}"
        hits += sum(together[2]["hit_tokens"].values())
    assert hits, "something was shared within a salt, or nothing was tried"
