"""Prepares the process that tests fork, which imports this module last.

The module does once the work that each fork would repeat.

VLLM searches all objects several times when a process starts and ends. Most of these objects are modules, which never
become garbage. After a fork each search also copies their memory. A forked process ends soon, so Python's own searches
suffice.

Without this module, a rank would also search all modules for Triton's kernels. After each message, the rank would spin
for a second, and so slow down ranks that compute. This module does the search once, and keeps forks from spinning.
"""

from __future__ import annotations

import gc
import importlib
from typing import Final

MODULES: Final = (
    "vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor", "kvpipe.connectors.vllm.connector",
    "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.llm", "vllm.v1.core.sched.async_scheduler",
    "vllm.model_executor.layers.quantization.online.base",
)  # fmt: skip
"""Modules that every engine imports, some of them only at its start."""

gc.disable()  # until all imports are done: modules are no garbage, but each collection would search them
for _name in MODULES:
    importlib.import_module(_name)

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from kvpipe.connectors.vllm.tiny.engine import register_kernels_once  # noqa: E402

current_platform.register_triton_kernel_overrides()
register_kernels_once()
SpinCondition.__init__.__defaults__ = (0.0,)

gc.collect()
gc.freeze()
gc.enable()
for _name in ("collect", "freeze", "unfreeze"):
    setattr(gc, _name, lambda *_, **__: 0)
