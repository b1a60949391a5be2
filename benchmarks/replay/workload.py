"""Workloads: the requests of recorded traces in the order of arrival, each with a key per chunk of its prompt."""

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
"""The number of tokens of a block in the coding agents' trace."""
TOKENS_MAX: Final = 131_072
MOONCAKE_TOKENS: Final = 512
ANSWER_S_PER_TOKEN: Final = 0.01
"""The time per token of an answer in the coding agents' trace.

This is an estimate, because the trace does not contain this time. The basis: of conversations with an answer of more
than 4,000 tokens, 99 of 100 resume later than 9.7 ms per token after the answer's request.
"""


class Prompt(NamedTuple):
    """One request.

    `keys` has a key for each whole chunk of the prompt. Two chunks have equal keys if and only if the prefixes that
    they end are equal.

    `at_s` is the arrival, in seconds from the workload's start. `answer` is the number of tokens of the answer.
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
    """The time from a request's arrival to its end, in seconds per token of its answer."""

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    @cached_property
    def chunks(self) -> int:
        """The number of different chunks of all prompts."""
        return len({key for prompt in self.prompts for key in prompt.keys})

    def slots(self, share: float) -> int:
        """Return the number of slots that hold `share` of all different chunks."""
        return max(1, int(self.chunks * share))


def coding_agents(
    seed: int | None,
    *,
    sessions: int = 250,
    hours: float = 8,
    chunk_tokens: int = 256,
    shared_system: bool = False,
    answer_s_per_token: float = 0.0,
) -> Workload:
    """Draw `sessions` sessions without repetition, whose starts are uniformly distributed over `hours` hours.

    Requests of more than `TOKENS_MAX` tokens are left out. If a prompt shares only some tokens of a chunk with an
    earlier prompt, the chunk gets a different key. If `seed` is None, all sessions of the trace are taken, with the
    starts of seed 0.

    With `shared_system`, the system prompts of any two main conversations are equal up to the end of the shorter
    prompt. Otherwise no two sessions share a chunk.

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
            if tokens <= TOKENS_MAX:
                prompts.append(Prompt(begins_s + at_ms / 1000, tokens, answer, keys))
    name = "coding agents" + (", system prompts shared" if shared_system else "")
    name += ", answers take time" if answer_s_per_token else ""
    return Workload(name, chunk_tokens, sorted(prompts, key=lambda one: one.at_s), answer_s_per_token)


def mooncake() -> Workload:
    """Return an hour of Mooncake's conversations, with the arrivals and the chunks of the recording."""
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
    """Return the decoded lines of a recorded trace."""
    packed = (TRACES / f"{name}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]
