"""Recurrent states as vLLM's runners keep them: one running state per request, moved from block to block.

With drafts, a step leaves the state after each token that it may have to go back to, one block each, behind the
request's running one; when the accepted tokens are known, the state of a boundary among them is copied to the block
that ends there (`preprocess_mamba` and `postprocess_mamba_fused_kernel` in `v1/worker/mamba_utils.py`).

A pipeline's stage that is not the last gets what was accepted as many steps later as there are stages, when the
next of them begins (`update_pp_decode_requests`), and of requests that are gone by then not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.content import Words

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.rank import PagedLayer
    from kvpipe.connectors.vllm.trial.shapes import Shape

Table = list[int]
Tables = dict[str, list[Table]]


class RunningStates:
    """One rank's, of all requests."""

    def __init__(self, layers: list[PagedLayer], late: int = 0) -> None:
        """`layers`: those of states, which have blocks of one size. `late`: it gets answers so many steps later."""
        self._layers, self._size = layers, layers[0].words.shape[1] if layers else 0
        self._last: dict[str, tuple[int, int]] = {}  # the running block's place, and tokens kept of the last step
        self._late = deque[dict[str, int]]({} for _ in range(late))  # tokens that were kept, by step

    def forget(self, request: str) -> None:
        """The request is over, or has other blocks now."""
        self._last.pop(request, None)
        for kept in self._late:
            kept.pop(request, None)

    def settle_late(self, tables: Tables, computed: dict[str, int]) -> None:
        """Before anything else of a step: settle the states of the step whose answers arrive only now."""
        if self._late:
            self._late.append({})
            for request, kept in self._late.popleft().items():
                self._end(request, tables[request], computed[request], kept)

    def begin(self, scheduled: dict[str, int], tables: Tables, computed: dict[str, int]) -> None:
        """Before the forward over `scheduled` tokens: go on in the block in which it ends, where that is another."""
        for request, tokens in scheduled.items() if self._layers else ():
            self._begin(request, tables[request], computed[request], tokens)

    def _begin(self, request: str, tables: list[Table], start: int, scheduled: int) -> None:
        column, kept = self._last.get(request, ((start - 1) // self._size, 1))
        after = (start + scheduled - 1) // self._size
        if start and column != after:
            for layer in self._layers:
                table = tables[layer.group]
                layer.words[table[after]] = layer.words[table[column + kept - 1]]
        self._last[request] = after, kept if column == after else 1

    def read(self, layer: PagedLayer, request: str, table: Table) -> tuple[Words, int]:
        """Return the state that the forward goes on from, and its block."""
        column, kept = self._last[request]
        block = table[column + kept - 1]
        return layer.words[block].copy(), block

    def write(self, layer: PagedLayer, request: str, table: Table, content: Words, drafts: int) -> None:
        """Write what the state becomes with each token of `content`, of which the last `drafts` may be taken back."""
        column, _ = self._last[request]
        for place, word in enumerate(content[len(content) - 1 - drafts :]):
            layer.words[table[column + place]] = word

    def end(
        self, sampled: dict[str, list[int]], sampling: Collection[str], tables: Tables, computed: dict[str, int]
    ) -> None:
        """After sampling: settle the states, with the tokens that each request has `sampled`, if `sampling`."""
        for request, tokens in sampled.items() if self._layers else ():
            if self._late and request in sampling:
                self._late[-1][request] = len(tokens)
            else:
                self._end(request, tables[request], computed[request], len(tokens))

    def _end(self, request: str, tables: list[Table], computed: int, kept: int) -> None:
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
    """Return of how many tokens of a step a state is written from within it, and where in the table; 0: of none.

    `drops`: vLLM drops the last of a hit. Layers ask it as its scheduler and `MambaManager` do, and write what nobody
    has reserved a block for into the null block.
    """
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    if not shape.exports:
        return 0, -1
    tokens, places = compute_mamba_prefill_checkpoints(
        [stop], [stop - start], shape.hash_tokens, shape.block_tokens[shape.states[0]], shape.exports,
        drop_eagle_block=drops, cache_hit_alignment_tokens=shape.hash_tokens,
    )  # fmt: skip
    return tokens[0], places[0]
