"""Forks the processes of a node's benchmarks from a process that has imported vLLM: the import takes 10 seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final
from unittest.mock import patch

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "kvpipe.connectors.vllm.tiny.engine", "vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor",
    "kvpipe.connectors.vllm.connector", "vllm.entrypoints.llm", "benchmarks.node_clients", "benchmarks.node_saves",
])  # fmt: skip


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Make an engine in this process fork its ranks, which vLLM's CPU build would spawn."""
    from vllm.utils import system_utils

    made = SimpleNamespace(get_context=lambda _method: multiprocessing.get_context("fork"))
    with patch.object(system_utils, "multiprocessing", made):
        yield
