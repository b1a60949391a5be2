"""A connector that imitates other connectors. Trials place it beside kvpipe in vLLM's MultiConnector. For tests only.

The key `does` of the sibling's configuration lists the sibling's actions (`DEEDS`). The sibling never loads anything:
each of its loads fails a few steps later.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvpipe.connectors.vllm.hints import REMOTE_PREFILL, is_prefilled_elsewhere

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

FAILS, SHAKES, WAITS, KEEPS, RETURNS, PREFILLS = "fails", "shakes", "waits", "keeps", "returns", "prefills"
DEEDS: Final = {
    FAILS: "promises its whole prompt to every second request, once per request; the load fails",
    SHAKES: "makes vLLM's handshake, and raises for a handshake that is not its own, as NIXL does",
    WAITS: "answers the first lookups of every third request with *later*",
    KEEPS: "delays the release of the blocks of every second request",
    RETURNS: "returns `kv_transfer_params` under NIXL's keys",
    PREFILLS: "marks every third request with `do_remote_prefill`, as a proxy does, and promises its whole prompt",
}
STEPS: Final = 2
"""The number of steps until a load fails, a lookup is answered, or kept blocks are released."""
BLOCK: Final = 32
PARAMETERS: Final = (
    REMOTE_PREFILL, "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
    "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
)  # fmt: skip
"""The keys of the parameters that NixlConnector returns."""


class Hand(KVConnectorHandshakeMetadata):
    """The handshake metadata of one rank."""


class Begun(KVConnectorMetadata):
    """The requests whose loads begin with a step, and the requests whose blocks are kept from this step on."""

    def __init__(self, requests: tuple[str, ...], kept: tuple[str, ...] = ()) -> None:
        """Keep the ids of the requests."""
        self.requests, self.kept = requests, kept


def _one_in(count: int, request: Request) -> bool:
    return not zlib.crc32(request.request_id.encode()) % count


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side and the worker side of the connector."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Start without promises."""
        super().__init__(vllm_config, role, kv_cache_config, **kwargs)
        does: str = vllm_config.kv_transfer_config.kv_connector_extra_config.get("does", FAILS)
        self._does = frozenset(does.split())
        self._ranks: int = vllm_config.parallel_config.world_size
        self._failed: set[str] = set()
        self._due: list[str] = []
        self._kept: list[str] = []
        self._asked: dict[str, int] = {}  # for each request, the step in which vLLM asked for it first
        self._step = 0
        self._loading: dict[str, int] = {}
        self._sending: dict[str, int] = {}

    # ---- scheduler side -------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        """Check the ranks' handshakes.

        Raises:
            ValueError: a handshake is missing, or belongs to another connector.
        """
        if SHAKES in self._does and [type(one) for one in metadata.values()] != [Hand] * self._ranks:
            raise ValueError(f"expected the handshakes of {self._ranks} ranks, not {metadata}")

    def on_new_request(self, request: Request) -> None:
        """Mark a request that a proxy would have sent to a prefill engine first."""
        if PREFILLS in self._does and _one_in(3, request):
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), REMOTE_PREFILL: True}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Promise all whole blocks, promise nothing, or ask vLLM to repeat the lookup later."""
        if WAITS in self._does and _one_in(3, request):
            first = self._asked.setdefault(request.request_id, self._step)
            if self._step - first < STEPS:
                return None, False
        tokens = request.num_tokens // BLOCK * BLOCK - num_computed_tokens
        wanted = FAILS in self._does and _one_in(2, request) and request.request_id not in self._failed
        if tokens > 0 and (wanted or is_prefilled_elsewhere(request)):
            return tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:  # noqa: ARG002
        """Begin a load if this connector was chosen for the request."""
        if is_prefilled_elsewhere(request):
            request.kv_transfer_params[REMOTE_PREFILL] = False  # type: ignore[index]  # as NIXL does
        if num_external_tokens:
            self._failed.add(request.request_id)
            self._due.append(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: ARG002
        """Return the requests whose loads begin with this step, and those whose blocks are kept from this step on."""
        due, kept = self._due, self._kept
        self._due, self._kept, self._step = [], [], self._step + 1
        return Begun(tuple(due), tuple(kept))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of some requests that were answered. Do nothing for other requests."""
        self._asked.pop(request.request_id, None)
        answered = request.status in {RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED}
        keeps = KEEPS in self._does and answered and _one_in(2, request)
        if keeps:
            self._kept.append(request.request_id)
        return keeps, dict.fromkeys(PARAMETERS, 0) if RETURNS in self._does else None

    # ---- worker side ----------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's handshake if the connector has one."""
        return Hand() if SHAKES in self._does else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's loads, even if the step's other hooks are left out."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Begun)  # noqa: S101
        self._loading.update(dict.fromkeys(connector_metadata.requests, STEPS))
        self._sending.update(dict.fromkeys(connector_metadata.kept, STEPS))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing, because `bind_connector_metadata` has begun the loads."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report the loads that have failed, and the requests whose blocks were kept long enough."""
        failed, sent = _over(self._loading), _over(self._sending)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=set(failed), failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because no load runs within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing, because this connector saves nothing."""

    def wait_for_save(self) -> None:
        """Do nothing, because this connector saves nothing."""


def _over(steps_left: dict[str, int]) -> set[str]:
    """Decrease each number of steps by one. Remove and return the requests whose steps are over."""
    for request in steps_left:
        steps_left[request] -= 1
    over = {request for request, steps in steps_left.items() if steps < 0}
    for request in over:
        del steps_left[request]
    return over
