"""Blocks as KV events describe them, and the notes that pass blocks from one engine to another.

The record of a chunk in a node's memory has the chunk's key alone. The note in the chunk's slot has the rest of what
events contain, so that an engine can announce the chunks of other engines.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys

from kvpipe.cache.tenants import SALT_KEPT_CHARS_MAX

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.cache.chunks import Chunk
    from kvpipe.protocol.geometry import Geometry

ANNOUNCED_MAX: Final = 128
"""The largest number of noted blocks that one step announces. Announcing one block takes about 50 us."""


class AnnouncedBlock(NamedTuple):
    """The tokens of a chunk up to one of the chunk's marks, and everything else that the block's hash covers."""

    hash: BlockHash
    parent: BlockHash | None
    tokens: array[int]
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None
    session: str | None

    @property
    def adapter(self) -> tuple[str, str] | None:
        """The name and the path of the block's adapter, which the hash covers, or None without an adapter."""
        return next(((key[1], key[2]) for key in self.extra_keys or () if key[0] == "lora"), None)


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """The encoded form of an `AnnouncedBlock`, without `lora_id`: each engine has its own numbers of adapters.

    The engine that reads the note adds its own number (`KvEvents.arrived`).
    """

    hash: bytes
    parent: bytes | None
    tokens: bytes
    extra_keys: tuple[tuple[Any, ...], ...] | None
    lora_name: str | None
    session: str | None


_decoder = msgspec.msgpack.Decoder(_Note)


class BlockMaker:
    """Makes the blocks of an engine's chunks."""

    def __init__(self, geometry: Geometry, hash_tokens: int) -> None:
        """Keep the sizes. `hash_tokens` is the number of tokens per block hash."""
        self._hashes_per_unit, self._hash_tokens = geometry.unit_tokens // hash_tokens, hash_tokens
        self._ahead = -(-geometry.ahead_tokens // hash_tokens)
        self._states = geometry.states

    def block(self, request: Request, group: int, base: int, stop: int) -> AnnouncedBlock | None:
        """Return the block of units [base, stop) of the prefix, up to the last token that the key at `stop` covers.

        Returns None if a session has shortened its tokens since the save.
        """
        ahead = 0 if group in self._states else self._ahead
        first, end = base * self._hashes_per_unit + (ahead if base else 0), stop * self._hashes_per_unit + ahead
        hashes: Sequence[BlockHash] = request.block_hashes
        if len(hashes) < end:
            return None
        start_token, end_token = first * self._hash_tokens, end * self._hash_tokens
        lora = request.lora_request
        return AnnouncedBlock(
            hash=hashes[end - 1],
            parent=hashes[first - 1] if first else None,
            tokens=array("q", request.all_token_ids[start_token:end_token]),
            extra_keys=generate_block_hash_extra_keys(request, start_token, end_token, 0)[0],
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            session=request.session_id,
        )

    def note(self, request: Request, chunk: Chunk, base: int) -> bytes:
        """Return the note of a chunk that has one mark. This method is a `kvpipe.scheduler.hooks.NoteOf`.

        As with private pools, a chunk is not announced if its salt is too long.
        """
        if len(request.cache_salt or "") > SALT_KEPT_CHARS_MAX or not chunk.marks:
            return b""
        mark = chunk.marks[-1]
        block = self.block(request, chunk.group, base, base + mark.units)
        if block is None or not mark.key.startswith(block.hash):  # a key with an adapter's digest is longer
            return b""
        hash_, parent, tokens, extra_keys, _, lora_name, session = block
        return msgspec.msgpack.encode(_Note(hash_, parent, tokens.tobytes(), extra_keys, lora_name, session))


def _is_extra_key(key: tuple[Any, ...]) -> bool:
    """Return whether vLLM makes such a key. The key of an adapter has the adapter's name and path."""
    match key:
        case ("lora", str(), str(), *_):
            return True
        case _:
            return bool(key) and key[0] != "lora"


def read_note(note: bytes) -> AnnouncedBlock | None:
    """Return the block of a note, or None if another release of kvpipe has written the note."""
    try:
        read = _decoder.decode(note)
        tokens = array("q", read.tokens)
    except (msgspec.DecodeError, ValueError):
        return None
    if not all(map(_is_extra_key, read.extra_keys or ())):
        return None
    parent = None if read.parent is None else BlockHash(read.parent)
    return AnnouncedBlock(BlockHash(read.hash), parent, tokens, read.extra_keys, None, read.lora_name, read.session)


class NotedBlocks:
    """The blocks of chunks that can be found and are not announced yet.

    A scan of the slot table finds chunks in the order of their slots. But a router can use a block only after the
    block's parent, so `take` puts parents first.
    """

    def __init__(self) -> None:
        """Start without blocks."""
        # An OrderedDict finds its first entry in constant time. A dict would search through all removed entries.
        self._waiting: OrderedDict[Chunk, AnnouncedBlock] = OrderedDict()
        self._named: dict[tuple[int, BlockHash], Chunk] = {}

    def add(self, chunk: Chunk, block: AnnouncedBlock) -> None:
        """Add the block of a chunk."""
        self._waiting[chunk] = block
        self._named[chunk.group, block.hash] = chunk

    def block(self, chunk: Chunk) -> AnnouncedBlock | None:
        """Return the block of a chunk, or None if no block of the chunk is waiting here."""
        return self._waiting.get(chunk)

    def pop(self, chunk: Chunk) -> None:
        """Remove the block of a chunk, if that block is waiting here."""
        block = self._waiting.pop(chunk, None)
        if block is not None and self._named.get((chunk.group, block.hash)) is chunk:
            del self._named[chunk.group, block.hash]

    def take(self) -> list[tuple[Chunk, AnnouncedBlock]]:
        """Remove and return up to `ANNOUNCED_MAX` blocks. A block comes after its parent."""
        taken: list[tuple[Chunk, AnnouncedBlock]] = []
        while self._waiting and len(taken) < ANNOUNCED_MAX:
            chunk: Chunk | None = next(iter(self._waiting))
            chain: dict[Chunk, None] = {}  # the chunk, its parent, the parent's parent, and so on
            while chunk is not None and chunk not in chain:
                chain[chunk] = None
                parent = self._waiting[chunk].parent
                chunk = None if parent is None else self._named.get((chunk.group, parent))
            for first in itertools.islice(reversed(chain), ANNOUNCED_MAX - len(taken)):
                taken.append((first, self._waiting[first]))
                self.pop(first)
        return taken
