"""An engine for the GPU scenarios. It exposes answers with margins, the KV cache, and kvpipe's counters and pool."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.worker.side import WorkerSide

MODULE: Final = "kvpipe.connectors.vllm.connector"  # given to vLLM, so that kvpipe need not be installed
CHOICES: Final = 2  # log-probabilities per token: the answer's token and the next best token
PIN_S_MAX: Final = 60.0
NOISY: Final = ("vllm.renderers.base", "vllm.v1.worker.cpu_worker")  # modules whose warnings are about unused features
GAUGES: Final = ("leases", "pieces_writing", "jobs_in_flight", "requests")


class Setup(NamedTuple):
    """Settings that all engines of a run have in common."""

    cuda: bool
    block: int
    options: dict[str, Any]  # options of `vllm.LLM`


class Answer(NamedTuple):
    """Greedy tokens. `margins` has each token's log-probability minus the next best token's log-probability."""

    tokens: list[int]
    margins: list[float]


class Live(Engine):
    """One engine in this process. If its start fails, its memory and vLLM's global state are freed."""

    def __init__(self, setup: Setup, model: str, kvpipe: dict[str, Any] | None = None, **options: Any) -> None:
        """`kvpipe` is the extra config, or None for an engine without a connector."""
        quiet = None if kvpipe is None else {"log_level": "warning"} | kvpipe
        module = None if kvpipe is None else MODULE
        settings = {"block_size": setup.block, "use_tqdm_on_load": False} | setup.options | options
        self._cuda = setup.cuda
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            super().__init__(model, kvpipe=quiet, module=module, **settings)
        except BaseException:
            _clean_up(cuda=setup.cuda)
            raise

    # ---- running --------------------------------------------------------------------------------------------------

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """Run `prompts` together, and return their answers."""
        ids = [self.put(prompt, max_tokens) for prompt in prompts]
        outputs = self.drain()
        return [answer_of(outputs[i]) for i in ids]

    def put(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Add a greedy request that reports its margins, and return its id."""
        from vllm import SamplingParams

        request_id = f"m{self._ids}"
        self._ids += 1
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=CHOICES
        )
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        return request_id

    def settle(self, seconds_max: float = 300.0) -> None:
        """Step until no request, job or scheduled step is left. Raises TimeoutError after `seconds_max`."""
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit:
            ahead = bool(getattr(self.core, "batch_queue", None))
            pending = self.scheduler.connector is not None and self.connector.has_pending_push_work()
            if not (ahead or pending or self.scheduler.has_requests()):
                return
            self.core.step_fn()
            time.sleep(0.001)
        message = f"jobs are still in flight after {seconds_max} s"
        raise TimeoutError(message)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache. kvpipe's pool is not changed.

        After such a call the weights may have changed, so kvpipe's next step digests the weights. A short request runs
        now, so that no measurement includes the digest's time.
        """
        self.settle()
        if self.llm.reset_prefix_cache() is False:
            message = "vLLM refused to reset its prefix cache: blocks are still in use"
            raise RuntimeError(message)
        self.generate([[0]], 1)
        self.settle()

    def close(self) -> None:
        """Shut the engine down, and free the device's memory."""
        try:
            super().close()
        finally:
            _clean_up(cuda=self._cuda)

    # ---- inspection -----------------------------------------------------------------------------------------------

    @property
    def runner(self) -> Any:
        """The runner of the model, made by vLLM."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def graphs(self) -> str:
        """The CUDA graph mode that vLLM has chosen."""
        return str(self.core.vllm_config.compilation_config.cudagraph_mode.name)

    @property
    def side(self) -> WorkerSide:
        """The connector's worker side."""
        side = self.worker_connector.worker
        assert isinstance(side, WorkerSide)
        return side

    @property
    def pool(self) -> HostPool:
        """The connector's host memory."""
        return self.side.pipeline._engine._pool  # type: ignore[attr-defined,no-any-return]

    def count(self, name: str) -> int:
        """Return the counter `name` of the scheduler side."""
        return int(self.connector.stats().get(name, 0))

    def pages(self) -> list[torch.Tensor]:
        """Return each layer's whole KV cache as a tensor (blocks, page bytes) that shares the cache's memory."""
        blocks = self.core.vllm_config.cache_config.num_gpu_blocks
        return [view_pages(str(i), cache, blocks).tensor for i, cache in enumerate(self.runner.kv_caches)]

    def prefix_of(self, request_id: str, tokens: int) -> list[torch.Tensor]:
        """Return a copy of a request's first blocks for each layer. The request's prompt must have been computed."""
        (internal,) = [r for r in self.scheduler.requests if r.startswith(request_id)]
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(internal)
        if self._cuda:
            torch.cuda.synchronize()
        index = torch.tensor(table[: tokens // self.connector.geometry.unit_tokens])
        return [pages[index.to(pages.device)].cpu() for pages in self.pages()]

    def wait_for_pinning(self) -> None:
        """Wait until the whole pool is pinned, because copies to and from unpinned memory are slower."""
        limit = time.monotonic() + PIN_S_MAX
        while any(thread.name == "kvpipe-ready" for thread in threading.enumerate()):
            if time.monotonic() > limit:
                message = f"the pool is not pinned after {PIN_S_MAX:.0f} s"
                raise TimeoutError(message)
            time.sleep(0.05)

    def check_clean(self) -> dict[str, int]:
        """Return kvpipe's counters. Raises AssertionError if a fault was counted, or anything is left."""
        self.settle()
        scheduler = self.connector.scheduler
        pipeline = self.side.pipeline
        assert scheduler is not None
        assert pipeline is not None
        check_integrity(scheduler.catalog)
        stats = self.connector.stats()
        faults = {"scheduler": dict(scheduler.counters.faults), "worker": dict(self.side.counters.faults)}
        assert not any(faults.values()), faults
        assert pipeline.in_flight == 0, pipeline.in_flight
        left = {gauge: stats[gauge] for gauge in GAUGES if stats[gauge]}
        assert not left, left
        return stats


@contextlib.contextmanager
def without_connector(live: Live) -> Iterator[None]:
    """Remove the connector from scheduler and worker for a while, as if the engine had been started without one."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    live.settle()
    scheduler, runner = live.scheduler, live.runner
    kept, group = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
    held = getattr(runner, "kv_connector", None)  # model runner V2 has a reference of its own
    scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
    if held is not None:
        from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

        runner.kv_connector = NO_OP_KV_CONNECTOR
    try:
        yield
        live.settle()
    finally:
        scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = kept, group
        if held is not None:
            runner.kv_connector = held


def answer_of(output: Any) -> Answer:
    """Return the tokens and margins of a finished request."""
    (done,) = output.outputs
    margins = []
    for choices in done.logprobs or ():
        best = sorted((choice.logprob for choice in choices.values()), reverse=True)
        margins.append(best[0] - best[1])
    return Answer(list(done.token_ids), margins)


def _clean_up(*, cuda: bool) -> None:
    """Free vLLM's process-wide state and the device's memory, even after a failed start of the engine."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    for call in (ensure_kv_transfer_shutdown, destroy_model_parallel, destroy_distributed_environment):
        with contextlib.suppress(Exception):
            call()
    if cuda:
        gc.unfreeze()  # vLLM froze its objects at start-up, so its tensors would not be freed
        gc.collect()
        torch.cuda.empty_cache()
