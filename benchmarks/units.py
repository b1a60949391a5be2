"""Counts, on the coding agents' trace, the gain if hits could end at every unit (for decision 35).

A hit ends at a chunk's end or where an earlier prompt ended. If a prompt branches from an earlier prompt inside a
chunk, the shared tokens between the hit's end and the branch are computed again. The pool never evicts here, so the
count is an upper bound.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from benchmarks.replay.workload import BLOCK_TOKENS, lines
from benchmarks.report import Figure

CHUNKS_TOKENS: Final = (128, 256, 512)
TOKENS_MAX: Final = 131_072
HOURS: Final = 8
GAIN_MAX: Final = 1.0
"""The decision would change if the gain exceeded this percentage of the computed tokens."""

Key = tuple[int, int]


class _Gain(NamedTuple):
    """`computed` is the number of computed tokens. Hits at every unit would avoid computing `gained` of these tokens.

    `prompts` is the number of prompts for which `gained` is not 0.
    """

    computed: int
    gained: int
    prompts: int


def run() -> list[Figure]:
    """Count the gain for chunks of each size."""
    arrived = [(tokens, keys) for _, tokens, keys in sorted(_prompts(), key=lambda one: one[0])]
    out = []
    for chunk_tokens in CHUNKS_TOKENS:
        found = _gain(arrived, chunk_tokens)
        beside = f"{found.gained} of {found.computed} computed tokens; {found.prompts} of {len(arrived)} prompts gain"
        title = f"hits at every unit of {BLOCK_TOKENS} tokens, chunks of {chunk_tokens}"
        out.append(Figure(title, 100 * found.gained / found.computed, GAIN_MAX, "%", beside))
    return out


def _prompts() -> Iterator[tuple[float, int, list[Key]]]:
    """Yield the time, the tokens, and the keys of whole blocks of each request. Equal keys mean equal prefixes."""
    draw = random.Random(0)
    for number, session in enumerate(lines("coding-agent")):
        begins_s, names, chains = draw.uniform(0, HOURS * 3600), itertools.count(), list[list[Key]]()
        for at_ms, tokens, _, parent, shared, _ in session["requests"]:
            begun = chains[parent][:shared][: tokens // BLOCK_TOKENS] if parent >= 0 else []
            chains.append(begun + [(number, next(names)) for _ in range(tokens // BLOCK_TOKENS - len(begun))])
            if tokens <= TOKENS_MAX:
                yield begins_s + at_ms / 1000, tokens, chains[-1]


def _gain(arrived: list[tuple[int, list[Key]]], chunk_tokens: int) -> _Gain:
    """Return the gain when the requests are served in order from a pool that holds every earlier prompt."""
    held, ends = set[Key](), set[Key]()
    computed = gained = prompts = 0
    for tokens, keys in arrived:
        shared = next((place for place, key in enumerate(keys) if key not in held), len(keys))
        shared -= shared * BLOCK_TOKENS >= tokens  # the last token is always computed
        hit = shared
        while hit * BLOCK_TOKENS % chunk_tokens and keys[hit - 1] not in ends:
            hit -= 1
        computed += tokens - hit * BLOCK_TOKENS
        gained += (shared - hit) * BLOCK_TOKENS
        prompts += hit < shared
        held.update(keys)
        ends.update(keys[-1:])
    return _Gain(computed, gained, prompts)
