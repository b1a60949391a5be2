"""kvpipe: saves and loads a request's KV cache for vLLM, layer by layer, through explicit state machines."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvpipe")
except PackageNotFoundError:  # kvpipe runs from a source tree and is not installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
