"""Measures the time to first token and the decode throughput with kvpipe, vLLM's own prefix cache, and no connector.

In `layerwise` mode vLLM captures no graphs of whole steps, and removing the connector later does not change this. So a
run in the same engine without the connector does not show the cost of this mode. Therefore decoding is also compared
with an engine that was started without a connector and has vLLM's own graphs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.gpu.engine_correctness import prompt
from benchmarks.gpu.engine_live import Live, Setup, without_connector
from benchmarks.gpu.engine_models import SHAPES, Shape
from benchmarks.gpu.engine_report import Figures, Ledger

ALONE: Final = "no connector"
ROUND_S_MAX: Final = 90.0  # a section begins no further round after this time


class Plan(NamedTuple):
    """The parameters of the measurements on one shape."""

    lengths: tuple[int, ...]
    rounds: int  # after a warm-up round
    requests: int
    answer: int
    pool: str
    memory: float  # share of the GPU's memory
    dtype: str


PLANS: Final = {
    "tiny": Plan((256, 512), 2, 4, 16, "64MiB", 0.1, "float32"),
    "mid": Plan((2048, 8192), 5, 32, 128, "4GiB", 0.3, "bfloat16"),
    "big": Plan((2048, 8192), 5, 32, 128, "8GiB", 0.5, "bfloat16"),
}
DECODE_PROMPT: Final = 32
SLACK_TOKENS: Final = 256


def options_of(setup: Setup, plan: Plan) -> dict[str, Any]:
    """Return the engine's settings, with which the longest prompt is prefilled in one step."""
    longest = max(plan.lengths) + SLACK_TOKENS
    held = 2 * longest + plan.requests * (DECODE_PROMPT + plan.answer + setup.block)
    return {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 2 * plan.requests,
        "num_gpu_blocks_override": -(-held // setup.block),
        "enable_prefix_caching": True,
        "dtype": plan.dtype,
    } | ({"gpu_memory_utilization": plan.memory} if setup.cuda else {})


class Meter:
    """Measures one engine."""

    def __init__(self, live: Live, shape: Shape, plan: Plan) -> None:
        """Prepare random prompts. A prompt is used twice only if the second use should hit."""
        self._live, self._shape, self._plan = live, shape, plan
        self._seeds = itertools.count(10_000)
        self._item = live.runner.kv_caches[0].element_size()

    def first_token(self, length: int) -> Figures:
        """Return the median times to first token: computed, loaded by kvpipe, and hit in vLLM's own prefix cache."""
        seconds: dict[str, list[float]] = {}
        loaded = 0
        self._live.wait_for_pinning()
        for number in self._rounds():
            took, loaded = self._one(length)
            for name, value in took.items():
                if number:
                    seconds.setdefault(name, []).append(value)
        cold, warm, own = (median(seconds[name]) for name in ("cold", "warm", "own"))
        size = loaded * self._shape.token_elements * self._item
        figures: Figures = {"cold ms": 1e3 * cold, "warm ms": 1e3 * warm, "own cache ms": 1e3 * own}
        figures |= {"warm/cold": warm / cold, "warm/own": warm / own, "loaded MiB": size / 2**20}
        if warm > own:
            figures["GB/s beyond own"] = size / 1e9 / (warm - own)
        return figures | {"rounds": len(seconds["cold"])}

    def _one(self, length: int) -> tuple[dict[str, float], int]:
        live, tokens = self._live, self._prompt(length)
        took = {"cold": self._timed(lambda: live.generate([tokens], 1))}
        live.forget()
        before = live.count("tokens_loaded")
        took["warm"] = self._timed(lambda: live.generate([tokens], 1))
        live.settle()
        loaded = live.count("tokens_loaded") - before
        assert loaded >= length - 2 * live.connector.geometry.unit_tokens, (
            f"only {loaded} of {length} tokens were loaded"
        )
        took["own"] = self._timed(lambda: live.generate([tokens], 1))
        live.settle()
        assert live.count("tokens_loaded") - before == loaded, "vLLM's own prefix cache was not used"
        return took, loaded

    def decode(self) -> Figures:
        """Return the engine's decode throughput in tokens per second, with the connector if it was started with one."""
        seconds = [self._decode(on=True) for _ in self._rounds()]
        return {"tokens/s": self._plan.requests * self._plan.answer / median(seconds[1:])}

    def overhead(self, alone: Figures) -> Figures:
        """Compare first tokens and decoding while kvpipe saves with runs without the connector. No prompt hits.

        `alone` has the figures of `decode` of an engine without a connector, or is empty.
        """
        plan, ratios = self._plan, dict[str, list[float]]()
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in self._rounds():
            order = (False, True) if number % 2 else (True, False)
            decode = {on: self._decode(on=on) for on in order}
            cold = {on: self._cold(max(plan.lengths), on=on) for on in order}
            if number:
                ratios.setdefault("decode throughput, saving/without", []).append(decode[False] / decode[True])
                ratios.setdefault("cold first token, saving/without", []).append(cold[True] / cold[False])
                for on, seconds in decode.items():
                    rates[on].append(plan.requests * plan.answer / seconds)
        figures: Figures = {name: median(values) for name, values in ratios.items()}
        figures |= {"tokens/s saving": median(rates[True]), "tokens/s without": median(rates[False])}
        for message, on in (("saving", True), ("without", False)) if alone else ():
            figures[f"decode throughput, {message}/{ALONE}"] = median(rates[on]) / float(alone["tokens/s"])
        return figures

    def _decode(self, *, on: bool) -> float:
        prompts = [self._prompt(DECODE_PROMPT) for _ in range(self._plan.requests)]
        return self._with(lambda: self._live.generate(prompts, self._plan.answer), on=on)

    def _cold(self, length: int, *, on: bool) -> float:
        tokens = self._prompt(length)
        return self._with(lambda: self._live.generate([tokens], 1), on=on)

    def _with(self, call: Callable[[], object], *, on: bool) -> float:
        self._live.forget()
        with nullcontext() if on else without_connector(self._live):
            took = self._timed(call)
        self._live.settle()
        return took

    def _rounds(self) -> Iterator[int]:
        """Yield the number of each round. Round 0 is the warm-up. At least one more round follows."""
        begin = time.monotonic()
        for number in range(self._plan.rounds + 1):
            if number > 1 and time.monotonic() - begin > ROUND_S_MAX:
                return
            yield number

    def _prompt(self, length: int) -> list[int]:
        return prompt(length - 1, next(self._seeds), self._shape.vocab)  # a full last block would be recomputed

    @staticmethod
    def _timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


def run(ledger: Ledger, setup: Setup, model: str, name: str, modes: Sequence[str]) -> None:
    """Measure the shape `name` in each of `modes`. If `ALONE` is first, it is the baseline of all other modes."""
    plan, shape = PLANS[name], SHAPES[name]
    alone: Figures = {}

    def decode_alone(meter: Meter) -> Figures:
        alone.update(meter.decode())
        return alone

    for mode in modes:
        made = list[Live]()

        def start(mode: str = mode, made: list[Live] = made) -> Figures:
            config = None if mode == ALONE else {"mode": mode, "pool_bytes_max": plan.pool}
            made.append(Live(setup, model, config, **options_of(setup, plan), load_format=_load_format(shape)))
            return {"page bytes": made[0].pages()[0].shape[1], "cudagraph_mode": made[0].graphs}

        started = ledger.run(f"{name} {mode}: start", start)
        meter = Meter(made[0], shape, plan) if started else None
        sections: dict[str, Callable[[Meter], Figures]] = {
            f"first token, {length} tokens": partial(Meter.first_token, length=length) for length in plan.lengths
        }
        sections["overhead of saving"] = partial(Meter.overhead, alone=alone)
        for label, section in ({"decode": decode_alone} if mode == ALONE else sections).items():
            full = f"{name} {mode}: {label}"
            if meter is None:
                ledger.skip(full, "the engine was not started")
            else:
                ledger.run(full, partial(section, meter))
        meter = None
        if made:
            ledger.run(f"{name} {mode}: shutdown", made.pop().close, always=True)


def _load_format(shape: Shape) -> str:
    return "dummy" if shape.dummy else "auto"
