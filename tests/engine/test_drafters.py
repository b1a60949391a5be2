"""Drafters with their own KV: hits change neither answers nor drafts, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_drafter, make_model
from kvpipe.errors import UnsupportedError
from tests.engine.common import BLOCK, assert_clean, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 41), prompt(530, 42)]


class Way(NamedTuple):
    """A drafting method. `ahead` is the number of later tokens on which the KV of a token depends."""

    method: str
    recipe: str = "llama"
    drafts: int = 3
    ahead: int = 1

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the engine's options. vLLM's own prefix cache is off, so every hit is kvpipe's."""
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.drafts}
        if self.method in ("eagle", "eagle3", "dflash"):
            config["model"] = str(make_drafter(self.method, folder / self.method))
        elif self.method == "draft_model":
            config["model"] = str(make_model(self.recipe))  # the model is its own drafter, so its drafts are accepted
        return {"speculative_config": config, "enable_prefix_caching": False}


WAYS = [Way("eagle"), Way("eagle3"), Way("mtp", "mimo-mtp", drafts=1), Way("draft_model", ahead=0)]
DFLASH = Way("dflash", ahead=0)
WAYS.append(DFLASH)
EAGLE = WAYS[0]


class Drafted:
    """Records all drafts from its creation on, step by step."""

    def __init__(self, live: Engine) -> None:
        """Record the drafts that vLLM's scheduler gets."""
        self._steps: list[list[list[int]]] = []
        take = live.scheduler.update_draft_token_ids

        def taken(drafts: Any) -> None:
            self._steps.append([list(one) for one in drafts.draft_token_ids])
            take(drafts)

        live.scheduler.update_draft_token_ids = taken  # type: ignore[method-assign]

    def take(self) -> list[list[list[int]]]:
        """Return the drafts since the last call, by step and request."""
        steps, self._steps = self._steps, []
        return steps


@contextmanager
def drafting(way: Way, folder: Path, kvpipe: dict[str, Any] | None, **more: Any) -> Iterator[tuple[Engine, Drafted]]:
    """Yield an engine that drafts."""
    with engine(way.recipe, kvpipe, **(way.options(folder) | more)) as live:
        yield live, Drafted(live)


def pages(live: Engine, request: str, tokens: int) -> dict[str, torch.Tensor]:
    """Return the bytes of the request's first `tokens` tokens, by layer."""
    (internal,) = [one for one in live.scheduler.requests if one.startswith(request)]
    (table,) = live.scheduler.kv_cache_manager.get_block_ids(internal)
    context = live.core.vllm_config.compilation_config.static_forward_context
    return {name: layer.kv_cache[table[: tokens // BLOCK]].clone() for name, layer in context.items()}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.method)
def test_hits_leave_answers_and_drafts_as_they_were(way: Way, tmp_path: Path) -> None:
    """The number of steps, the drafts of each step, and the answers are equal: cold, warm, and in a second turn."""
    turns = [PROMPTS]
    with drafting(way, tmp_path, None) as (plain, drafted):
        answers = [plain.generate(PROMPTS, 40)]
        drafts = [drafted.take()]
        turns.append([p + a + prompt(50, 43) for p, a in zip(PROMPTS, answers[0], strict=True)])
        answers.append(plain.generate(turns[1], 24))
        drafts.append(drafted.take())
    with drafting(way, tmp_path, {"chunk_tokens": 128, "save_decode_steps": 1}) as (live, drafted):
        loaded, hits = 0, []
        for turn in (0, 0, 1, 1):
            assert live.generate(turns[turn], len(answers[turn][0])) == answers[turn]
            assert drafted.take() == drafts[turn]
            live.settle()
            before, loaded = loaded, assert_clean(live).get("tokens_loaded", 0)
            hits.append(loaded - before)
    first, warm, next_turn, again = hits
    assert first == 0
    assert warm == sum((len(p) - way.ahead * BLOCK) // BLOCK * BLOCK for p in turns[0])
    # the hit includes the answers, except the unit that the last step made final
    assert next_turn >= warm + 2 * BLOCK
    assert again >= next_turn + 2 * BLOCK


@pytest.mark.parametrize("way", [EAGLE, WAYS[2], DFLASH], ids=lambda way: way.method)
def test_a_drafter_never_reads_kv_of_another_token_ahead(way: Way, tmp_path: Path) -> None:
    """Two prompts have whole blocks in common and differ in the next token.

    The drafter's KV may differ already in the last of these blocks.
    """
    head = PROMPTS[0][: 9 * BLOCK]
    mine, other = head + prompt(40, 51), head + prompt(40, 52)
    with drafting(way, tmp_path, None) as (plain, _):
        request = plain.add(mine, 8)
        plain.step()
        expected = pages(plain, request, 9 * BLOCK)
    with drafting(way, tmp_path, {"chunk_tokens": BLOCK}) as (live, _):
        live.generate([other], 8)
        live.settle()
        request = live.add(mine, 8)
        live.step()
        got = pages(live, request, 9 * BLOCK)
        live.drain()
        loaded = assert_clean(live)["tokens_loaded"]
    for name, page in expected.items():
        assert torch.equal(got[name], page), name
    assert loaded == (9 - way.ahead) * BLOCK


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("gemma2-hybrid", "not in the first KV cache group"),
        ("qwen3-next", "'draft_model' with recurrent states .*the first KV cache group"),
    ],
)
def test_a_draft_model_that_would_write_into_the_models_own_kv_is_refused(recipe: str, why: str) -> None:
    """vLLM's runner V1 would give the draft model the first group's blocks. So kvpipe refuses to start the engine."""
    drafts = {"method": "draft_model", "model": str(make_model("llama")), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match=why), engine(recipe, {"chunk_tokens": 192}, speculative_config=drafts):
        pass


def test_preempted_aborted_and_restarted(tmp_path: Path) -> None:
    """The cache is too small for all requests, and one request is aborted.

    A restarted engine finds only chunks on disk.
    """
    prompts = [prompt(300, 60 + i) for i in range(4)]
    kvpipe = {"chunk_tokens": 128, "tiers": [{"kind": "disk", "path": str(tmp_path / "disk")}], "name": "drafts"}
    kvpipe["state_dir"] = str(tmp_path / "state")
    with drafting(EAGLE, tmp_path, None) as (plain, _):
        expected = plain.generate(prompts, 40)
    for restarted in (False, True):
        with drafting(EAGLE, tmp_path, kvpipe, cache_tokens=1024, max_model_len=512) as (live, _):
            ids = [live.add(tokens, 40) for tokens in prompts]
            gone = live.add(prompt(200, 70), 40)
            for _ in range(6):
                live.step()
            live.abort(gone)
            outputs = live.drain()
            assert [list(outputs[one].outputs[0].token_ids) for one in ids] == expected
            assert restarted or any(live.preemptions.values())
            live.settle()
            stats = assert_clean(live)
            assert not restarted or stats["tokens_loaded"] >= 4 * whole_blocks(live, 300 - BLOCK)


def test_local_and_external_hits_together(tmp_path: Path) -> None:
    """Tokens that vLLM's own cache holds are not loaded. Only the tokens after a local hit are loaded."""
    tokens = prompt(530, 80)
    with drafting(EAGLE, tmp_path, None) as (plain, drafted):
        expected = plain.generate([tokens], 24)
        drafts = drafted.take()
    options = {"enable_prefix_caching": True, "cache_tokens": 768, "max_model_len": 640}
    with drafting(EAGLE, tmp_path, {"chunk_tokens": 128}, **options) as (live, drafted):
        assert live.generate([tokens], 24) == expected
        live.generate([tokens[:64] + prompt(380, 81)], 4)  # this request takes most of vLLM's blocks
        live.settle()
        before, _ = assert_clean(live).get("tokens_loaded", 0), drafted.take()
        assert live.generate([tokens], 24) == expected
        assert drafted.take() == drafts
        assert 0 < assert_clean(live).get("tokens_loaded", 0) - before < len(tokens) // BLOCK * BLOCK - BLOCK
