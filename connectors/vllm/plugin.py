"""The `vllm.general_plugins` entry point, which registers ``KVPipeConnector`` early in every vLLM process.

vLLM runs this plugin in every process of the environment, even for engines with other connectors. So no exception of
the plugin may break an engine without kvpipe.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.errors import ConfigError, UsageError
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from vllm.config import KVTransferConfig, VllmConfig

NAME = "KVPipeConnector"
MODULE = "kvpipe.connectors.vllm.connector"
_SNAPSHOTS: Final = "vllm.snapshot.server"
"""The module of the program that `vllm snapshot create` starts, and of whose process vLLM takes the snapshot."""
_CHECKS: Final = "_kvpipe_checks"
_EXTRA: Final = "kv_connector_extra_config"
_GIB: Final = 1 << 30
_GIB_END: Final = 1 << 33
"""The first size in GiB that is too large, because 2**33 GiB are 2**63 bytes."""


def register() -> None:
    """Register the connector by name. vLLM calls this in every process, possibly more than once. Never raises."""
    for part in (_make_known, _watch_packing, _check_before_workers, _take_no_embeddings, _keep_the_connector):
        try:
            part()
        except Exception as error:  # noqa: BLE001  (this vLLM lacks a function; an engine with kvpipe is refused later)
            warn("plugin_part_failed", part=part.__name__, error=repr(error))


def _make_known() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  (slow)

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  (vLLM has no public function for this)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)


def _watch_packing() -> None:
    from kvpipe.connectors.vllm.identity.model import watch_packing  # noqa: PLC0415  (slow)

    watch_packing()


def _check_before_workers() -> None:
    """Refuse an engine when vLLM chooses its executor, before vLLM starts processes and loads the model."""
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415  (slow)

    choose = Executor.get_class
    if hasattr(choose, _CHECKS):
        return

    @functools.wraps(choose)
    def checked(vllm_config: VllmConfig) -> Any:  # noqa: ANN401  (a class of executors)
        try:
            _check(vllm_config)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  (the connector checks again)
            warn("not_checked_before_start", error=repr(error))
        return choose(vllm_config)

    setattr(checked, _CHECKS, True)
    Executor.get_class = staticmethod(checked)  # type: ignore[method-assign]


def _take_no_embeddings() -> None:
    """Make vLLM refuse embeddings that clients send instead of images, unless the user has enabled such embeddings.

    vLLM assumes that an engine which loads KV gets all KV from another engine. So vLLM lets clients send embeddings, or
    even leave them out. But an engine with a cache computes the KV that it does not find, and a missing or wrong input
    crashes the engine.
    """
    from vllm.config import VllmConfig  # noqa: PLC0415  (slow)

    wrap(VllmConfig, "_resolve_mm_embedding_inputs", _resolve)


def _resolve(resolve: Callable[[VllmConfig], None], config: VllmConfig) -> None:
    transfer, encoder = config.kv_transfer_config, config.ec_transfer_config
    media = getattr(config.model_config, "multimodal_config", None)
    if media is None or transfer is None or transfer.kv_connector != NAME or encoder is not None:
        resolve(config)
    else:
        media.allow_missing_mm_embeddings = False


def _keep_the_connector() -> None:
    """Make `--kv-offloading-size` set kvpipe's pool size. vLLM itself would replace kvpipe by its own connector."""
    from vllm.config import VllmConfig  # noqa: PLC0415  (slow)

    wrap(VllmConfig, "_post_init_kv_transfer_config", _keep)


def _keep(replace: Callable[[VllmConfig], None], config: VllmConfig) -> None:
    transfer, cache = config.kv_transfer_config, config.cache_config
    gib = getattr(cache, "kv_offloading_size", None)
    if gib is None or transfer is None or not transfer.has_connector(NAME):
        replace(config)
        return
    if cache.kv_offloading_backend != "native":
        raise ConfigError(
            f"kvpipe: kv_offloading_backend={cache.kv_offloading_backend!r} cannot be used with the connector "
            f"{NAME}; leave it out"
        )
    if not 0 < gib < _GIB_END:
        raise ConfigError(f"kvpipe: kv_offloading_size={gib} is not valid; give GiB of host memory, more than 0")
    ranks = config.parallel_config.world_size
    with_pool = functools.partial(_with_pool, pool_bytes=int(gib * _GIB) // ranks, given=f"{gib} GiB, {ranks} ranks")
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == NAME:
        transfer.kv_connector_extra_config = with_pool(extra)
        return
    transfer.kv_connector_extra_config = extra | {
        "connectors": [
            child | {_EXTRA: with_pool(child.get(_EXTRA) or {})} if child.get("kv_connector") == NAME else child
            for child in extra["connectors"]
        ]
    }


def _extra_of(transfer: KVTransferConfig) -> dict[str, Any]:
    """Return kvpipe's configuration keys, also if kvpipe is a child of `MultiConnector`."""
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    if transfer.kv_connector == NAME:
        return extra
    return next(child.get(_EXTRA) or {} for child in extra["connectors"] if child.get("kv_connector") == NAME)


def _with_pool(extra: dict[str, Any], *, pool_bytes: int, given: str) -> dict[str, Any]:
    """Return kvpipe's keys with this `pool_bytes_max`. Raises `ConfigError` if the keys have another pool size."""
    from kvpipe.config.settings import load_settings  # noqa: PLC0415  (seldom needed)

    if "pool_bytes_max" in extra and (other := load_settings(extra).pool_bytes_max) != pool_bytes:
        raise ConfigError(
            f"kvpipe: pool_bytes_max={other.human_readable()} contradicts kv_offloading_size ({given}); "
            "set only one of them"
        )
    return extra | {"pool_bytes_max": pool_bytes}


def _warn_of_failed_loads(transfer: KVTransferConfig) -> None:
    """Warn if vLLM ends requests whose load fails. This is vLLM's default, so the user may not have chosen it."""
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
        warn(
            "failed_loads_end_requests",
            kv_load_failure_policy="fail",
            remedy='add "kv_load_failure_policy":"recompute" to --kv-transfer-config',
        )


def _check(config: VllmConfig) -> None:
    """Raise `UsageError` for an engine that kvpipe cannot serve. Engines without kvpipe are not checked."""
    transfer: Any = getattr(config, "kv_transfer_config", None)
    uses = getattr(transfer, "has_connector", None)
    if uses is None or not uses(NAME) or _being_made(config):
        return
    from kvpipe.config.settings import check_stores, load_settings  # noqa: PLC0415  (slow)
    from kvpipe.connectors.vllm.support import check_engine  # noqa: PLC0415  (slow)
    from kvpipe.manage.preflight import check_settings  # noqa: PLC0415  (slow)

    _refuse_snapshots()
    check_engine(config)
    _warn_of_failed_loads(transfer)
    settings = load_settings(_extra_of(transfer))
    check_stores(settings, loads=transfer.is_kv_consumer)
    if config.parallel_config.data_parallel_size == 1:  # a data-parallel rank may have its scheduler on another machine
        check_settings(settings)


def _refuse_snapshots() -> None:
    """Raise `UnsupportedError` if vLLM will snapshot this process, because the snapshot would contain kvpipe's pool."""
    program = getattr(sys.modules.get("__main__"), "__spec__", None)
    if program is not None and program.name == _SNAPSHOTS:
        from kvpipe.connectors.vllm.identity.models import refuse  # noqa: PLC0415  (slow)

        refuse(f"{NAME} in a process of `vllm snapshot create`", "create the snapshot without --kv-transfer-config")


def _being_made(config: VllmConfig) -> bool:
    """Whether the constructor of `config` is running, because vLLM also chooses an executor inside the constructor."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (only the call stack shows that the constructor runs)
    while frame is not None:
        if frame.f_code.co_name == "__post_init__" and frame.f_locals.get("self") is config:
            return True
        frame = frame.f_back
    return False
