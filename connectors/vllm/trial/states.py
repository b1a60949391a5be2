"""Recurrent states as vLLM's runners keep them: one running state per request, which moves from block to block.

With drafts, a step writes the state after each token to which a request may have to return. Each of these states has a
block of its own, after the request's running block. If a boundary lies among the accepted tokens, its state is copied
to the block that ends at the boundary (`preprocess_mamba` and `postprocess_mamba_fused_kernel` in
`v1/worker/mamba_utils.py`).

If a pipeline has n stages, every stage except the last gets the accepted tokens n steps later. A stage gets these
tokens before a step (`update_pp_decode_requests`), but not for requests that have already ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.content import Words

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.paged import PagedLayer
    from kvpipe.connectors.vllm.trial.shapes import Shape

BlockTable = list[int]
BlockTables = dict[str, list[BlockTable]]


class RunningStates:
    """The running states of all requests on one rank."""

    def __init__(self, layers: list[PagedLayer], late: int = 0) -> None:
        """Start without states. `layers` are the layers of states, whose blocks have one size.

        The rank gets the accepted tokens `late` steps later than the last stage.
        """
        self._layers, self._size = layers, layers[0].words.shape[1] if layers else 0
        # by request: the running block's index in the table, and the number of tokens kept of the last step
        self._last: dict[str, tuple[int, int]] = {}
        # by step and request: the number of tokens that were kept
        self._late = deque[dict[str, int]]({} for _ in range(late))

    def forget(self, request: str) -> None:
        """Forget the request, because it has ended or has other blocks now."""
        self._last.pop(request, None)
        for kept in self._late:
            kept.pop(request, None)

    def settle_late(self, tables: BlockTables, computed: dict[str, int]) -> None:
        """Put the states of the step whose accepted tokens arrive now into their final blocks.

        Called before all other work of a step.
        """
        if self._late:
            self._late.append({})
            for request, kept in self._late.popleft().items():
                self._end(request, tables[request], computed[request], kept)

    def begin(self, scheduled: dict[str, int], tables: BlockTables, computed: dict[str, int]) -> None:
        """Move each state to the block of the step's last token. Called before the forward over `scheduled` tokens."""
        for request, tokens in scheduled.items() if self._layers else ():
            self._begin(request, tables[request], computed[request], tokens)

    def _begin(self, request: str, tables: list[BlockTable], start: int, scheduled: int) -> None:
        column, kept = self._last.get(request, ((start - 1) // self._size, 1))
        after = (start + scheduled - 1) // self._size
        if start and column != after:
            for layer in self._layers:
                table = tables[layer.group]
                layer.words[table[after]] = layer.words[table[column + kept - 1]]
        self._last[request] = after, kept if column == after else 1

    def read(self, layer: PagedLayer, request: str, table: BlockTable) -> tuple[Words, int]:
        """Return the state from which the forward starts, and the state's block."""
        column, kept = self._last[request]
        block = table[column + kept - 1]
        return layer.words[block].copy(), block

    def write(self, layer: PagedLayer, request: str, table: BlockTable, content: Words, drafts: int) -> None:
        """Write the state after each token of `content`. The last `drafts` tokens may be rejected."""
        column, _ = self._last[request]
        for place, word in enumerate(content[len(content) - 1 - drafts :]):
            layer.words[table[column + place]] = word

    def end(
        self, sampled: dict[str, list[int]], sampling: Collection[str], tables: BlockTables, computed: dict[str, int]
    ) -> None:
        """Put each state into its final block, now that each request's sampled tokens are known.

        Called after sampling.
        """
        for request, tokens in sampled.items() if self._layers else ():
            if self._late and request in sampling:
                self._late[-1][request] = len(tokens)
            else:
                self._end(request, tables[request], computed[request], len(tokens))

    def _end(self, request: str, tables: list[BlockTable], computed: int, kept: int) -> None:
        column, _ = self._last[request]
        boundary, first = computed // self._size * self._size, computed - kept + 1
        if boundary >= first:
            target = boundary // self._size - 1
            for layer in self._layers:
                table = tables[layer.group]
                layer.words[table[target]] = layer.words[table[column + boundary - first]]
            if target == column:
                kept = 1
        self._last[request] = column, kept


def exported(shape: Shape, start: int, stop: int, *, drops: bool) -> tuple[int, int]:
    """Return (the number of the step's tokens up to the exported state, the index of the state's block in the table).

    The result is (0, -1) if the step exports no state. `drops` says that vLLM drops the last block of a hit. The
    layers, vLLM's scheduler and `MambaManager` call the same function for this computation. A state without a reserved
    block is written into the null block.
    """
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    if not shape.exports:
        return 0, -1
    tokens, places = compute_mamba_prefill_checkpoints(
        [stop], [stop - start], shape.hash_tokens, shape.block_tokens[shape.states[0]], shape.exports,
        drop_eagle_block=drops, cache_hit_alignment_tokens=shape.hash_tokens,
    )  # fmt: skip
    return tokens[0], places[0]
