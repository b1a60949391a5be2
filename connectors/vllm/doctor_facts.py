"""What `kvpipe doctor` asks of vLLM, and of the connector's place in it. vLLM is imported by what asks it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from typing import Final, get_args

from kvpipe.connectors.vllm.compat import SUPPORTED, check_version, installed_version
from kvpipe.connectors.vllm.plugin import MODULE, NAME

__all__ = [
    "GROUP",
    "MODULE",
    "NAME",
    "SUPPORTED",
    "check_version",
    "connector_known",
    "device_type",
    "first_hash",
    "hash_seeds",
    "version",
]

GROUP: Final = "vllm.general_plugins"
"""The entry points that vLLM loads; one of them is `plugin.register`."""


def version() -> str | None:
    """Return the version of the vLLM in use, or None where there is none. Raises what its import raises."""
    if importlib.util.find_spec("vllm") is None:
        return None
    importlib.import_module("vllm")
    return installed_version()


def connector_known() -> bool:
    """Whether vLLM's factory finds the connector's class by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    try:
        return bool(KVConnectorFactory.get_connector_class_by_name(NAME).__name__ == NAME)
    except ValueError:  # not registered
        return False


def hash_seeds() -> tuple[str, frozenset[str]]:
    """Return vLLM's default prefix hash, and those that it seeds at random: asked twice, their seeds differ."""
    from vllm.config.cache import CacheConfig, PrefixCachingHashAlgo  # noqa: PLC0415
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed as seed  # noqa: PLC0415

    functions = {name: get_hash_fn_by_name(name) for name in get_args(PrefixCachingHashAlgo)}
    random = frozenset(name for name, function in functions.items() if seed(function) != seed(function))
    return str(CacheConfig.prefix_caching_hash_algo), random


def first_hash(algorithm: str) -> str:
    """Return the algorithm's name, and a digest of what every chain of vLLM's block hashes begins with.

    PYTHONHASHSEED seeds it, for sha256 too: engines with another value, or with none, share no hash.
    """
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    function = get_hash_fn_by_name(algorithm)
    first = hashlib.sha256(function(resolve_none_hash_seed(function))).hexdigest()
    return f"{algorithm} {first[:32]}"


def device_type() -> str:
    """Return what vLLM computes on, as torch names it."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    return str(current_platform.device_type)
