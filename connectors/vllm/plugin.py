"""The `vllm.general_plugins` entry point: makes ``KVPipeConnector`` known to every vLLM process, early."""

from __future__ import annotations

NAME = "KVPipeConnector"
MODULE = "kvpipe.connectors.vllm.connector"


def register() -> None:
    """Register the connector by name. Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  (slow)

    from kvpipe.connectors.vllm.model import watch_packing  # noqa: PLC0415  (slow)

    watch_packing()
    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  (vLLM has no public question for this)
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
