"""kvpipe: saves and loads a request's KV cache for vLLM, layer by layer, through explicit state machines."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvpipe")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
