"""Runs a real vLLM engine in this process, with or without kvpipe. The caller runs each step."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

# The variables are set before vllm is imported: one process, one compute thread, no downloads from a hub.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # for ranks in other processes
    "OMP_NUM_THREADS": "1",  # for a rank in this process
    "NUMBA_NUM_THREADS": "1",  # numba, which vLLM's n-gram drafter uses, sets OpenMP's threads to this number
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
}
for _key, _value in ENVIRONMENT.items():
    os.environ.setdefault(_key, _value)

import torch  # noqa: E402

_set_num_threads = torch.set_num_threads
"""PyTorch's own function. The first engine on a CPU replaces the attribute of torch by a function without effect."""

DEFAULTS: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 200,
    "disable_log_stats": True,
    "seed": 0,
}
"""The default options of an engine."""

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvpipe.connectors.vllm.connector import KVPipeConnector


def register_kernels_once() -> None:
    """Keep vLLM from scanning all modules for kernels a second time, because this scan fails if numba is loaded.

    vLLM imports numba for n-gram drafts.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    if dispatcher._registry:
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)  # type: ignore[method-assign]


_collect, _freeze = gc.collect, gc.freeze
"""Python's own functions. `_own_garbage` replaces the attributes of `gc`."""


@functools.cache
def _freeze_modules(_when: str) -> None:
    """Exclude all objects that exist now, mostly imported modules, from later garbage collections.

    Modules are never freed.

    This function acts only once. A second call would also exclude parts of a later engine that a caller still holds.
    """
    _freeze()
    atexit.register(gc.unfreeze)


@contextmanager
def _own_garbage() -> Iterator[None]:
    """Make vLLM's garbage collections, freezes and unfreezes do nothing, because these calls take long.

    At an engine's end vLLM would traverse the objects of all modules four times. The objects of an engine are not
    frozen, so one quick collection after the end finds all objects of the engine.
    """
    with ExitStack() as stack:
        for name in ("freeze", "unfreeze", "collect"):
            stack.enter_context(patch.object(gc, name, lambda *_, **__: 0))
        yield


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """On a CPU, make vLLM inspect a model's class in this process, because vLLM's subprocess takes seconds.

    vLLM uses a subprocess so that CUDA is not initialized early.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    with ExitStack() as stack:
        if current_platform.is_cpu():
            stack.enter_context(patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()))
        yield


def _free_process() -> None:
    """Free the process-wide objects that an engine has made."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    ensure_kv_transfer_shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()
    _collect()
    _freeze_modules("after the first engine")  # a first engine imports many modules


class Engine:
    """Runs `vllm.LLM` one step at a time."""

    def __init__(
        self,
        model: str,
        *,
        kvpipe: dict[str, Any] | None = None,
        role: str = "kv_both",
        policy: str = "recompute",
        connector: str = "KVPipeConnector",
        module: str | None = None,
        **options: Any,
    ) -> None:
        """Make the engine. `kvpipe` is the connector's extra config, or None for an engine without a connector.

        `options` are passed to `vllm.LLM`.
        """
        from vllm import LLM

        transfer: dict[str, Any] | None = None
        if kvpipe is not None:
            transfer = {
                "kv_connector": connector,
                "kv_role": role,
                "kv_connector_extra_config": {"pool_bytes_max": "256MiB"} | kvpipe,
                "kv_load_failure_policy": policy,
            }
            if module is not None:
                transfer["kv_connector_module_path"] = module
        register_kernels_once()
        if torch.get_num_threads() > 1:  # torch was imported before ENVIRONMENT was set
            _set_num_threads(1)
        _freeze_modules("before the first engine")
        try:
            with _own_garbage(), models_inspected_here(), patch.object(torch, "set_num_threads", _set_num_threads):
                self.llm: LLM = LLM(model=model, kv_transfer_config=transfer, **DEFAULTS | options)
        except BaseException:
            with _own_garbage():
                _free_process()  # so that the next engine does not use this engine's connector
            raise
        self._ids = 0
        self.preemptions: dict[str, int] = {}

    # ---- parts ----------------------------------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        """The engine core of vLLM."""
        return self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of vLLM."""
        scheduler: Scheduler = self.core.scheduler
        return scheduler

    @property
    def connector(self) -> KVPipeConnector:
        """The connector with the scheduler's role."""
        connector: KVPipeConnector = self.scheduler.connector  # type: ignore[assignment]
        return connector

    @property
    def local_worker(self) -> bool:
        """Whether the only rank runs in this process."""
        return self.core.vllm_config.parallel_config.world_size == 1

    @property
    def worker_connector(self) -> KVPipeConnector:
        """The connector with the worker's role in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: KVPipeConnector = get_kv_transfer_group()  # type: ignore[assignment]
        return group

    # ---- running --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        lora: Any = None,
        params: Any = None,
        media: dict[str, Any] | None = None,
        names: dict[str, list[str]] | None = None,
    ) -> str:
        """Add a request and return its id. Sampling is greedy unless `params` are given.

        `media` has images and other media. `names` has the media's names, by which the engine identifies the media
        instead of by a hash.
        """
        from vllm import SamplingParams

        if request_id is None:
            request_id = f"r{self._ids}"
            self._ids += 1
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            tokens["cache_salt"] = salt
        if media is not None:
            tokens["multi_modal_data"] = media
        if names is not None:
            tokens["multi_modal_uuids"] = names
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(request_id, tokens, params, lora_request=lora)  # type: ignore[arg-type]
        return request_id

    def step(self) -> list[Any]:
        """Run one engine step and return its finished outputs."""
        for request in self.scheduler.requests.values():
            self.preemptions[request.request_id] = request.num_preemptions
        outputs = [o for o in self.llm.llm_engine.step() if o.finished]
        if self.busy and not self.scheduler.running:  # sleep as vLLM's own loop does, so that other threads run
            time.sleep(0.001)
        return outputs

    @property
    def busy(self) -> bool:
        """Whether the engine has unfinished requests."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def drain(self, seconds_max: float = 300.0) -> dict[str, Any]:
        """Run steps until every request is finished. Returns the outputs by request id."""
        outputs, limit = {}, time.monotonic() + seconds_max
        while self.busy:
            for output in self.step():
                outputs[output.request_id] = output
            if time.monotonic() > limit:
                message = f"requests do not finish within {seconds_max} s"
                raise TimeoutError(message)
        return outputs

    def settle(self, seconds_max: float = 300.0) -> None:
        """Run steps until no job of the connector is in flight, as a serving engine's idle loop does."""
        limit = time.monotonic() + seconds_max
        while time.monotonic() < limit:
            if not (self.scheduler.has_requests() or self.connector.has_pending_push_work()):
                return
            self.core.step()
            time.sleep(0.001)
        message = f"jobs are still in flight after {seconds_max} s"
        raise TimeoutError(message)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **kwargs: Any) -> list[list[int]]:
        """Run `prompts` together and return their output tokens."""
        ids = [self.add(p, max_tokens, **kwargs) for p in prompts]
        outputs = self.drain()
        return [list(outputs[i].outputs[0].token_ids) if i in outputs else [] for i in ids]

    def abort(self, request_id: str) -> None:
        """Abort the request with this id."""
        self.llm.llm_engine.abort_request([request_id])

    def close(self) -> None:
        """Shut the engine down and free its process-wide state, so that another engine can be made."""
        with _own_garbage():
            self.core.shutdown()
            del self.llm
            _free_process()
