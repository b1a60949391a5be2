"""`python -m benchmarks.replay.answers`: what learning of answers is worth, on the coding agents' trace.

The trace records how much of a prompt its predecessor's prompt had, and how long each answer was; whether the answer is
part of the next prompt it does not record. So it is replayed three ways: no prompt has the answer before it, all have
it, and those of every second session have it. kvpipe's own scheduler side serves one request at a time.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal

from benchmarks.replay.workload import BLOCK_TOKENS, lines
from kvpipe.config import load_settings
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import Report, Tally
from kvpipe.scheduler.base import LATER
from kvpipe.scheduler.side import SchedulerSide

World = Literal["cut", "used", "half"]
CHUNK_TOKENS: Final = 256
BLOCK_BYTES: Final = 4096
NEAR_BLOCKS: Final = 2
"""A prompt that has its predecessor's to so near its end goes on with it."""


@dataclass(frozen=True)
class Turn:
    """One request: the keys of its blocks, of the prompt and then of the answer, and how many tokens each has."""

    at_s: float
    keys: list[bytes]
    prompt: int
    answer: int


def turns(world: World, *, sessions: int, hours: float = 8, seed: int = 0, tokens_max: int = 131_072) -> list[Turn]:
    """Return the requests of sessions that are drawn as in `workload.coding_agents`, by their arrival."""
    draw, made = random.Random(seed), list[Turn]()
    for number, session in enumerate(draw.sample(lines("coding-agent"), sessions)):
        begins_s, names = draw.uniform(0, hours * 3600), iter(range(1 << 40))
        used = world == "used" or (world == "half" and number % 2 == 0)
        chains, prompts = list[list[bytes]](), list[int]()
        for at_ms, tokens, answer, parent, shared, _ in session["requests"]:
            begun: list[bytes] = []
            if parent >= 0:
                on = used and shared >= prompts[parent] // BLOCK_TOKENS - NEAR_BLOCKS
                begun = chains[parent][: None if on else shared][: tokens // BLOCK_TOKENS]
            new = (tokens + answer) // BLOCK_TOKENS - len(begun)
            chains.append(begun + [f"{number}/{next(names)}".encode() for _ in range(new)])
            prompts.append(tokens)
            if tokens <= tokens_max:
                made.append(Turn(begins_s + at_ms / 1000, chains[-1], tokens, answer))
    return sorted(made, key=lambda turn: turn.at_s)


class Replay:
    """kvpipe's scheduler side with a pool of so many chunks."""

    def __init__(self, slots: int, policy: str, *, learn: bool) -> None:
        """Empty. `learn`: of answers."""
        self.now_s, self.hit_tokens, self.prompt_tokens = 0.0, 0, 0
        geometry = Geometry((Group((Layer("l", BLOCK_BYTES),), BLOCK_TOKENS),), CHUNK_TOKENS, slots * BLOCK_BYTES * 4)
        settings = load_settings(
            {"policy": policy, "chunk_tokens": CHUNK_TOKENS, "learn_answers": learn, "prefault": "use", "load": "sync"}
        )
        self.side = SchedulerSide(settings, geometry, hash_tokens=BLOCK_TOKENS, ranks=1, saves=True, loads=True)
        self.side.ranks_ready({0: slots}, ["weights"])
        self.side.catalog._clock = lambda: self.now_s
        self._table = [SimpleNamespace(block_id=1, is_null=False)] * 16384
        self.side.bind(SimpleNamespace(table=lambda *_: self._table, knows=lambda *_: False, free=lambda: 1 << 20))  # type: ignore[arg-type]

    @property
    def hit_rate(self) -> float:
        """Return which share of all tokens of prompts was held."""
        return self.hit_tokens / self.prompt_tokens

    def run(self, requests: list[Turn]) -> Replay:
        """Serve all."""
        for number, turn in enumerate(requests):
            self._serve(number, turn)
        return self

    def _serve(self, number: int, turn: Turn) -> None:
        self.now_s = turn.at_s
        whole, prompt = turn.prompt + turn.answer, max(1, turn.prompt)
        request: Any = SimpleNamespace(
            request_id=str(number), num_tokens=prompt, num_prompt_tokens=prompt, num_computed_tokens=0,
            num_preemptions=0, block_hashes=turn.keys[: prompt // BLOCK_TOKENS], lora_request=None, resumable=False,
            skip_reading_prefix_cache=False,
        )  # fmt: skip
        side = self.side
        side.on_new_request(request, None, "agents")
        answer = side.lookup(request, 0)
        assert answer is not LATER
        side.admitted(request, (self._table[: -(-prompt // BLOCK_TOKENS)],), answer.tokens)
        self.hit_tokens += answer.tokens
        self.prompt_tokens += prompt
        request.num_computed_tokens = answer.tokens
        self._step(request)
        request.num_tokens, request.block_hashes = whole, turn.keys
        self._step(request)
        side.finished(request)

    def _step(self, request: Any) -> None:
        scheduled = {request.request_id: request.num_tokens - request.num_computed_tokens}
        step: Any = SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=None)
        plan = self.side.plan_step(step)
        request.num_computed_tokens = request.num_tokens
        self.side.reported(Report({job.id: Tally(1, 0) for job in plan.jobs}))


def compare(world: World, policy: str, share: float, *, sessions: int, seed: int) -> Iterator[tuple[bool, Replay]]:
    """Replay without and with learning; the pool holds `share` of all different chunks."""
    requests = turns(world, sessions=sessions, seed=seed, hours=8 * sessions / 250)
    blocks = len({key for turn in requests for key in turn.keys})
    slots = max(16, int(blocks * BLOCK_TOKENS / CHUNK_TOKENS * share))
    for learn in (False, True):
        yield learn, Replay(slots, policy, learn=learn).run(requests)


def main(arguments: list[str]) -> int:
    """Print a row per replay."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay.answers", description=__doc__)
    parser.add_argument("--world", nargs="*", default=["used", "half", "cut"])
    parser.add_argument("--policy", nargs="*", default=["lru", "s3fifo", "sessions"])
    parser.add_argument("--share", nargs="*", type=float, default=[0.01, 0.02, 0.05])
    parser.add_argument("--sessions", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for world in options.world:
        for share in options.share:
            for policy in options.policy:
                for learn, done in compare(world, policy, share, sessions=options.sessions, seed=options.seed):
                    spared = done.side.counters["decode_not_kept"]
                    what = f"{world}, {policy}, {share:.0%}, learn={learn}"
                    print(f"{what}: {done.hit_rate:.5f}, {spared} chunks not kept", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
