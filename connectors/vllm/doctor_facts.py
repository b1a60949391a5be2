"""Facts about vLLM and about the connector's registration, for `kvpipe doctor`. Functions import vLLM when called."""

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
"""The group of the entry points that vLLM loads. `plugin.register` is an entry point of this group."""


def version() -> str | None:
    """Return the version of the installed vLLM, or None if vLLM is not installed.

    Raises the errors of vLLM's import.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    importlib.import_module("vllm")
    return installed_version()


def connector_known() -> bool:
    """Whether vLLM's factory finds the class `KVPipeConnector` by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    try:
        return bool(KVConnectorFactory.get_connector_class_by_name(NAME).__name__ == NAME)
    except ValueError:  # the connector is not registered
        return False


def hash_seeds() -> tuple[str, frozenset[str]]:
    """Return (vLLM's default hash algorithm, the algorithms with a random seed).

    A seed is random if two calls return different seeds.
    """
    from vllm.config.cache import CacheConfig, PrefixCachingHashAlgo  # noqa: PLC0415
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed as seed  # noqa: PLC0415

    functions = {name: get_hash_fn_by_name(name) for name in get_args(PrefixCachingHashAlgo)}
    random = frozenset(name for name, function in functions.items() if seed(function) != seed(function))
    return str(CacheConfig.prefix_caching_hash_algo), random


def first_hash(algorithm: str) -> str:
    """Return the algorithm's name and a digest of the seed with which every chain of vLLM's block hashes begins.

    PYTHONHASHSEED sets the seed, also for sha256. Two engines share block hashes only if the variable is equal in both.
    """
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    function = get_hash_fn_by_name(algorithm)
    first = hashlib.sha256(function(resolve_none_hash_seed(function))).hexdigest()
    return f"{algorithm} {first[:32]}"


def device_type() -> str:
    """Return the type of the device on which vLLM computes, as torch names it."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    return str(current_platform.device_type)
