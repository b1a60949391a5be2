"""The `vllm.general_plugins` entry point: makes ``KVPipeConnector`` known to every vLLM process, early.

Every process of an environment runs it, whatever its connector is: nothing here may break an engine without kvpipe.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

from kvpipe.connectors.vllm.wrapping import wrap
from kvpipe.errors import UnsupportedError
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from vllm.config import VllmConfig

NAME = "KVPipeConnector"
MODULE = "kvpipe.connectors.vllm.connector"
_CHECKS: Final = "_kvpipe_checks"


def register() -> None:
    """Register the connector by name. Called by vLLM in every process, possibly more than once. Never raises."""
    for part in (_make_known, _watch_packing, _check_before_workers, _take_no_embeddings, _keep_the_connector):
        try:
            part()
        except Exception as error:  # noqa: BLE001  (a vLLM that lacks what is wanted; whoever uses kvpipe is refused)
            warn("plugin_part_failed", part=part.__name__, error=repr(error))


def _make_known() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  (slow)

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  (vLLM has no public question for this)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)


def _watch_packing() -> None:
    from kvpipe.connectors.vllm.model import watch_packing  # noqa: PLC0415  (slow)

    watch_packing()


def _check_before_workers() -> None:
    """Refuse an engine when vLLM chooses its executor: before processes are started and the model is loaded."""
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415  (slow)

    choose = Executor.get_class
    if hasattr(choose, _CHECKS):
        return

    @functools.wraps(choose)
    def checked(vllm_config: VllmConfig) -> Any:  # noqa: ANN401  (a class of executors)
        try:
            _check(vllm_config)
        except UnsupportedError:
            raise
        except Exception as error:  # noqa: BLE001  (the connector checks once more)
            warn("not_checked_before_start", error=repr(error))
        return choose(vllm_config)

    setattr(checked, _CHECKS, True)
    Executor.get_class = staticmethod(checked)  # type: ignore[method-assign]


def _take_no_embeddings() -> None:
    """Leave it to the user whether clients may send embeddings instead of images: vLLM switches that on.

    It takes whoever loads KV for an engine that is sent all of it, and lets clients leave out even the embeddings. An
    engine with a cache computes what is not there: what clients send amiss would end it.
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
    """Refuse an option by which vLLM would put a connector of its own in kvpipe's place, and say nothing."""
    from vllm.config import VllmConfig  # noqa: PLC0415  (slow)

    wrap(VllmConfig, "_post_init_kv_transfer_config", _keep)


def _keep(replace: Callable[[VllmConfig], None], config: VllmConfig) -> None:
    transfer, size = config.kv_transfer_config, getattr(config.cache_config, "kv_offloading_size", None)
    if size is not None and transfer is not None and transfer.has_connector(NAME):
        msg = (
            f"kvpipe: kv_offloading_size={size} is not supported (with it vLLM takes a connector of its own, and not "
            "kvpipe); unset it, and set pool_bytes_max"
        )
        raise UnsupportedError(msg)
    replace(config)


def _check(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for an engine with kvpipe that it cannot serve; of others nothing is looked at."""
    uses = getattr(getattr(config, "kv_transfer_config", None), "has_connector", None)
    if uses is None or not uses(NAME) or _being_made(config):
        return
    from kvpipe.connectors.vllm.support import check_engine  # noqa: PLC0415  (slow)

    check_engine(config)


def _being_made(config: VllmConfig) -> bool:
    """Whether the configuration's constructor runs: vLLM asks for the executor in the midst of it, too."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (there is no other way to ask: what is set when differs by setting)
    while frame is not None:
        if frame.f_code.co_name == "__post_init__" and frame.f_locals.get("self") is config:
            return True
        frame = frame.f_back
    return False
