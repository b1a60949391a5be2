"""Triton's interpreter in place of a GPU, for vLLM's kernels on a CPU."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace


def start() -> None:
    """Make every launch of a kernel a loop in Python, which is slow but computes exactly what the kernel computes.

    Call this before vLLM is imported. VLLM's CPU build accepts Triton only with a CPU backend, so a backend of that
    name is added.
    """
    assert not {"triton", "vllm"} & sys.modules.keys()
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported
    from triton import runtime
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    class Driver:
        """The methods of a Triton driver that are called before a launch."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 32)

        def get_current_device(self) -> int:
            return 0

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    runtime.driver.set_active(Driver())
