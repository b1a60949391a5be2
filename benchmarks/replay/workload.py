"""What arrives when: requests of recorded traces, each with a key per chunk of its prompt."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

TRACES: Final = Path(__file__).parents[1] / "traces"
BLOCK_TOKENS: Final = 64
"""Of the coding agents' trace: prefixes are known in blocks of so many tokens."""
MOONCAKE_TOKENS: Final = 512
ANSWER_S_PER_TOKEN: Final = 0.01
"""Of the coding agents' trace, which does not tell: after answers of more than 4,000 tokens, 99 of 100 conversations go
on later than 9.7 ms per token."""


class Prompt(NamedTuple):
    """One request. `keys`: of each whole chunk of its prompt; equal keys are equal prefixes.

    `at_s`: seconds from the start of the workload. `answer`: tokens that it decodes.
    """

    at_s: float
    tokens: int
    answer: int
    keys: list[bytes]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    chunk_tokens: int
    prompts: list[Prompt]
    answer_s_per_token: float = 0.0
    """How long after its arrival a request is over, in seconds per token of its answer."""

    @cached_property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    @cached_property
    def chunks(self) -> int:
        """Different chunks in all."""
        return len({key for prompt in self.prompts for key in prompt.keys})

    def slots(self, share: float) -> int:
        """Return how many slots are `share` of all different chunks."""
        return max(1, int(self.chunks * share))


def coding_agents(
    seed: int | None,
    *,
    sessions: int = 250,
    hours: float = 8,
    tokens_max: int | None = 131_072,
    chunk_tokens: int = 256,
    shared_system: bool = False,
    answer_s_per_token: float = 0.0,
) -> Workload:
    """Draw sessions, without repetition, that start at random, uniformly, within some hours.

    Requests of more than `tokens_max` tokens do not arrive. Chunks that a prompt shares with an earlier one only in
    part are its own. `seed` None: all sessions of the trace, with the starts of seed 0.
    `shared_system`: the system prompts of all main conversations begin alike, as far as the shorter one goes; else no
    two sessions have a chunk in common.

    Raises:
        ValueError: `chunk_tokens` is no multiple of the trace's blocks.

    """
    if chunk_tokens % BLOCK_TOKENS:
        msg = f"chunk_tokens={chunk_tokens} is no multiple of {BLOCK_TOKENS}"
        raise ValueError(msg)
    draw, recorded = random.Random(seed or 0), lines("coding-agent")
    drawn = recorded if seed is None else draw.sample(recorded, sessions)
    prompts: list[Prompt] = []
    for number, session in enumerate(drawn):
        begins_s, chains = draw.uniform(0, hours * 3600), list[list[bytes]]()
        system, made = session["system"] // chunk_tokens if shared_system else 0, 0
        for at_ms, tokens, answer, parent, blocks, branch in session["requests"]:
            keys = chains[parent][: blocks * BLOCK_TOKENS // chunk_tokens] if parent >= 0 else []
            for place in range(len(keys), tokens // chunk_tokens):
                made += 1
                keys.append(f"s/{place}".encode() if place < system and not branch else f"{number}/{made}".encode())
            chains.append(keys)
            if tokens_max is None or tokens <= tokens_max:
                prompts.append(Prompt(begins_s + at_ms / 1000, tokens, answer, keys))
    name = "coding agents" + (", system prompts shared" if shared_system else "")
    name += ", answers take time" if answer_s_per_token else ""
    return Workload(name, chunk_tokens, sorted(prompts, key=lambda one: one.at_s), answer_s_per_token)


def mooncake() -> Workload:
    """Return an hour of conversations, as it was recorded, in the chunks that it was recorded in."""
    prompts = [
        Prompt(
            line["timestamp"] / 1000,
            line["input_length"],
            line["output_length"],
            [number.to_bytes(4, "big") for number in line["hash_ids"][: line["input_length"] // MOONCAKE_TOKENS]],
        )
        for line in lines("mooncake-conversation")
    ]
    return Workload("Mooncake's conversations", MOONCAKE_TOKENS, sorted(prompts, key=lambda one: one.at_s))


def lines(name: str) -> list[Any]:
    """Return the content of a recorded trace, line by line."""
    packed = (TRACES / f"{name}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]
