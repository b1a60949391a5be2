"""Kinds of caches that no other test file has: layers that share KV, Mamba 1, and models with kernels in Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine import kda, test_states
from tests.engine.common import assert_clean, engine, preempted, prompt, whole_blocks
from tests.engine.mamba1 import lend_kernels

pytestmark = pytest.mark.engine

SECONDS_MAX = 1500


@pytest.mark.timeout(SECONDS_MAX + 30)
def test_deepseek_v4() -> None:
    """DeepSeek V4 passes its test in a process with Triton's interpreter.

    VLLM's CPU build has this model's kernels for AVX-512 only. On other processors already the engine without kvpipe
    fails.
    """
    command = [sys.executable, "-m", "tests.engine.interpreted", "deepseek-v4"]
    ran = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    output = f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    if torch.cpu._is_avx512_supported():
        assert ran.returncode == 0, output
    else:
        assert "with _engine(family, None, enable_prefix_caching=False) as plain" in ran.stderr, output
        assert "has no attribute 'convert_weight_packed'" in ran.stderr, output


def test_mamba1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite of states passes: cold, warm, in a second turn, beside a local hit, from a disk, and preempted."""
    lend_kernels(monkeypatch)
    test_states.test_hits_and_conversations("jamba", 128, {}, tmp_path)
    test_states.test_preempted_requests("jamba", 128, {})


def test_kimi_delta_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite of states passes with the layers of Kimi Linear and Kimi K3."""
    kda.lend_kernels(monkeypatch)
    test_states.test_hits_and_conversations("qwen3-next-kda", 128, {}, tmp_path)
    test_states.test_preempted_requests("qwen3-next-kda", 128, {})


def test_layers_that_share_kv() -> None:
    """Layers without KV of their own read KV that was loaded for other layers.

    Answers equal the answers with vLLM's own prefix cache.
    """
    first = [prompt(300, 21), prompt(530, 22)]
    turns = [p + prompt(60, 24) for p in first]
    with engine("gemma3n", enable_prefix_caching=True) as plain:
        expected = [[plain.generate([p], 16) for p in prompts] for prompts in (first, first, turns)]
    with engine("gemma3n", {"chunk_tokens": 128}, enable_prefix_caching=False) as live:
        layers = {layer.name for group in live.connector.geometry.groups for layer in group.layers}
        assert len(layers) == 4
        assert [[live.generate([p], 16) for p in prompts] for prompts in (first, first, turns)] == expected
        assert assert_clean(live)["tokens_loaded"] == 2 * whole_blocks(live, 300, 530)
        assert preempted(live, first[0], 16, 8) == expected[0][0][0]
        assert assert_clean(live)["tokens_loaded"] == 2 * whole_blocks(live, 300, 530, 300)
