"""Runs vLLM's own tests in forks of this process, so that many runs import vLLM once.

`python -m attached_forks` reads lines of JSON, `[log, folder, arguments]`. A fork with `folder` on its path runs pytest
with `arguments` and writes to the file `log`. When the fork has ended, this process prints its exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.tiny.engine import models_inspected_here

GARBAGE_OBJECTS_MIN = 100_000
"""The number of new objects between two searches for garbage.

Python's default is 700, and a scheduler has 10,000 blocks.
"""
IMPORTED = (
    "attached", "vllm.multimodal.inputs", "vllm.sampling_params", "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.scheduler", "vllm.v1.structured_output", "kvpipe.connectors.vllm.connector",
)  # fmt: skip


def _run(log: str, folder: str, arguments: list[str]) -> None:
    """Run pytest in this fork, and end the fork."""
    with Path(log).open("ab") as file, Path(os.devnull).open("rb") as nothing:
        for standard, other in enumerate((nothing, file, file)):
            os.dup2(other.fileno(), standard)
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        sys.path.append(folder)
        status = int(pytest.main(arguments))
    except BaseException:  # noqa: BLE001  (a fault that was put into kvpipe may raise anything)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """Serve until standard input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a search of the imported modules in a fork would copy their memory
    gc.set_threshold(GARBAGE_OBJECTS_MIN)
    # Without this, a process would import vLLM for each class of models that vLLM has not yet inspected on this
    # machine.
    with models_inspected_here():
        for line in sys.stdin:
            log, folder, arguments = json.loads(line)
            if not (child := os.fork()):
                _run(log, folder, arguments)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
