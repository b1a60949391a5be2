"""What the scheduler side asks of an engine: requests, block tables, steps, and where it does not recover by itself.

Protocols: an engine's own objects serve as they are if they have these attributes, and nothing is wrapped or copied on
the way. The names are vLLM's. A class that inherits from a protocol gets the defaults of what is optional. All is
called on the scheduler's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Chunk


class Adapter(Protocol):
    """A LoRA adapter of a request."""

    @property
    def lora_int_id(self) -> int:
        """The engine's number of it, from 1 on. Another adapter may have it later."""

    @property
    def lora_path(self) -> str:
        """Where its files lie."""

    @property
    def lora_name(self) -> str:
        """What it is called."""
        return ""

    @property
    def load_inplace(self) -> bool:
        """Whether the engine reads its files again for every request."""
        return False

    @property
    def is_3d_lora_weight(self) -> bool:
        """Whether the engine is told that its files hold each layer's experts as one tensor."""
        return False


class Request(Protocol):
    """A request, from its arrival to `finished`. Its numbers are read when they are needed and never kept."""

    @property
    def request_id(self) -> str:
        """Unique among the living ones; may be used again afterwards."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far, without drafts."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or enqueued to be, before the step that is planned. May count drafts."""

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """By block of `hash_tokens` tokens, a hash of all tokens up to its end and of whatever else decides their KV.

        Beside model, weights and adapter. Full blocks of final tokens only. The list may grow, and be cut.
        """

    @property
    def lora_request(self) -> Adapter | None:
        """Its adapter."""
        return None

    @property
    def cache_salt(self) -> str | None:
        """What keeps its KV apart from that of other requests: a part of `block_hashes`. Whose its chunks are."""
        return None

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token of its prompt is to be computed."""
        return False

    @property
    def resumable(self) -> bool:
        """Whether its prompt may be continued."""
        return False


Span = tuple[int, int]
"""(first token, the token behind the last) of tokens that attend to each other in both directions, as of an image."""
SpansOf = Callable[[Request], Sequence[Span]]
"""Returns the spans of a request, in their order. An engine computes each in one step; no hit ends inside a span."""


Turn = tuple[float, int]
"""Which of two waiting requests comes first: by the engine's priority, the lower one, then in the order of arrival."""


class Block(Protocol):
    """One entry of a block table."""

    @property
    def block_id(self) -> int:
        """Its place in the paged cache of its group."""

    @property
    def is_null(self) -> bool:
        """Whether it holds nothing: it lies before a sliding window."""


Tables = Sequence[Sequence[Block]]
"""The block tables of one request, by cache group."""


class Blocks(Protocol):
    """The engine's block tables and its own prefix cache, if it has one."""

    def table(self, request_id: str, group: int) -> Sequence[Block]:
        """Return the request's block table in a cache group as it is now; empty if it holds no blocks."""

    def knows(self, block_id: int, key: bytes) -> bool:
        """Whether the prefix cache knows a block by `key`, one of a request's `block_hashes`.

        Asked of offered states only: a block that is known no more may have been given to somebody who writes it in
        the step that is being planned.
        """

    def forget(self, block_ids: set[int]) -> None:
        """Offer these blocks to no other request: take them out of the prefix cache. Their owners keep them."""

    def free(self) -> int:
        """Return how many blocks can be allocated."""


class Step(Protocol):
    """What the engine computes next."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens to compute, drafts included, by request id."""

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """Requests that have lost their blocks since the last step. They may be scheduled in it again."""


class OfferedStates(Protocol):
    """What a step offers of recurrent states, in its attribute `kv_connector_block_state`, which may be missing."""

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """By request id: (group, block, tokens).

        When the step has been computed, and until the next step writes, the block holds what exactly so many tokens of
        the request have come to.
        """


class Hit(NamedTuple):
    """`tokens` beyond those that the engine holds can be loaded; 0: none.

    `waits`: the request waits until `reported` completes the load, while others run. Else it is computed in this step.
    """

    tokens: int
    waits: bool


class Later(enum.Enum):
    """The type of `LATER`."""

    LATER = enum.auto()


LATER: Final = Later.LATER
"""Not known yet: ask again in the next step, and do not admit the request in this one."""

MISS: Final = Hit(0, waits=False)
"""Nothing can be loaded."""

Answer = Hit | Literal[Later.LATER]
"""Of a lookup. It may be asked any number of times, and stands for the scheduling pass in which it was given."""


class Published(Protocol):
    """Is notified of what can be found, for routers."""

    def published(self, request: Request, chunk: Chunk, base: int) -> None:
        """A piece of `chunk`, which begins at unit `base` of the prefix of `request`, can be found from now on."""

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` cannot be found any more."""

    def kept(self, request: Request) -> Request | None:
        """Return what `published` needs of a request after its end, and no more; None: it would need too much."""


class Recovery:
    """What an engine does when loads fail, room is short or weights change. The defaults suit one that needs no help.

    Such an engine, before anything else reads a block into which a load has failed, has computed it anew; it can
    always preempt a request that waits for a load; and it empties its own prefix cache when its weights change.
    """

    def __init_subclass__(cls) -> None:
        """Refuse methods of older versions, which nobody would call."""
        if old := sorted(vars(cls).keys() & {"step_planned", "extra_loads"}):
            raise TypeError(
                f"{cls.__name__}: rename {' and '.join(old)} to one method begin_step(step, requests, *, loading)"
            )

    def may_wait(self, request: Request, waiting: Mapping[str, Request]) -> bool:
        """Whether `request` may begin to load asynchronously, or be a session, beside `waiting`.

        Those have loads that began before they have run again, or are sessions (`resumable`).
        """
        del request, waiting
        return True

    def admitted(self, request_id: str, tables: Tables) -> bool:
        """The request has got blocks. Returns whether what it computes with them is not to be kept.

        As any of them may hold KV of weights that are gone.
        """
        del request_id, tables
        return False

    def continued(self, request_id: str) -> bool:
        """The request goes on with its blocks: after a load, or with more input. Returns as `admitted`."""
        del request_id
        return False

    def planned(self, block_ids: Collection[int]) -> None:
        """A load into these blocks is part of the next step."""

    def failed(self, block_ids: set[int], requests: Collection[str]) -> None:
        """A sync load into these blocks has failed. All living `requests` may have read them since."""

    def begin_step(self, step: Step, requests: Iterable[Request], *, loading: bool) -> Mapping[str, Sequence[int]]:
        """Return blocks, by request, that `step` would read too early: a load of them is planned that fails.

        Called once per step, before its saves are planned. `requests`: all that live. Blocks are of group 0. The load
        is reported like any that fails: the engine recovers. `loading`: some sync load is not reported yet.
        """
        del step, requests, loading
        return {}

    def weights_changed(self, requests: Collection[str]) -> None:
        """What was computed so far, by `requests` too, is of weights that are gone."""

    def finished(self, request_id: str, *, loading: bool) -> None:
        """The request is over, and still has its blocks. `loading`: some sync load is not reported yet."""
