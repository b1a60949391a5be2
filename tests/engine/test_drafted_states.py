"""Recurrent states with drafts: hits change neither answers nor accepted drafts, and are as long as possible."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.connectors.vllm.trial.processors import Processor, complete
from kvpipe.errors import UnsupportedError
from tests.engine import aligned_states
from tests.engine.common import assert_clean, engine, planned, prompt

pytestmark = pytest.mark.engine

DRAFTS = 3
PROMPTS = [prompt(300, 21), prompt(576, 23)]
ROUNDS_MAX = 8
RECIPE = "qwen3-next-mtp"
MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
OPTIONS: dict[str, Any] = {"speculative_config": MTP, "enable_prefix_caching": True, "dtype": "bfloat16"}


class Drafting:
    """An engine that counts its drafts and its accepted drafts."""

    def __init__(self, live: Engine) -> None:
        """Record the drafts that vLLM's scheduler gets."""
        self.live, self.drafted, self.accepted = live, 0, 0
        update = live.scheduler.update_from_output

        def updated(step: Any, output: Any) -> Any:
            for request, drafts in step.scheduled_spec_decode_tokens.items():
                self.drafted += len(drafts)
                self.accepted += len(output.sampled_token_ids[output.req_id_to_index[request]]) - 1
            return update(step, output)

        live.scheduler.update_from_output = updated  # type: ignore[method-assign]

    def one_by_one(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the answers. vLLM's own cache is emptied after each answer."""
        out = []
        for tokens_in in prompts:
            out += self.live.generate([tokens_in], tokens)
            if self.live.scheduler.connector is not None:
                self.live.settle()
            self.live.llm.reset_prefix_cache()
        return out

    def take(self) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted drafts since the last call."""
        taken, self.drafted, self.accepted = (self.drafted, self.accepted), 0, 0
        return taken


@contextmanager
def drafting(kvpipe: dict[str, Any] | None, **options: Any) -> Iterator[Drafting]:
    """Yield a hybrid model's engine that drafts. vLLM keeps the state of every boundary at which a step ends."""
    aligned_states.register()
    with engine(RECIPE, kvpipe, prefix_cache_retention_interval=None, **OPTIONS | options) as live:
        yield Drafting(live)


def _unit(live: Engine) -> int:
    geometry = live.connector.geometry
    assert geometry.states
    assert geometry.ahead_tokens == 1
    return int(geometry.unit_tokens)


def test_kernels_are_replaced_when_llvmlite_is_imported() -> None:
    """Numba imports llvmlite for vLLM's drafter. Without a remedy, vLLM's scan of modules fails at llvmlite."""
    importlib.import_module("llvmlite.binding")
    aligned_states.register()


def test_cold_warm_conversation_restart_and_mixed(tmp_path: Path) -> None:
    """Answers and accepted drafts equal those of an engine without a connector.

    Hits have several lengths, and come from memory and from disk.
    """
    with drafting(None) as plain:
        first = plain.one_by_one(PROMPTS, 120)
        counts = [plain.take()]
        turns = [p + answer + prompt(40, 31) for p, answer in zip(PROMPTS, first, strict=True)]
        second = plain.one_by_one(turns, 24)
        counts.append(plain.take())
    assert counts[0][1] > counts[0][0] // 10  # some drafts are right, but not all
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    config: dict[str, Any] = {"chunk_tokens": 192, "tiers": [disk]}
    hits, loaded = [], 0
    with drafting(config) as made:
        unit = _unit(made.live)
        for prompts, answers, count in ((PROMPTS, first, 0), (PROMPTS, first, 0), (turns, second, 1)):
            assert made.one_by_one(prompts, len(answers[0])) == answers
            assert made.take() == counts[count]
            before, loaded = loaded, assert_clean(made.live).get("tokens_loaded", 0)
            hits.append(loaded - before)
    held = [(len(p) - unit) // unit * unit for p in PROMPTS]  # a hit is one block shorter than without drafts
    assert hits[:2] == [0, sum(held)]
    assert hits[2] >= sum(
        (len(p) + 120) // unit * unit - 2 * unit for p in PROMPTS
    )  # the hit ends at the answer's last state, or at the state before that state
    assert hits[2] > sum(held)
    with drafting(config) as made:
        assert made.one_by_one(PROMPTS, 12) == [answer[:12] for answer in first]
        assert assert_clean(made.live)["tokens_loaded"] == sum(held)  # loaded from the disk
        # No prompt has ended at the last boundary of these tokens, so they are computed. From now on, vLLM's own cache
        # holds them.
        made.live.generate([PROMPTS[1][: 2 * unit + 10]], 1)
        before = assert_clean(made.live)["tokens_loaded"]
        assert made.live.generate(PROMPTS[1:], 12) == [first[1][:12]]
        mixed = assert_clean(made.live)["tokens_loaded"] - before
        assert 0 < mixed <= held[1]


def test_hits_within_a_block() -> None:
    """If a hash covers fewer tokens than a block, a hit leaves out the tokens of the prompt's last whole hash.

    The hit ends at the same token as vLLM's own hit.
    """
    aligned_states.register()
    # the processor's kernels decide the block size
    block = planned(make_model(RECIPE), None, OPTIONS).block_tokens
    hashes: dict[str, Any] = {"prefix_match_unit": block // 2}
    with drafting(None, **hashes) as plain:
        first, counts = plain.one_by_one(PROMPTS, 24), plain.take()
    with drafting({"chunk_tokens": 2 * block}, **hashes) as made:
        unit = _unit(made.live)
        held = [len(p) // unit * unit - unit for p in PROMPTS]
        assert unit == block // 2
        assert any(tokens % block for tokens in held)
        for loaded in (0, sum(held)):
            assert made.one_by_one(PROMPTS, 24) == first
            assert made.take() == counts
            assert assert_clean(made.live).get("tokens_loaded", 0) == loaded
        # these tokens are computed, and from now on vLLM's own cache holds them
        made.live.generate([PROMPTS[1][: 2 * block + 10]], 1)
        assert made.live.generate(PROMPTS[1:], 12) == [first[1][:12]]
        assert assert_clean(made.live)["tokens_loaded"] > sum(held)


@pytest.mark.parametrize("kind", [None, "plain"], ids=["own", "plain"])
def test_preempted_and_aborted(kind: Processor | None) -> None:
    """The cache is too small for all requests. Every request ends, some requests hit, and at the end no chunk is held.

    Blocks are longer with AMX or AVX-512, whose kernels need states in float32. So more requests are sent until one is
    preempted.
    """
    options: dict[str, Any] = {"cache_tokens": 2560, "max_model_len": 768}
    with complete(kind), drafting({"chunk_tokens": 192}, **options) as made:
        for round_ in range(ROUNDS_MAX):
            prompts = [prompt(200 + 30 * i, 600 + i) for i in range(5)] * (1 + round_ // 2)
            ids = [made.live.add(tokens, 150) for tokens in prompts]
            gone = made.live.add(prompt(250, 70), 150)
            for _ in range(12):
                made.live.step()
            made.live.abort(gone)
            outputs = made.live.drain()
            assert [len(outputs[one].outputs[0].token_ids) for one in ids] == [150] * len(ids)
            made.live.settle()
            made.live.llm.reset_prefix_cache()
            if round_ and any(made.live.preemptions.values()):
                break
        stats = assert_clean(made.live)
    assert stats["preempted"] > 0
    assert stats["tokens_loaded"] > 0


@pytest.mark.parametrize(
    ("spec", "why"),
    [({**MTP, "disable_eagle_block_drop": True}, "disable_eagle_block_drop.*unset it")],
)
def test_engine_is_refused_if_a_repeated_prompt_finds_no_state(spec: dict[str, Any], why: str) -> None:
    """An engine does not start if a repeated prompt would find no state."""
    with pytest.raises(UnsupportedError, match=why), drafting({"chunk_tokens": 192}, speculative_config=spec):
        pass
