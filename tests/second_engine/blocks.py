"""The engine's paged blocks: block tables, and the engine's own prefix cache over blocks without holders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """One block of every layer's cache. This engine has no windows, so no block is a null block."""

    block_id: int
    is_null: bool = False


class Blocks:
    """The requests that hold each block. A block that no request holds keeps its content until the block is needed."""

    def __init__(self, count: int, block_tokens: int) -> None:
        """Create `count` free blocks of `block_tokens` tokens."""
        self.count, self.block_tokens = count, block_tokens
        self._free: dict[int, None] = dict.fromkeys(range(count))  # the first block of the dict is taken next
        self._holders = [0] * count
        self._tables: dict[str, list[Block]] = {}
        self._found: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}

    # ---- what kvpipe calls ----------------------------------------------------------------------------------------

    def table(self, request_id: str, group: int = 0) -> Sequence[Block]:
        """Return the request's blocks, in the order of its tokens. There is one group of layers only."""
        assert group == 0
        return self._tables.get(request_id, ())

    def knows(self, block_id: int, key: bytes) -> bool:
        """Return whether a block can be found by `key`."""
        return self._hash.get(block_id) == key

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache. Requests that hold the blocks keep them."""
        for block in block_ids:
            key = self._hash.pop(block, None)
            if key is not None:
                del self._found[key]

    def free(self) -> int:
        """Return the number of blocks that can be taken."""
        return len(self._free)

    # ---- what the engine calls ------------------------------------------------------------------------------------

    def prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` that is in the prefix cache."""
        found: list[int] = []
        for key in hashes:
            block = self._found.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def grow(self, request_id: str, tokens: int, prefix: Sequence[int] = ()) -> bool:
        """Give the request blocks for its first `tokens` tokens, or no blocks if too few are free.

        If the request has no blocks yet, it first gets the shared blocks `prefix`.
        """
        table = self._tables.get(request_id, [])
        new = -(-tokens // self.block_tokens) - len(table) - len(prefix)
        if new > len(self._free) - sum(1 for block in prefix if block in self._free):
            return False
        for block in prefix:
            self._free.pop(block, None)
        fresh: list[int] = []
        for _ in range(new):
            block = next(iter(self._free))
            del self._free[block]
            self.forget([block])
            fresh.append(block)
        for block in (*prefix, *fresh):
            self._holders[block] += 1
            table.append(Block(block))
        self._tables[request_id] = table
        return True

    def publish(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Put the request's first blocks, which are computed, into the prefix cache under `hashes`."""
        for key, block in zip(hashes, self._tables[request_id], strict=False):
            if key not in self._found:
                self.forget([block.block_id])
                self._found[key] = block.block_id
                self._hash[block.block_id] = key

    def release(self, request_id: str) -> None:
        """Release the request's blocks. Other requests take the last blocks of the request first."""
        for block, _ in reversed(self._tables.pop(request_id, [])):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def clear(self) -> None:
        """Remove all blocks from the prefix cache."""
        self.forget(list(self._hash))
