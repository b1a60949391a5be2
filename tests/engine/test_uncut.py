"""Prompts that cannot be divided, and requests that read no cache, are refused or served without a hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_tokenizer
from kvpipe.errors import UnsupportedError
from tests.engine.common import assert_clean, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

LONG = prompt(300, 71)


def refused(match: str, recipe: str = "llama", **options: Any) -> None:
    """Check that the engine does not start with kvpipe, and that the message names the unsupported feature."""
    with pytest.raises(UnsupportedError, match=match), engine(recipe, {}, **options):
        pass


@pytest.mark.parametrize("caching", [None, False])
def test_a_prefix_lm_is_refused(*, caching: bool | None) -> None:
    """With `non_causal` the KV of a token depends on the whole prompt.

    Such a model is refused even if vLLM's own cache is off.
    """
    refused(r"kvpipe: non-causal attention \(prefix-LM; layer '.+'\) is not supported; serve it without", "prefix-lm",
            enable_prefix_caching=caching)  # fmt: skip


def _embedding(live: Engine, tokens: Sequence[int]) -> torch.Tensor:
    from vllm import PoolingParams

    name = live.add(tokens, params=PoolingParams(task="embed"))
    return live.drain()[name].outputs.data  # type: ignore[no-any-return]


def _pooling(how: str) -> dict[str, Any]:
    from vllm.config import PoolerConfig

    return {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": PoolerConfig(pooling_type=how),
        "tokenizer": str(make_tokenizer()),
        "skip_tokenizer_init": False,
    }


@pytest.mark.parametrize(("how", "caching"), [("MEAN", None), ("MEAN", True), ("CLS", False)])
def test_pooling_of_the_whole_prompt_is_refused(how: str, *, caching: bool | None) -> None:
    """MEAN and CLS pooling need all tokens in one step.

    So kvpipe refuses both, even if a user switches vLLM's prefix cache on.
    """
    refused(
        f"pooling with seq_pooling_type='{how}' .* is not supported", enable_prefix_caching=caching, **_pooling(how)
    )


@pytest.mark.parametrize("caching", [True, False])
def test_pooling_of_the_last_token(*, caching: bool) -> None:
    """An embedding of the last token is the same with a hit. The hit may be on another prompt's beginning."""
    options = _pooling("LAST") | {"enable_prefix_caching": caching}
    asked = [LONG, LONG, LONG[:200] + prompt(70, 72)]
    with engine(**options) as plain:
        expected = [_embedding(plain, tokens) for tokens in asked]
    with engine(kvpipe={"chunk_tokens": 64}, **options) as live:
        for tokens, one in zip(asked, expected, strict=True):
            torch.testing.assert_close(_embedding(live, tokens), one)
            live.settle()
            live.llm.reset_prefix_cache()
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, 300, 200)


def test_requests_that_read_no_cache_ask_for_nothing(tmp_path: Path) -> None:
    """Log-probabilities of a prompt need the whole prompt.

    So there is no lookup and no fetch, and no hit is counted.
    """
    from vllm import SamplingParams

    def asked() -> SamplingParams:
        return SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=2)

    def noted(live: Engine) -> tuple[list[int], list[dict[int, float]]]:
        name = live.add(LONG, params=asked())
        output = live.drain()[name]
        ranked = [{token: one.logprob for token, one in at.items()} for at in output.prompt_logprobs[1:]]
        return list(output.outputs[0].token_ids), ranked

    options: dict[str, Any] = {"enable_prefix_caching": True}
    tier = {"kind": "disk", "path": str(tmp_path), "bytes_max": "1GiB", "store": "all"}
    disk = {"chunk_tokens": 64, "tiers": [tier]}
    with engine(**options) as plain:
        expected = noted(plain)
    with engine(kvpipe=disk, **options) as live:
        assert live.generate([LONG], 8) == [expected[0]]
        assert assert_clean(live)["chunks_stored"] > 0
    with engine(kvpipe=disk, **options) as live:
        side = live.connector.scheduler
        assert side is not None
        for held in ("on disk", "in memory"):
            assert noted(live) == expected, held
            stats = assert_clean(live)
            assert not any(side.tracer.hit_tokens.values()), held
            assert set(side.tracer.misses) == {"not_read"}
            assert not {"tokens_loaded", "lookup_hit", "tier_lookup", "chunks_fetching"} & set(stats), stats
        live.llm.reset_prefix_cache()
        assert live.generate([LONG], 8) == [expected[0]]
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, 300)
