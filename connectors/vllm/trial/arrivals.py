"""The requests of a trial: their prompts, the answers that they must get, and the block hashes of both."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from kvpipe.cache.ahead import AccountAhead
from kvpipe.connectors.vllm.trial.adapters import AdapterFake, adapter_name, path
from kvpipe.connectors.vllm.trial.content import EMBEDDED, VOCAB, Live, Sequence
from kvpipe.connectors.vllm.trial.hints import HINTS, RESUME, Hints, set_hints
from kvpipe.connectors.vllm.trial.limits import LIMITS, Allowed
from kvpipe.connectors.vllm.trial.shapes import PRODUCER, Shape
from kvpipe.features.announced import KnownPrompt

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.trial.rank import TrialStep
    from kvpipe.connectors.vllm.trial.router import Router
    from kvpipe.scheduler.side import SchedulerSide

DOCUMENTS, DOCUMENT_TOKENS_MAX, OWN_TOKENS_MAX, ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX = 4, 250, 40, 70, 330
PRIORITIES, SESSIONS_MAX, SALTS = 3, 2, 3
PARTS_PER_SLICE = 2
PIN, UNPIN, EVICT = range(3)


class Arrivals(ABC):
    """The moves of a trial that add requests, and the records of the requests that were added."""

    scheduler: Scheduler
    kvpipe: Any
    steps: int
    router: Router | None = None
    careful = True
    """Whether a trial leaves out the moves at which vLLM itself fails."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """`seed` determines the documents."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(shape.hash_tokens, sha256)
        self.shape, self.rng = shape, random.Random(seed)  # noqa: S311
        self.documents = [
            [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(40, DOCUMENT_TOKENS_MAX))]
            for _ in range(DOCUMENTS)
        ]
        self.adapters, self.weights = AdapterFake(), "weights 0"
        self.live: dict[str, Live] = {}
        self.over: list[Live] = []
        self.added = 0
        self._hints: Hints | None = None  # the hints of the next request
        self._limits: tuple[dict[str, Any], Allowed] | None = None  # the limits of the next request
        # for each block hash, the sequence and the number of tokens that it must stand for
        self.prefixes: dict[bytes, tuple[Sequence, int]] = {}
        self.old_keys: set[bytes] = set()  # keys of prefixes that were computed with other weights or adapters
        self.violations = list[str]()
        self.cut_short = set[str]()  # requests that vLLM ended because a load failed

    @property
    def side(self) -> SchedulerSide:
        """The scheduler side of kvpipe."""
        assert self.kvpipe is not None  # noqa: S101
        assert self.kvpipe.scheduler is not None  # noqa: S101
        return self.kvpipe.scheduler

    @abstractmethod
    def _in_flight_steps(self) -> list[TrialStep]:
        """Return the steps that were scheduled and whose results the scheduler has not processed."""

    @abstractmethod
    def _gone(self) -> None:
        """Drop the requests that vLLM has finished."""

    def _operate(self, index: int, what: int, tokens: int) -> None:
        if self.shape.operators and self.kvpipe is not None:
            _operate(self, index, what, tokens)

    def _add(self, document: int, take: int, own: int, answer: int, salt: int = 0, lora: int = 0) -> None:
        text = self.documents[document % DOCUMENTS]
        prompt = text[: 1 + take % len(text)] + self._own(own)
        salt = (salt + document) % SALTS if self.shape.quotas else salt
        self._enter(f"r{self.added}", prompt, answer, salt, lora)

    def _follow(self, index: int, own: int, answer: int) -> None:
        done = [one for one in self.over if not one.aborted]
        if done:
            last = done[index % len(done)]
            self._enter(
                f"r{self.added}", last.sequence.prompt + last.output + self._own(own), answer, last.salt, last.lora
            )

    def _hint(self, which: int, seconds: int) -> None:
        if self.shape.hints:
            self._hints = HINTS[RESUME if self.shape.resumes and which % 4 else which](seconds)

    def _limit(self, which: int, tokens: int) -> None:
        if self.shape.limits:
            self._limits = LIMITS[which](tokens)

    def allowed(self, request_id: str) -> Allowed:
        """Return the limits of a request."""
        return self.live[request_id].allowed if request_id in self.live else Allowed()

    def begin_hints(self) -> None:
        """Make the catalog's clock count steps. Otherwise evictions would depend on the speed of the machine.

        Each account starts as if its earlier announcements had been useful, because a small pool would otherwise have
        room for only one announced chunk.
        """
        catalog = self.kvpipe.scheduler.catalog
        catalog._clock = lambda: float(self.steps)  # noqa: SLF001

        def numbers() -> AccountAhead:
            made = AccountAhead()
            for _ in range(self.shape.pool_slots):
                made.over(used=True)
            made.announced = 0
            return made

        catalog.ahead.by_account.default_factory = numbers

    def _reuse(self, document: int, take: int, answer: int) -> None:
        busy = set(self.scheduler.requests) | {r for s in self._in_flight_steps() for r in s.sequences}
        free = [one for one in self.over if one.id not in busy]
        if free:
            text = self.documents[document % DOCUMENTS]
            self._enter(free[take % len(free)].id, text[: 1 + take % len(text)], answer, 0, 0)

    def _own(self, tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(tokens % (OWN_TOKENS_MAX + 1))]

    def _embed(self, document: int, take: int, own: int, answer: int) -> None:
        text = self.documents[document % DOCUMENTS]
        embedded = [EMBEDDED + token for token in text[: 1 + take % len(text)]]
        self._enter(f"r{self.added}", embedded + self._own(own), answer, 0, 0)

    def _session(self, document: int, take: int, answer: int) -> None:
        if self.shape.drafts or sum(one.turns is not None for one in self.live.values()) >= SESSIONS_MAX:
            return  # vLLM mistakes the KV of drafts accepted after an answer's end for the KV of the next input
        if self.careful and (self.kvpipe is None or self.shape.sibling or self.shape.behind):
            return  # another connector's asynchronous load and a later session wait for each other's blocks
        if self.careful and self.shape.asynchronous and self.shape.role == PRODUCER:
            # vLLM forgets a session's prompt if it preempts the session while the turn's last token is in flight
            return
        text = self.documents[document % DOCUMENTS]
        prompt = text[: 1 + take % len(text)]
        if self._sessions_fit(None, len(prompt) + 1 + answer % ANSWER_TOKENS_MAX):
            self._enter(f"r{self.added}", prompt, answer, 0, 0, resumable=True)

    def _more(self, index: int, own: int, answer: int) -> None:
        sessions = [one for one in self.live.values() if one.turns is not None]
        if not sessions:
            return
        one = sessions[index % len(sessions)]
        assert one.turns is not None  # noqa: S101
        last, wanted = one.turns[-1] if one.turns else (one.sequence, one.wanted)
        new = self._own(max(1, own))
        # vLLM leaves out the answer's last token, because vLLM has not computed this token
        prompt = last.prompt + last.answer(wanted)[:-1] + new
        turn = self._sequence(prompt, one.salt, one.lora), 1 + answer % ANSWER_TOKENS_MAX
        if len(prompt) > PROMPT_TOKENS_MAX or not self._sessions_fit(one, len(prompt) + turn[1]):
            return
        one.turns.append(turn)
        self._remember(one, *turn)
        self.scheduler.add_request(self.request_of(one, new, wanted=turn[1], resumable=True))
        self._advance(one)

    def _sessions_fit(self, one: Live | None, tokens: int) -> bool:
        """Whether all sessions fit into the blocks if `one`, or a new session, has `tokens` tokens.

        Sessions must fit together, because vLLM preempts no session.
        """
        lengths = [tokens] + [
            len(prompt.prompt) + wanted
            for other in self.live.values()
            if other.turns is not None and other is not one
            for prompt, wanted in [other.turns[-1] if other.turns else (other.sequence, other.wanted)]
        ]
        return not self.careful or sum(map(self.shape.blocks_of, lengths)) < self.shape.blocks

    def _end(self, index: int) -> None:
        sessions = [one for one in self.live.values() if one.turns is not None]
        if sessions:
            self._hang_up(sessions[index % len(sessions)])

    def _hang_up(self, one: Live) -> None:
        """End a session. The session gets no more input."""
        if not one.closed:
            one.closed = True
            self.scheduler.add_request(self.request_of(one, [0]))
            self._gone()

    def _advance(self, one: Live) -> None:
        """If vLLM has begun with a later input of a session, make that input the present input of `one`."""
        request = self.scheduler.requests[one.id]
        while one.turns and request.num_prompt_tokens != len(one.sequence.prompt):
            if one.output != one.expected:
                self.violations.append(f"right_answers: {one.id} answered {one.output} instead of {one.expected}")
            one.sequence, one.wanted = one.turns.popleft()
            one.output = []

    def _enter(
        self, request_id: str, prompt: list[int], answer: int, salt: int, lora: int, *, resumable: bool = False
    ) -> None:
        prompt, wanted = prompt[:PROMPT_TOKENS_MAX], 1 + answer % ANSWER_TOKENS_MAX
        self.added += 1
        self.cut_short.discard(request_id)
        one = self.live[request_id] = Live(request_id, self._sequence(prompt, salt, lora), wanted, salt, lora)
        if resumable:
            one.turns = deque()
        self._remember(one, one.sequence, wanted)
        request = self.request_of(one, prompt, resumable=resumable)
        if self._hints is not None:
            set_hints(request, self._hints)
            self._hints = None
        if self._limits is not None:
            parameters, one.allowed = self._limits
            request.kv_transfer_params = (request.kv_transfer_params or {}) | parameters
            self._limits = None
        self.scheduler.add_request(request)

    def _sequence(self, prompt: list[int], salt: int, lora: int) -> Sequence:
        sequence = Sequence(prompt, f"{salt}/{lora}/{self.adapters.version(lora)}/{self.weights}")
        sequence.lora = lora
        return sequence

    def _remember(self, one: Live, sequence: Sequence, wanted: int) -> None:
        """Record which tokens each block hash of a prompt and of the prompt's answer covers."""
        hashes = self.answered(one, sequence.prompt, sequence.answer(wanted)).block_hashes
        if self.router is not None:
            self.router.routed(hashes)
        for i, block_hash in enumerate(hashes):
            key = self.adapters.key(block_hash, one.lora) if self.kvpipe is not None else block_hash
            self.old_keys.update(self.adapters.other_keys(block_hash, one.lora))
            self.prefixes.setdefault(key, (sequence, (i + 1) * self.shape.hash_tokens))

    def answered(self, one: Live, prompt: list[int], answer: list[int]) -> Request:
        """Return vLLM's request with `prompt` and `answer`, and with the other parameters of `one`."""
        request = self.request_of(one, prompt)
        request.append_output_token_ids(answer)
        return request

    def request_of(self, one: Live, tokens: list[int], *, wanted: int = 0, resumable: bool = False) -> Request:
        """Return vLLM's request with the prompt `tokens`, and with the other parameters of `one`."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        texts = [token < EMBEDDED for token in tokens]
        rows = None if all(texts) else torch.tensor([[0 if t < EMBEDDED else t] for t in tokens], dtype=torch.float32)
        return Request(
            one.id,
            [token if text else 0 for token, text in zip(tokens, texts, strict=True)] if any(texts) else None,
            SamplingParams(max_tokens=wanted or one.wanted, ignore_eos=True),
            None,
            prompt_embeds=rows,
            prompt_is_token_ids=None if all(texts) or not any(texts) else texts,
            block_hasher=self.hasher,
            cache_salt=str(one.salt) if one.salt else None,
            lora_request=LoRARequest(adapter_name(one.lora), one.lora, path(one.lora)) if one.lora else None,
            priority=one.wanted % PRIORITIES,
            resumable=resumable,
        )


def _operate(trial: Arrivals, index: int, what: int, tokens: int) -> None:
    """Queue an operator's order for a prompt.

    The order pins the prompt for `tokens` steps, ends a pin, or evicts the prompt from token `tokens` on. In a shape
    with `warms`, a pin first fetches the prompt's chunks from tiers. If `tokens` is 0 there, the chunks are fetched and
    not pinned. The engine's next steps carry out the order. An idle engine carries out the order in this call.
    """
    side, known = trial.side, [*trial.over, *trial.live.values()]
    pins, orders = side.pins, side.orders
    orders.slice_s_max, orders.slice_parts_max = float("inf"), PARTS_PER_SLICE
    pins.clock = lambda: float(trial.steps)
    if what == UNPIN:
        orders.queue_change(lambda: pins.unpin(min(pins.pins, default=0)))
    elif known:
        oldest = trial.shape.warms and what == PIN  # the oldest prompt is most likely to be in tiers only
        one = known[index % len(known)] if oldest else known[-1 - index % len(known)]
        asked = trial.answered(one, one.sequence.prompt, one.output)
        prefixes = side.prefixes
        if oldest:
            orders.queue_change(lambda: side.prefetching.warm(_known(side, asked), asked, tokens))
        elif what == PIN:
            orders.queue_change(lambda: pins.pin(prefixes, asked, tokens + 1))
        else:
            orders.queue_change(lambda: pins.evict(prefixes, asked, tokens))
    carry_out(trial)


def _known(side: SchedulerSide, asked: Request) -> KnownPrompt:
    """Return a request's prompt in the form in which an operator names a prompt."""
    tenant = side.prefixes.tenant(asked)
    return KnownPrompt(side.prefixes.hashes(asked), asked.num_tokens, tenant.salt, tenant.adapter)


def carry_out(trial: Arrivals) -> None:
    """Carry out the waiting orders, unless the engine has the turn."""
    orders = trial.side.orders
    done = True
    while done and orders.due and orders.turns.borrow():
        try:
            done = trial.side.carry_out_orders()
        finally:
            orders.turns.give_back()
