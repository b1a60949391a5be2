"""Checks that answers with kvpipe equal answers without kvpipe, token by token, and that a wrong byte is detected.

On a GPU, two runs of one prompt may differ if two tokens have nearly equal probabilities, because kernels round
differently by batch and chunk. So the reference records the margin of each token over the next best token. If answers
first differ at a token with a small margin, the difference is counted as a near tie. The bytes of the KV cache allow no
difference: loaded bytes must equal the computed bytes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.engine_live import Answer, Live, Setup, answer_of
from benchmarks.gpu.engine_models import SHAPES
from benchmarks.gpu.engine_report import Figures, Ledger, Skip
from kvpipe.transfer.pool import HostPool

BUDGET_TOKENS: Final = 256  # tokens per step: longer prompts are prefilled in chunks
CACHE_TOKENS: Final = 1280  # tokens of the KV cache: the crowd does not fit, so requests are preempted
CACHE_BYTES: Final = 1 << 30  # the engine uses `CACHE_TOKENS` tokens of it
ANSWER: Final = 24
CROWD_ANSWER: Final = 120
# The largest margin in log-probability of a near tie, and the largest share of a section's answers with near ties.
NEAR: Final = {"float32": (0.05, 0.25), "bfloat16": (0.2, 1.0)}
EXACT: Final = (0.0, 0.0)
POOL: Final = "256MiB"


@dataclass(frozen=True)
class Case:
    """One configuration of kvpipe that is tested."""

    mode: str
    load: str
    mover: str = "auto"

    @property
    def name(self) -> str:
        """The case's name in tables and on the command line."""
        return f"{self.mode}-{self.load}" + ("" if self.mover == "auto" else f"-{self.mover}")

    @property
    def config(self) -> dict[str, Any]:
        """The connector's extra config."""
        return {"mode": self.mode, "load": self.load, "mover": self.mover, "pool_bytes_max": POOL}


CASES: Final = (
    *(Case(mode, load) for mode in ("auto", "layerwise", "step") for load in ("sync", "async")),
    *(Case("auto", "sync", mover) for mover in ("dma", "staged", "direct")),
)


def prompt(tokens: int, seed: int, vocab: int = SHAPES["tiny"].vocab) -> list[int]:
    """Return a random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(tokens)]


BATCH: Final = [prompt(300, 1), prompt(611, 2), prompt(150, 3)]
CROWD: Final = [prompt(60 + 20 * i, 100 + i) for i in range(10)]
TALK: Final = prompt(200, 4)
REPLY: Final = prompt(30, 5)
LEAVING: Final = [prompt(220 + 40 * i, 200 + i) for i in range(3)]
LONE: Final = [prompt(250, 300 + i) for i in range(6)]  # the prompt with the largest margins is used
CLEAR_TOKENS: Final = 4


@dataclass
class Reference:
    """The answers of an engine without a connector."""

    batch: list[Answer]
    crowd: list[Answer]
    turns: list[tuple[list[int], Answer]]
    leaving: list[Answer]
    lone: tuple[list[int], Answer]


class Comparison:
    """Compares answers with the answers of the reference."""

    def __init__(self, near: tuple[float, float]) -> None:
        """`near` is one of `NEAR`."""
        self._near, self._share = near
        self.answers = self.ties = 0

    def same(self, got: Sequence[Answer], expected: Sequence[Answer]) -> None:
        """Raise AssertionError unless the answers are equal up to near ties."""
        assert len(got) == len(expected)
        for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            self.answers += 1
            at = first_difference(mine, theirs)
            if at is None:
                continue
            margin = theirs.margins[at] if at < len(theirs.margins) else float("inf")
            assert margin <= self._near, (
                f"answer {number} differs at token {at} of {len(theirs.tokens)}, won there by {margin:.3f}: "
                f"{mine.tokens[at : at + 4]} instead of {theirs.tokens[at : at + 4]}"
            )
            self.ties += 1

    def figures(self) -> Figures:
        """Return the counts. Raises AssertionError if too many answers differ by near ties."""
        assert self.ties <= self._share * max(self.answers, 4), f"{self.ties} near ties in {self.answers} answers"
        return {"answers": self.answers, "near ties": self.ties}


def first_difference(a: Answer, b: Answer) -> int | None:
    """Return the first position at which the answers differ, or None if they are equal."""
    if len(a.tokens) != len(b.tokens):
        return min(len(a.tokens), len(b.tokens))
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)


def options_of(setup: Setup) -> dict[str, Any]:
    """Return the engine's settings.

    Its limits are so small that prefills are chunked and requests are preempted. The cache's size is fixed, because
    vLLM's own measurement fails while other processes use the GPU.
    """
    return {
        "max_model_len": 1024,
        "max_num_batched_tokens": BUDGET_TOKENS,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": CACHE_TOKENS // setup.block,
        "enable_prefix_caching": True,
    } | ({"kv_cache_memory_bytes": CACHE_BYTES} if setup.cuda else {})


def play_reference(live: Live) -> Reference:
    """Run all prompts on an engine without a connector, and return the answers."""
    turns, history = [], TALK
    for _ in range(2):
        (answer,) = live.ask([history], ANSWER)
        turns.append((history, answer))
        history = history + answer.tokens + REPLY
    lone = [(tokens, live.ask([tokens], ANSWER)[0]) for tokens in LONE]
    return Reference(
        batch=live.ask(BATCH, ANSWER),
        crowd=live.ask(CROWD, CROWD_ANSWER),
        turns=turns,
        leaving=live.ask(LEAVING, ANSWER),
        lone=max(lone, key=lambda one: min(one[1].margins[:CLEAR_TOKENS])),
    )


class Scenarios:
    """The scenarios on one engine with kvpipe."""

    def __init__(self, live: Live, reference: Reference, near: tuple[float, float]) -> None:
        """`near` is one of `NEAR`."""
        self._live, self._reference, self._near = live, reference, near

    def repeated(self) -> Figures:
        """Run several requests at once, including a request longer than a step: first computed, and then loaded."""
        live, comparison = self._live, Comparison(self._near)
        comparison.same(live.ask(BATCH, ANSWER), self._reference.batch)
        live.forget()
        before = live.count("tokens_loaded")
        assert before == 0, f"{before} tokens were loaded when there was nothing to load"
        comparison.same(live.ask(BATCH, ANSWER), self._reference.batch)
        loaded = live.count("tokens_loaded")
        unit = live.connector.geometry.unit_tokens
        due = sum(len(p) // unit * unit for p in BATCH)
        assert loaded == due, f"{loaded} tokens were loaded, {due} could be"
        return comparison.figures() | {"loaded tokens": loaded}

    def conversation(self) -> Figures:
        """Run a conversation. The second turn loads the first turn, including its generated tokens."""
        live, comparison = self._live, Comparison(self._near)
        loaded = 0
        for number, (history, answer) in enumerate(self._reference.turns):
            live.forget()
            before = live.count("tokens_loaded")
            comparison.same(live.ask([history], ANSWER), [answer])
            loaded = live.count("tokens_loaded") - before
            if number and not comparison.ties:
                unit = live.connector.geometry.unit_tokens
                held = len(self._reference.turns[number - 1][0]) + ANSWER - 1  # the last token has no KV
                due = min(held, len(history) - 1) // unit * unit
                assert loaded == due, f"{loaded} tokens were loaded, {due} could be"
        return comparison.figures() | {"loaded tokens": loaded}

    def aborted(self) -> Figures:
        """Abort one of three requests while it computes, and in a second run while it loads. Check the other two."""
        live, comparison = self._live, Comparison(self._near)
        for _ in range(2):
            live.forget()
            ids = [live.put(p, ANSWER) for p in LEAVING]
            for _ in range(2):
                live.step()
            live.abort(ids[1])
            outputs = live.drain()
            stay = [i for i in range(len(LEAVING)) if i != 1]
            done = [outputs[ids[i]].outputs[0].finish_reason for i in stay]
            assert done == ["length"] * len(stay), done
            got = [answer_of(outputs[ids[i]]) for i in stay]
            comparison.same(got, [self._reference.leaving[i] for i in stay])
            assert ids[1] not in outputs or outputs[ids[1]].outputs[0].finish_reason == "abort"
        live.forget()
        comparison.same(live.ask(LEAVING, ANSWER), self._reference.leaving)
        return comparison.figures()

    def preempted(self) -> Figures:
        """Run more requests than the cache holds. Preempted requests load KV that was saved before the preemption."""
        live, comparison = self._live, Comparison(self._near)
        live.forget()
        loaded, preempted = live.count("tokens_loaded"), live.count("preempted")
        comparison.same(live.ask(CROWD, CROWD_ANSWER), self._reference.crowd)
        loaded, preempted = live.count("tokens_loaded") - loaded, live.count("preempted") - preempted
        assert preempted > 0, "nothing was preempted"
        assert loaded > 0, "nothing was loaded"
        return comparison.figures() | {"preempted": preempted, "loaded tokens": loaded}

    def bytes_equal(self) -> Figures:
        """Check that loaded bytes in the cache equal the computed bytes, and that a flipped byte is detected."""
        computed = self._prefix()
        loaded = self._prefix()
        assert _differing(computed, loaded) == 0, f"{_differing(computed, loaded)} bytes differ after a load"
        assert all(bool(page.any()) for page in computed), "a layer's cache is all zeros"
        pool, slot = self._live.pool, self._slot_of(computed)
        _flip(pool, slot, range(1))
        flipped = self._prefix()
        _flip(pool, slot, range(1))
        found = _differing(computed, flipped)
        assert found == 1, f"one byte was flipped in the pool, {found} differ in the cache"
        return {"bytes": sum(page.numel() for page in computed), "flipped bytes found": found}

    def corrupted(self) -> Figures:
        """Corrupt a saved chunk, and check that the answer changes.

        This proves that the engine reads the loaded KV, and that the comparison of answers detects wrong KV.
        """
        live = self._live
        tokens, expected = self._reference.lone
        slot, page = self._slot_of(self._prefix()), live.pages()[0].shape[1]
        item = live.runner.kv_caches[0].element_size()
        wrong = range(item - 1, page, item)  # the top byte of every value of one block of one layer: 0.5 becomes -2
        _flip(live.pool, slot, wrong)
        live.forget()
        (answer,) = live.ask([tokens], ANSWER)
        _flip(live.pool, slot, wrong)
        at = first_difference(answer, expected)
        assert at is not None, "the answer is the same although a saved chunk was corrupted"
        with contextlib.suppress(AssertionError):
            Comparison(self._near).same([answer], [expected])
            message = f"the answer differs at token {at} only, which passes for a near tie"
            raise RuntimeError(message)
        live.forget()
        comparison = Comparison(self._near)
        comparison.same(live.ask([tokens], ANSWER), [expected])
        return comparison.figures() | {"differs from token": at}

    def clean(self) -> Figures:
        """Check that no exception was contained, and that no lease, job or request is left."""
        stats = self._live.check_clean()
        return {key: stats.get(key, 0) for key in ("tokens_loaded", "slots_used", "preempted")}

    def _prefix(self) -> list[torch.Tensor]:
        """Empty vLLM's prefix cache, answer the lone prompt, and return the bytes of the prompt's whole blocks."""
        live, (tokens, _) = self._live, self._reference.lone
        live.forget()
        request = live.put(tokens, 4)
        while not any(r.num_output_tokens for r in live.scheduler.requests.values()):
            assert live.busy
            live.step()
        unit = live.connector.geometry.unit_tokens
        found = live.prefix_of(request, len(tokens) // unit * unit)
        live.drain()
        return found

    def _slot_of(self, pages: list[torch.Tensor]) -> int:
        """Return the pool's slot that begins with the first layer's first block."""
        wanted, pool = pages[0][0], self._live.pool
        self._live.settle()
        found = (pool.tensor[:, : len(wanted)] == wanted).all(dim=1).nonzero().flatten().tolist()
        assert len(found) == 1, f"the block is in slots {found}"
        return int(found[0])


def _differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


def _flip(pool: HostPool, slot: int, places: range) -> None:
    pool.slot(slot)[list(places)] ^= 0xFF


def check_graphs(live: Live, case: Case, setup: Setup, asked: str) -> Figures:
    """Check vLLM's CUDA graphs: full graphs, except in layerwise mode, where hooks run between all layers."""
    if not setup.cuda:
        raise Skip("needs CUDA")
    if asked == "none":
        raise Skip("CUDA graphs are off (--graphs none)")
    got = live.graphs
    full = got.startswith("FULL")
    if case.mode != "layerwise":
        assert full, f"vLLM's cudagraph_mode is {got} in {case.mode} mode"
    else:
        assert not full, f"vLLM's cudagraph_mode is {got} in layerwise mode"
        assert asked == "full" or got == "PIECEWISE", f"vLLM's cudagraph_mode is {got}, not PIECEWISE"
    return {"cudagraph_mode": got}


SECTIONS: Final[dict[str, Callable[[Scenarios], Figures]]] = {
    "batch, cold and warm": Scenarios.repeated,
    "conversation": Scenarios.conversation,
    "abort": Scenarios.aborted,
    "preemption": Scenarios.preempted,
    "bytes of the cache": Scenarios.bytes_equal,
    "corrupted chunk": Scenarios.corrupted,
    "nothing left over": Scenarios.clean,
}


class Correctness:
    """Runs all cases, and compares each case with one reference."""

    def __init__(self, ledger: Ledger, setup: Setup, model: str, asked_graphs: str) -> None:
        """`asked_graphs` is the value of `--graphs`."""
        self._ledger, self._setup, self._model, self._asked = ledger, setup, model, asked_graphs
        self._reference: Reference | None = None
        self._near = EXACT

    def run(self, cases: Sequence[Case], dtypes: Sequence[str]) -> None:
        """Run the reference in the first of `dtypes` that works, then every case."""
        dtype = next((d for d in dtypes if self._ledger.run(f"reference {d}", partial(self._refer, d))), None)
        for case in cases:
            if dtype is None:
                self._ledger.skip(case.name, "there is no reference")
            else:
                self._run_case(case, dtype)

    def _engine(self, dtype: str, kvpipe: dict[str, Any] | None) -> Live:
        return Live(self._setup, self._model, kvpipe, dtype=dtype, **options_of(self._setup))

    def _refer(self, dtype: str) -> Figures:
        live = self._engine(dtype, None)
        try:
            reference = play_reference(live)
            self._near = NEAR[dtype] if self._setup.cuda or dtype != "float32" else EXACT
            live.forget()
            comparison = Comparison(self._near)
            comparison.same(live.ask(BATCH, ANSWER), reference.batch)  # computed again
            comparison.same(live.ask(BATCH, ANSWER), reference.batch)  # vLLM's own prefix cache has these prompts
            spread = [len(set(answer.tokens)) / len(answer.tokens) for answer in reference.batch]
            assert min(spread) > 1 / 3, f"the model repeats itself: shares of distinct tokens {spread}"
        finally:
            live.close()
        self._reference = reference
        least = min(min(a.margins) for a in (*reference.batch, *reference.crowd))
        return comparison.figures() | {"least margin": least, "distinct tokens": min(spread)}

    def _run_case(self, case: Case, dtype: str) -> None:
        ledger, made = self._ledger, list[Live]()

        def start() -> Figures:
            made.append(self._engine(dtype, case.config))
            return {"page bytes": made[0].pages()[0].shape[1], "dtype": dtype}

        started = ledger.run(f"{case.name}: start", start)
        reference = self._reference
        assert reference is not None
        for name in ("CUDA graphs", *SECTIONS):
            full = f"{case.name}: {name}"
            if not started:
                ledger.skip(full, "the engine was not started")
            elif name in SECTIONS:
                ledger.run(full, partial(SECTIONS[name], Scenarios(made[0], reference, self._near)))
            else:
                ledger.run(full, partial(check_graphs, made[0], case, self._setup, self._asked))
        if made:
            ledger.run(f"{case.name}: shutdown", made.pop().close, always=True)
