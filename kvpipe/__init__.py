"""kvpipe: saves and loads a request's KV cache for vLLM, layer by layer, through explicit state machines."""

from __future__ import annotations

from functools import cache

__version__: str
__all__ = ["__version__"]


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  (slow: a node's holder does without)

    try:
        return version("kvpipe")
    except PackageNotFoundError:  # kvpipe runs from a source tree and is not installed
        return "0.0.0"


def __getattr__(name: str) -> str:
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
