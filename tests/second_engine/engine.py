"""Continuous batching over `Transformer`: chunked prefill, prefix cache, preemption by recompute.

`Reuse` is the interface of a second cache. The name of a method of `Reuse` says when the engine calls the method. No
other code of the engine knows kvpipe.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from tests.second_engine.blocks import Blocks
from tests.second_engine.model import Chunk, Shape, Transformer

IDLE_S = 0.001
"""The pause in seconds between steps that compute nothing while a load is under way."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, and the tokens that were generated after it."""

    request_id: str
    all_token_ids: list[int]
    new_tokens_max: int
    block_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    cache_salt: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    skip_reading_prefix_cache: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Start without generated tokens."""
        self.num_prompt_tokens = self.num_tokens
        self._hash()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self.all_token_ids)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def done(self) -> bool:
        """Whether all requested tokens are generated."""
        return len(self.output) >= self.new_tokens_max

    def sampled(self, logits: torch.Tensor) -> None:
        """Append the most likely token."""
        self.logits.append(logits)
        self.all_token_ids.append(int(logits.argmax()))
        self._hash()

    def _hash(self) -> None:
        """Hash every whole block together with all tokens before the block's end."""
        size = self.block_tokens
        for block in range(len(self.block_hashes), self.num_tokens // size):
            before = self.block_hashes[-1] if block else b"root"
            tokens = self.all_token_ids[block * size : (block + 1) * size]
            self.block_hashes.append(hashlib.sha256(before + repr(tokens).encode()).digest())


class Step(NamedTuple):
    """The work of one step: numbers of tokens by request id, and the requests that were preempted before the step."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: frozenset[str]


class Hit(NamedTuple):
    """The result of a lookup: `tokens` tokens can be loaded.

    `waits` says that the request cannot run before the load has ended.
    """

    tokens: int = 0
    waits: bool = False


class Ended(NamedTuple):
    """The results of a step's loads: requests that waited, requests whose load failed, and wrong blocks."""

    loaded: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    bad_blocks: frozenset[int] = frozenset()


class Reuse:
    """A cache in addition to the engine's own cache. This base class holds nothing."""

    def lookup(self, request: Request, local_tokens: int) -> Hit | None:
        """Return the hit after the first `local_tokens` tokens.

        None means that the engine must ask again in the next step.
        """
        del request, local_tokens
        return Hit()

    def admitted(self, request: Request, loaded_tokens: int) -> None:
        """The request has its blocks. `loaded_tokens` tokens of these blocks will be loaded."""

    def begin(self, step: Step) -> None:
        """A step is scheduled, and about to be computed."""

    def before(self, layer: str) -> None:
        """The step is about to read and write the caches of `layer`."""

    def after(self, layer: str) -> None:
        """The step has written the caches of `layer`."""

    def end(self) -> Ended:
        """The step is computed."""
        return Ended()

    def finished(self, request: Request) -> None:
        """The request has ended, or was aborted."""

    def reset(self) -> None:
        """Forget all entries, so that no later lookup finds them."""

    @property
    def pending(self) -> bool:
        """Whether the cache needs steps although no request computes."""
        return False


class Engine:
    """One model, `ranks` ranks that share the model's heads, and the requests that are not done."""

    def __init__(
        self,
        model: Transformer,
        *,
        blocks: int = 64,
        block_tokens: int = 4,
        step_tokens: int = 16,
        ranks: int = 1,
        prefix_cache: bool = True,
    ) -> None:
        """`step_tokens` is the largest number of tokens in a step."""
        shape = model.shape
        self.model, self.step_tokens, self._prefix_cache = model, step_tokens, prefix_cache
        self.blocks = Blocks(blocks, block_tokens)
        self.caches = [self._make_caches(shape, ranks) for _ in range(ranks)]
        self.reuse = Reuse()
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[str, tuple[Request, int]] = {}
        """By the id of each request that waits for a load: the number of its tokens that are held after the load."""
        self._to_preempt: set[str] = set()

    def _make_caches(self, shape: Shape, ranks: int) -> dict[str, torch.Tensor]:
        size = (self.blocks.count, shape.heads // ranks, self.blocks.block_tokens, 2 * shape.head_dim)
        return {name: torch.zeros(size) for name in shape.names}

    # ---- what users call ------------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], new_tokens: int = 8) -> Request:
        """Queue a request for `new_tokens` tokens."""
        if -(-(len(prompt) + new_tokens) // self.blocks.block_tokens) > self.blocks.count:
            raise ValueError(f"{request_id}: more tokens than the caches hold")
        request = Request(request_id, list(prompt), new_tokens, self.blocks.block_tokens)
        self.requests[request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request. Blocks to which a load still writes are released when the load has ended."""
        del self.requests[request.request_id]
        self.reuse.finished(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request.request_id not in self.loading:
            self.blocks.release(request.request_id)

    @property
    def busy(self) -> bool:
        """Whether there is a reason for another step."""
        return bool(self.requests or self.loading or self.reuse.pending)

    def run(self, steps_max: int = 100_000) -> None:
        """Run steps until there is no work left. Raises `RuntimeError` after `steps_max` steps."""
        for _ in range(steps_max):
            if not self.busy:
                return
            if not self.step().num_scheduled_tokens:
                time.sleep(IDLE_S)
        raise RuntimeError(f"{steps_max} steps, and requests are left: {sorted(self.requests)}")

    def reset(self) -> None:
        """Forget all reusable KV."""
        self.blocks.clear()
        self.reuse.reset()

    def preempt_soon(self, request_id: str) -> bool:
        """Preempt a running request with the next step. Return whether the request runs."""
        self._to_preempt |= {one.request_id for one in self.running} & {request_id}
        return request_id in self._to_preempt

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Schedule, compute and sample. Return the scheduled step."""
        step = self._schedule()
        chunks = [self._chunk(request_id, count) for request_id, count in step.num_scheduled_tokens.items()]
        self.reuse.begin(step)
        logits: list[torch.Tensor] = []
        if chunks:
            logits = self.model.forward(chunks, self.caches, self.reuse.before, self.reuse.after)
        ended = self.reuse.end()
        for request_id in ended.loaded:
            self._loaded(request_id, ok=request_id not in ended.failed)
        for (request_id, count), last in zip(step.num_scheduled_tokens.items(), logits, strict=True):
            self._computed(self.requests[request_id], count, last, ended.bad_blocks)
        return step

    def _schedule(self) -> Step:
        scheduled: dict[str, int] = {}
        preempted, self._to_preempt = self._to_preempt, set()
        for victim in [one for one in self.running if one.request_id in preempted]:
            self.running.remove(victim)
            self._preempt(victim)
        before = len(preempted)
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed_tokens, self.step_tokens - sum(scheduled.values()))
            if request in self.running and count and self._make_room(request, count, preempted):
                scheduled[request.request_id] = count
        later: list[Request] = []
        while self.waiting and len(preempted) == before and sum(scheduled.values()) < self.step_tokens:
            request = self.waiting.popleft()
            admitted = self._admit(request, self.step_tokens - sum(scheduled.values()))
            if admitted is None:
                later.append(request)
            elif admitted:
                scheduled[request.request_id] = admitted
        self.waiting.extendleft(reversed(later))
        return Step(scheduled, frozenset(preempted))

    def _make_room(self, request: Request, count: int, preempted: set[str]) -> bool:
        """Allocate blocks for `count` more tokens of a running request.

        If too few blocks are free, preempt the youngest requests.
        """
        while not self.blocks.grow(request.request_id, request.num_computed_tokens + count):
            victim = self.running.pop()
            self._preempt(victim)
            preempted.add(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Take a request's blocks away. The request is computed again."""
        self.blocks.release(victim.request_id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self, request: Request, count_max: int) -> int | None:
        """Give a waiting request its blocks.

        Returns how many of its tokens are computed now, or None if it must still wait.

        At least the last token is computed, because its logits give the next token.
        """
        size, key = self.blocks.block_tokens, request.request_id
        prefix: list[int] = []
        if self._prefix_cache:
            prefix = self.blocks.prefix(request.block_hashes[: (request.num_tokens - 1) // size])
        local = len(prefix) * size
        hit = self.reuse.lookup(request, local)
        if hit is None:
            return None
        held = local + hit.tokens
        count = 0 if hit.waits else min(request.num_tokens - held, count_max)
        if not self.blocks.grow(key, held + count, prefix):
            return None
        self.reuse.admitted(request, hit.tokens)
        if hit.waits:
            self.loading[key] = request, held
            request.num_computed_tokens = local
        else:
            self.running.append(request)
            request.num_computed_tokens = held
        return count

    def _chunk(self, request_id: str, count: int) -> Chunk:
        request = self.requests[request_id]
        start = request.num_computed_tokens
        table = [block.block_id for block in self.blocks.table(request_id)]
        return Chunk(request.all_token_ids[start : start + count], start, table)

    def _loaded(self, request_id: str, *, ok: bool) -> None:
        """A load that a request waited for has ended."""
        request, held = self.loading.pop(request_id)
        if self.requests.get(request_id) is not request:
            self.blocks.release(request_id)
            return
        if ok:
            request.num_computed_tokens = min(held, request.num_tokens - 1)
        self.running.append(request)

    def _computed(self, request: Request, count: int, logits: torch.Tensor, bad_blocks: frozenset[int]) -> None:
        """Count the tokens of a request that a step has computed.

        If they depend on a failed load, they are computed again.
        """
        key, size = request.request_id, self.blocks.block_tokens
        bad = [i for i, block in enumerate(self.blocks.table(key)) if block.block_id in bad_blocks]
        if bad:
            request.num_computed_tokens = min(request.num_computed_tokens, bad[0] * size)
            return
        request.num_computed_tokens += count
        if request.num_computed_tokens == request.num_tokens:
            request.sampled(logits)
        if self._prefix_cache:
            self.blocks.publish(key, request.block_hashes[: request.num_computed_tokens // size])
        if request.done:
            self.running.remove(request)
            del self.requests[key]
            self.reuse.finished(request)
            self.blocks.release(key)
