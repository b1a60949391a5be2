"""Measures the time to first token of a model with recurrent states, and the share of accepted drafts after hits."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import Figure
from benchmarks.warm import LENGTHS, WARM_ENGINE, bind_cores, prompt, ttft
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model

REPEATS = 3
DRAFTS = 4
ANSWER_TOKENS = 96


def run() -> list[Figure]:
    """Return the figures of states and of drafts, each measured on a separate engine."""
    bind_cores()
    return [*_states(), _acceptance()]


def _states() -> list[Figure]:
    """Measure a model with Mamba 2 and attention.

    The export of states within a step is switched off, because vLLM's CPU build lacks the kernel for this export.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    promised = MambaMixer2.get_kv_cache_spec
    del MambaMixer2.get_kv_cache_spec
    try:
        options: dict[str, Any] = {**WARM_ENGINE, "enable_prefix_caching": True, "num_gpu_blocks_override": 1200}
        engine = Engine(str(make_model("granite-hybrid")), kvpipe={"pool_bytes_max": "3GiB"}, **options)
        engine.generate([prompt(64, 1)], 2)
        out = []
        for n in LENGTHS:
            tokens, warm = prompt(n, 3000 + n), []
            cold = ttft(engine, tokens)
            for _ in range(REPEATS):
                engine.settle()
                engine.llm.reset_prefix_cache()
                before = engine.connector.stats().get("tokens_loaded", 0)
                warm.append(ttft(engine, tokens))
            found = engine.connector.stats()["tokens_loaded"] - before
            beside = f"warm {median(warm) * 1e3:.0f} ms, cold {cold * 1e3:.0f} ms, {found} tokens hit"
            name = f"recurrent hybrid, warm first token / cold, {n} tokens"
            out.append(Figure(name, median(warm) / cold, 0.15, "x", beside))
        engine.close()
    finally:
        MambaMixer2.get_kv_cache_spec = promised  # type: ignore[method-assign]
    return out


def _acceptance() -> Figure:
    """Compare the acceptance of drafts with and without hits.

    The draft model equals the model. If the draft model's KV of the whole prompt is loaded, all drafts are accepted.
    """
    model = str(make_model("llama"))
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTS}
    engine = Engine(model, kvpipe={}, speculative_config=config, enable_prefix_caching=False)
    prompts = [prompt(n, 4000 + n) for n in (300, 500, 700)]
    steps = []
    for _ in range(2):
        for tokens in prompts:
            engine.add(tokens, ANSWER_TOKENS)
        steps.append(0)
        while engine.busy:
            engine.step()
            steps[-1] += 1
        engine.settle()
    loaded = engine.connector.stats()["tokens_loaded"]
    engine.close()
    beside = f"{ANSWER_TOKENS} tokens in {steps[1]} steps, without hits {steps[0]}; {loaded} tokens loaded"
    return Figure("acceptance length with hits / without", steps[0] / steps[1], 0.95, "x", beside, at_least=True)
