"""Compares rules that decide which recurrent states are kept, by replays of coding agents on catalogs of hybrid models.

Time is the trace's time. Nothing is computed or copied. The attention KV of a prompt is saved in whole units of 512
tokens.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.report import Figure
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy.lru import Lru
from kvpipe.cache.prefixes import Prefixes
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.trace.log import Counters

TRACE = Path(__file__).parent / "traces" / "coding-agent.jsonl.gz"
UNIT, BLOCK = 512, 64
SESSIONS, HOURS, TOKENS_MAX = 30, 1, 131_072
HYBRIDS = {"Granite 4 (4 of 40 layers attend)": (9, 8 << 20), "Qwen3-Next (12 of 48)": (3, 12 << 20)}
"""For each model: the number of blocks that the states of one boundary take, and the bytes of a block."""
CAPACITIES_GIB = (8, 24)
LEAST = 0.75


class Prompt(NamedTuple):
    """One request: its tokens, a key per unit of the prompt, and the number of units shared with an earlier prompt."""

    at_ms: float
    tokens: int
    keys: list[bytes]
    shared: int


def prompts() -> list[Prompt]:
    """Return the prompts of sessions with random starts within `HOURS` hours, in the order of arrival."""
    draw, out = random.Random(0), list[Prompt]()
    sessions = [json.loads(line) for line in gzip.decompress(TRACE.read_bytes()).splitlines()]
    for number, session in enumerate(draw.sample(sessions, SESSIONS)):
        begins_ms, chains, made = draw.uniform(0, HOURS * 3_600_000), list[list[bytes]](), 0
        for at_ms, tokens, _, parent, blocks, _ in session["requests"]:
            shared = blocks * BLOCK // UNIT
            chain = chains[parent][:shared] if parent >= 0 else []
            shared = len(chain)
            for _ in range(shared, tokens // UNIT):
                made += 1
                chain.append(f"{number}/{made}".encode())
            chains.append(chain)
            if tokens <= TOKENS_MAX:
                out.append(Prompt(begins_ms + at_ms, tokens, chain, shared))
    return sorted(out, key=lambda one: one.at_ms)


Policy = Callable[[Prompt, int], set[int]]
"""A rule that returns the unit boundaries at which states are kept, given a prompt and the units of its hit."""


def last(prompt: Prompt) -> int:
    """Return, as a unit boundary, the last position of a prompt at which a later hit may end."""
    return (prompt.tokens - 1) // UNIT


EVERY, NOW = "every boundary", "the last and where prompts branch"
POLICIES: dict[str, Policy] = {
    EVERY: lambda prompt, hit: set(range(hit + 1, last(prompt) + 1)),
    "the last boundary": lambda prompt, hit: {last(prompt)} - {hit, 0},
    NOW: lambda prompt, hit: {n for n in (prompt.shared, last(prompt)) if hit < n <= last(prompt)},
}


class Replay:
    """A replay against the catalog of one hybrid model. Without groups of states, the model has attention alone."""

    def __init__(self, groups: int, block_bytes: int, pool_bytes: int) -> None:
        """Make an empty catalog. `groups` is the number of groups of states."""
        layers = (Layer("l", block_bytes),)
        kinds = Group(layers, UNIT), *(Group(layers, UNIT, state=True) for _ in range(groups))
        self.geometry = Geometry(kinds, UNIT, pool_bytes)
        slots, counters = self.geometry.slots, Counters()
        self.lru = Lru(slots)
        self.catalog = Catalog(slots, len(kinds), self.lru, counters)
        self.prefixes = Prefixes(self.catalog, self.geometry, UNIT, lambda request: request.block_hashes)
        self.hit = self.asked = self.stored = self.prompts = 0

    def serve(self, prompt: Prompt, keep: Policy) -> None:
        """Serve one request: look up, load and save chunks, and release the leases. `keep` is the rule for states."""
        request = _request(prompt)
        units = self.prefixes.longest(request)
        self.prompts += 1
        self.hit, self.asked = self.hit + units * UNIT, self.asked + prompt.tokens
        catalog, keys = self.catalog, prompt.keys
        owner = Owner("r", self.prompts)
        catalog.lease(owner, list(self._needed(keys, units)))
        for group, at in self._saved(prompt, units, keep):
            if not catalog.known(group, keys[at - 1]):
                chunk = catalog.reserve(group)
                if chunk is not None:
                    catalog.landed(catalog.write(chunk, 1, keys[at - 1], keep=True, base=at - 1))
                    self.stored += self.geometry.slot_bytes
        catalog.release(owner)
        catalog.refresh(self.prefixes.chunks_from_the_end(request, len(keys)))

    def _needed(self, keys: list[bytes], units: int) -> Iterator[Chunk]:
        for group in range(len(self.geometry.groups)):
            for at in range(1, units + 1) if group not in self.geometry.states else {units} - {0}:
                chunk = self.catalog.find(group, keys[at - 1])
                assert chunk is not None
                yield chunk

    def _saved(self, prompt: Prompt, hit: int, keep: Policy) -> Iterator[tuple[int, int]]:
        kept = keep(prompt, hit)
        for at in range(hit + 1, len(prompt.keys) + 1):
            yield 0, at
            if at in kept:
                yield from ((group, at) for group in sorted(self.geometry.states))


class SupersededFirst(Replay):
    """A replay that evicts a hit's state first if the prompt has saved a later state.

    kvpipe itself does not do this, so the replay is only for comparison.
    """

    def serve(self, prompt: Prompt, keep: Policy) -> None:
        """Serve one request as `Replay.serve` does. A superseded state of the hit becomes the first victim."""
        hit = self.prefixes.longest(_request(prompt))
        super().serve(prompt, keep)
        for group in self.geometry.states if 0 < hit < last(prompt) else ():
            chunk = self.catalog.find(group, prompt.keys[hit - 1])
            if chunk is not None:
                assert isinstance(self.lru._order, OrderedDict)
                self.lru._order.move_to_end(chunk, last=False)


def run() -> list[Figure]:
    """Return each rule's hit tokens, relative to a model that has only attention and blocks of the same size."""
    arrived, out = prompts(), []
    for model, (groups, block_bytes) in HYBRIDS.items():
        for gib in CAPACITIES_GIB:
            whole = _replayed(Replay(0, block_bytes, gib << 30), arrived, NOW)
            cases = [(Replay, name) for name in POLICIES if name != EVERY or gib == CAPACITIES_GIB[-1]]
            for kind, name in [*cases, (SupersededFirst, NOW)]:
                one = _replayed(kind(groups, block_bytes, gib << 30), arrived, name)
                beside = (
                    f"{one.hit / one.asked:.1%} of all tokens hit, {one.stored / one.prompts / 1e6:.0f} MB stored per "
                    f"prompt; attention alone: {whole.hit / whole.asked:.1%}"
                )
                now = kind is Replay and name == NOW  # all other rules are for comparison
                title = f"{model}, {gib} GiB: {name}" + ("" if kind is Replay else ", superseded ones first to go")
                out.append(
                    Figure(title, one.hit / whole.hit, LEAST if now else 0, "of attention", beside, at_least=True)
                )
    return out


def _replayed(replay: Replay, arrived: list[Prompt], policy: str) -> Replay:
    for prompt in arrived:
        replay.serve(prompt, POLICIES[policy])
    return replay


def _request(prompt: Prompt) -> Any:
    return SimpleNamespace(num_tokens=prompt.tokens, block_hashes=prompt.keys)
