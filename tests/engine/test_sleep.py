"""vLLM's sleep mode on a real engine: its scheduler, core and executor, with a simulated device.

A CPU worker of vLLM keeps its memory, so this test's worker discards the memory like vLLM's `cumem` allocator. While
the engine sleeps, the weights have a meaningless value. After the wake-up the KV caches have that value, and other
addresses.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.gpu.simulated import Immediate
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from tests.engine.common import BLOCK, assert_clean, patient, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPT = [prompt(300, 1)]
FOUND = whole_blocks(BLOCK, 300)
TOKENS = 12
NONSENSE = 7.25
"""The value that memory has after it was discarded.

With NaN instead of a number, even masked positions would spoil vLLM's results, because 0 times NaN is NaN.
"""


class _Memory:
    """The memory of a worker, which is discarded and restored."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gone: list[torch.UntypedStorage] = []  # the former memory of the caches

    @torch.inference_mode()
    def sleep(self, worker: Any, level: int = 1) -> None:
        weights = list(worker.model_runner.model.parameters())
        self.kept = [(weight, weight.detach().clone()) for weight in weights] if level == 1 else []
        for weight in weights:
            weight.data.fill_(NONSENSE)
        self.discard(worker, ("kv_cache",))

    @torch.inference_mode()
    def discard(self, worker: Any, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",)
        for cache in worker.model_runner.kv_caches:
            cache.fill_(NONSENSE)
        self.gone.append(worker.model_runner.kv_caches[0].untyped_storage())

    @torch.inference_mode()
    def wake_up(self, worker: Any, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            for weight, kept in self.kept:
                weight.data.copy_(kept)
        if tags is None or "kv_cache" in tags:
            first = worker.model_runner.kv_caches[0]
            there = torch.full((first.untyped_storage().nbytes() // first.element_size(),), NONSENSE, dtype=first.dtype)
            for cache in worker.model_runner.kv_caches:
                cache.set_(there.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride())

    def assert_untouched(self) -> None:
        """Check that nothing was written to memory while it was unmapped."""
        for storage in self.gone:
            assert torch.tensor([], dtype=torch.float32).set_(storage).eq(NONSENSE).all()


@pytest.fixture(scope="module")
def memory() -> Iterator[_Memory]:
    """Make workers of this process lose their memory when they sleep."""
    memory = _Memory()
    with pytest.MonkeyPatch.context() as patches:
        for name in ("sleep", "discard", "wake_up"):
            call = getattr(memory, name)
            patches.setattr(CPUWorker, name, lambda worker, *args, _call=call, **named: _call(worker, *args, **named))
        yield memory


@pytest.fixture(scope="module")
def live(memory: _Memory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:  # noqa: ARG001  (patches)
    """Yield an engine whose caches a simulated device copies, with a disk tier."""
    folder, device = tmp_path_factory.mktemp("tier"), Immediate()
    disk = {"kind": "disk", "path": str(folder / "kv"), "bytes_max": "1GiB"}
    config = {"chunk_tokens": 64, "state_dir": str(folder / "state"), "tiers": [disk]}
    with pytest.MonkeyPatch.context() as patches:
        made = lambda _: CudaEngine(device, mover=Mover.DIRECT, calibrate_s_max=0)  # noqa: E731
        patches.setattr(KVPipeConnector, "make_engine", made)
        live = Engine(str(make_model("llama")), kvpipe=patient(config), enable_prefix_caching=False)
        try:
            yield live
        finally:
            live.close()


def _ask(live: Engine, prompts: list[list[int]] = PROMPT) -> tuple[list[list[int]], int]:
    """Return the engine's answer, and the number of prompt tokens that kvpipe had."""
    side = live.connector.scheduler
    assert side is not None
    before = sum(side.tracer.hit_tokens.values())
    answer = live.generate(prompts, TOKENS)
    assert_clean(live)
    return answer, sum(side.tracer.hit_tokens.values()) - before


def _reload(live: Engine, model: Path) -> None:
    live.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def test_chunks_outlive_a_sleep(tmp_path: Path, live: Engine, memory: _Memory) -> None:
    """Chunks survive every level of sleep. Hits are right, and only an engine with the same weights has hits."""
    other = shutil.copytree(make_model("llama"), tmp_path / "other")
    file = other / "model.safetensors"
    save_file({name: tensor * 1.3 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    old, found = _ask(live)
    assert found == 0
    live.llm.sleep(level=1)  # the engine sleeps at once, before the saves of the last steps are reported
    assert not live.scheduler.has_requests(), "a sleeping engine makes no steps"
    live.llm.wake_up()
    assert _ask(live) == (old, FOUND)

    live.llm.sleep(level=0)
    live.llm.release_kv_cache_memory()
    live.llm.wake_up(tags=["kv_cache"])
    assert _ask(live) == (old, FOUND)

    answers = []
    for model in (other, make_model("llama")):
        live.settle()
        live.llm.sleep(level=2)
        live.llm.wake_up(tags=["weights"])
        _reload(live, model)
        live.llm.wake_up(tags=["kv_cache"])
        answers += [_ask(live), _ask(live)]
    new = answers[0][0]
    assert new != old
    in_tier = old, FOUND
    assert answers == [(new, 0), (new, FOUND), in_tier, (old, FOUND)]

    stats = live.connector.stats()
    assert stats["reset_kept"] >= len(memory.gone) >= 4
    assert live.llm.reset_prefix_cache(reset_connector=True)
    assert _ask(live) == (old, 0), "a reset that a user requests must forget all chunks"
    memory.assert_untouched()


def test_a_request_that_is_kept_over_a_sleep_loads_its_kv(live: Engine, memory: _Memory) -> None:
    """vLLM preempts the request. After the wake-up the request's KV is loaded from the pool, not computed again."""
    answer = live.generate(PROMPT, 60)
    live.settle()
    assert live.llm.reset_prefix_cache(reset_connector=True)
    kept = live.add(PROMPT[0], 60)
    for _ in range(30):
        live.step()
    before = live.connector.stats().get("tokens_loaded", 0)
    live.llm.sleep(level=1, mode="keep")
    live.llm.wake_up()
    assert [list(live.drain()[kept].outputs[0].token_ids)] == answer
    assert live.connector.stats()["tokens_loaded"] - before >= FOUND
    assert_clean(live)
    memory.assert_untouched()
