"""A connector beside kvpipe, under vLLM's MultiConnector, whose asynchronous loads fail. For tests only.

It promises every second request its whole prompt, once per request, brings nothing, and reports that a few steps later.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

STEPS: Final = 2
"""How many steps a load takes to fail."""
BLOCK: Final = 32


class Begun(KVConnectorMetadata):
    """The requests whose loads begin with a step."""

    def __init__(self, requests: tuple[str, ...]) -> None:
        """Name them."""
        self.requests = requests


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing was promised yet."""
        super().__init__(*args, **kwargs)
        self._failed: set[str] = set()
        self._due: list[str] = []
        self._loading: dict[str, int] = {}

    # ---- scheduler side -------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise all whole blocks, or nothing."""
        tokens = request.num_tokens // BLOCK * BLOCK - num_computed_tokens
        if tokens <= 0 or request.request_id in self._failed or zlib.crc32(request.request_id.encode()) % 2:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:  # noqa: ARG002
        """Begin, when this connector was chosen."""
        if num_external_tokens:
            self._failed.add(request.request_id)
            self._due.append(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: ARG002
        """Pass the loads of the step to the ranks."""
        due, self._due = self._due, []
        return Begun(tuple(due))

    def request_finished_all_groups(
        self,
        request: Request,  # noqa: ARG002
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold nothing."""
        return False, None

    # ---- worker side ----------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's loads, whatever else of the step is left out."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Begun)  # noqa: S101
        self._loading.update(dict.fromkeys(connector_metadata.requests, STEPS))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing is left to do."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report what has failed."""
        for request in self._loading:
            self._loading[request] -= 1
        over = {request for request, steps in self._loading.items() if steps < 0}
        for request in over:
            del self._loading[request]
        return KVConnectorTransferResults(finished_recving=set(over), failed_recving=over)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded in a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
