"""The last import of the process that tests fork. The module does once the work that each fork would repeat.

VLLM searches all objects several times when a process starts and ends. Most of these objects are modules, which never
become garbage. After a fork each search also copies their memory. A forked process ends soon, so Python's own searches
suffice.

A rank would also search all modules for Triton's kernels. After each message it would spin for a second beside ranks
that compute. Here the search is done once, and no fork spins.
"""

from __future__ import annotations

import gc

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

from kvpipe.connectors.vllm.tiny.engine import register_kernels_once

current_platform.register_triton_kernel_overrides()
register_kernels_once()
SpinCondition.__init__.__defaults__ = (0.0,)

gc.collect()
gc.freeze()
for _name in ("collect", "freeze", "unfreeze"):
    setattr(gc, _name, lambda *_, **__: 0)
