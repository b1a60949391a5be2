"""Requests of a trial: their prompts, the answers that they must get, and the block hashes of both."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from kvpipe.cache.ahead import Part
from kvpipe.connectors.vllm.trial.adapters import AdapterFake, name, path
from kvpipe.connectors.vllm.trial.content import EMBEDDED, VOCAB, Live, Sequence
from kvpipe.connectors.vllm.trial.hints import HINTS, RESUME, Hints, attach
from kvpipe.connectors.vllm.trial.operators import operate
from kvpipe.connectors.vllm.trial.shapes import PRODUCER, Shape

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.trial.rank import TrialStep

DOCUMENTS, DOCUMENT_TOKENS_MAX, OWN_TOKENS_MAX, ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX = 4, 250, 40, 70, 330
PRIORITIES, SESSIONS_MAX, SALTS = 3, 2, 3


class Arrivals(ABC):
    """The moves of a trial that bring requests, and what is known of those that have come."""

    scheduler: Scheduler
    kvpipe: Any
    steps: int
    careful = True
    """Leave out what vLLM itself is known to fail at."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """`seed`: the documents."""
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
        self._hints: Hints | None = None  # of the next request
        self.prefixes: dict[bytes, tuple[Sequence, int]] = {}  # what each block hash must stand for
        self.old_keys: set[bytes] = set()  # of prefixes that were computed with other weights or adapters
        self.violations = list[str]()
        self.cut_short = set[str]()  # requests that vLLM has ended because a load failed

    @abstractmethod
    def _in_flight_steps(self) -> list[TrialStep]:
        """Return the steps that were scheduled and not yet given back to the scheduler."""

    @abstractmethod
    def _gone(self) -> None:
        """Drop the requests that vLLM has finished."""

    def _operate(self, index: int, what: int, tokens: int) -> None:
        if self.shape.operators and self.kvpipe is not None:
            operate(self, index, what, tokens)  # type: ignore[arg-type]  # there is one kind of them

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

    def begin_hints(self) -> None:
        """Count the catalog's clock in steps, as evictions may depend on it, so that a sequence has one outcome.

        What clients announced before has come: else a small pool would have room for one announced chunk.
        """
        catalog = self.kvpipe.scheduler.catalog
        catalog._clock = lambda: float(self.steps)  # noqa: SLF001

        def part() -> Part:
            made = Part()
            for _ in range(self.shape.pool_slots):
                made.over(used=True)
            made.announced = 0
            return made

        catalog.ahead.parts.default_factory = part

    def _reuse(self, document: int, take: int, answer: int) -> None:
        busy = set(self.scheduler.requests) | {r for s in self._in_flight_steps() for r in s.sequences}
        free = [one for one in self.over if one.id not in busy]
        if free:
            text = self.documents[document % DOCUMENTS]
            self._enter(free[take % len(free)].id, text[: 1 + take % len(text)], answer, 0, 0)

    def _own(self, tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(tokens % (OWN_TOKENS_MAX + 1))]

    def _embed(self, document: int, take: int, own: int, answer: int) -> None:
        if self.shape.events and (self.shape.tiers or self.shape.hash_tokens != max(self.shape.block_tokens)):
            return  # events hash the embeddings of a whole block: a router learns its parts' hashes from vLLM's own
        text = self.documents[document % DOCUMENTS]
        embedded = [EMBEDDED + token for token in text[: 1 + take % len(text)]]
        self._enter(f"r{self.added}", embedded + self._own(own), answer, 0, 0)

    def _session(self, document: int, take: int, answer: int) -> None:
        if self.shape.drafts or sum(one.turns is not None for one in self.live.values()) >= SESSIONS_MAX:
            return  # of drafts accepted beyond an answer's end vLLM takes the KV for that of the next input
        if self.careful and (self.kvpipe is None or self.shape.sibling or self.shape.behind):
            return  # another connector's asynchronous load, and a session behind it, wait for each other's blocks
        if self.careful and self.shape.asynchronous and self.shape.role == PRODUCER:
            return  # vLLM forgets the prompt of one that it preempts while the last token of its turn is in flight
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
        prompt = last.prompt + last.answer(wanted)[:-1] + new  # vLLM leaves out the token that it has not computed
        turn = self._sequence(prompt, one.salt, one.lora), 1 + answer % ANSWER_TOKENS_MAX
        if len(prompt) > PROMPT_TOKENS_MAX or not self._sessions_fit(one, len(prompt) + turn[1]):
            return
        one.turns.append(turn)
        self._remember(one, *turn)
        self.scheduler.add_request(self.request_of(one, new, wanted=turn[1], resumable=True))
        self._advance(one)

    def _sessions_fit(self, one: Live | None, tokens: int) -> bool:
        """Whether all sessions fit into the blocks if `one`, or a new one, has `tokens`: vLLM preempts no session."""
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
        """No more input comes to a session."""
        if not one.closed:
            one.closed = True
            self.scheduler.add_request(self.request_of(one, [0]))
            self._gone()

    def _advance(self, one: Live) -> None:
        """Notice that vLLM has begun with a session's next input."""
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
            attach(request, self._hints)
            self._hints = None
        self.scheduler.add_request(request)

    def _sequence(self, prompt: list[int], salt: int, lora: int) -> Sequence:
        sequence = Sequence(prompt, f"{salt}/{lora}/{self.adapters.version(lora)}/{self.weights}")
        sequence.lora = lora
        return sequence

    def _remember(self, one: Live, sequence: Sequence, wanted: int) -> None:
        """Remember what the block hashes of a prompt and its answer stand for."""
        for i, block_hash in enumerate(self.answered(one, sequence.prompt, sequence.answer(wanted)).block_hashes):
            key = self.adapters.key(block_hash, one.lora) if self.kvpipe is not None else block_hash
            self.old_keys.update(self.adapters.other_keys(block_hash, one.lora))
            self.prefixes.setdefault(key, (sequence, (i + 1) * self.shape.hash_tokens))

    def answered(self, one: Live, prompt: list[int], answer: list[int]) -> Request:
        """Return vLLM's request with `prompt` and `answer`, and all else that `one` has."""
        request = self.request_of(one, prompt)
        request.append_output_token_ids(answer)
        return request

    def request_of(self, one: Live, tokens: list[int], *, wanted: int = 0, resumable: bool = False) -> Request:
        """Return vLLM's request with the prompt `tokens` and all else that `one` has."""
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
            lora_request=LoRARequest(name(one.lora), one.lora, path(one.lora)) if one.lora else None,
            priority=one.wanted % PRIORITIES,
            resumable=resumable,
        )
