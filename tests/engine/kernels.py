"""Replaces vLLM's Triton kernels, in a process that may have imported any module before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings


def _is_scannable(module: ModuleType) -> bool:
    """Return whether the `__dict__` of each attribute is a mapping.

    In llvmlite, which numba imports, the `__dict__` of one attribute is a function.
    """
    attributes = list(getattr(module, "__dict__", {}).values())
    return all(isinstance(one.__dict__, Mapping) for one in attributes if hasattr(one, "__dict__"))


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Register kernels by vLLM's names.

    An engine registers the platform's kernels only if no kernels are registered yet. So these kernels are registered
    after the platform's kernels.

    After the registration vLLM scans every imported module for the old kernels, and fails at unusual attributes. So
    modules with such attributes are left out of the scan. The scan also reads deprecated attributes, whose warnings are
    ignored.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_where_possible(overrides: Any) -> None:
        modules = {name: module for name, module in list(sys.modules.items()) if _is_scannable(module)}
        with patch.object(dispatcher, "sys", SimpleNamespace(modules=modules)):
            rebind(overrides)

    with catch_warnings(action="ignore"), patch.object(dispatcher, "_rebind_kernels", rebind_where_possible):
        if not dispatcher._registry:
            current_platform.register_triton_kernel_overrides()
        dispatcher.register_kernels(kernels)
