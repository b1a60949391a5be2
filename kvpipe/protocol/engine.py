"""The interface of an engine to the scheduler side: requests, block tables, steps, and recovery after failures.

The interface consists of protocols. An engine's own objects are used directly if they have the attributes, and are
neither wrapped nor copied. The names are vLLM's. A class that inherits from a protocol gets the defaults of optional
members. All members are called on the scheduler's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol


class Adapter(Protocol):
    """A LoRA adapter of a request."""

    @property
    def lora_int_id(self) -> int:
        """The engine's number of the adapter, from 1 on. Another adapter may get the same number later."""

    @property
    def lora_path(self) -> str:
        """The path of the adapter's files."""

    @property
    def lora_name(self) -> str:
        """The adapter's name."""
        return ""

    @property
    def load_inplace(self) -> bool:
        """Whether the engine reads the adapter's files again for every request."""
        return False

    @property
    def is_3d_lora_weight(self) -> bool:
        """Whether the engine is configured to read each layer's experts from the files as one tensor."""
        return False


class Request(Protocol):
    """A request, from its arrival to `finished`. kvpipe reads these numbers when needed, and keeps no copies."""

    @property
    def request_id(self) -> str:
        """The request's id: unique among unfinished requests. A later request may have the same id."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far, without drafts."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens whose KV is computed before the step that is being planned.

        The number includes tokens of earlier steps that still run, and may include drafts.
        """

    @property
    def num_preemptions(self) -> int:
        """How often the request has lost its blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hash of each block of `hash_tokens` tokens. A hash covers all tokens up to its block's end.

        A hash also covers all other inputs on which the KV depends, except model, weights and adapter. Only full blocks
        of final tokens have a hash. The list may grow, and may become shorter.
        """

    @property
    def lora_request(self) -> Adapter | None:
        """The request's adapter, or None."""
        return None

    @property
    def cache_salt(self) -> str | None:
        """A text that `block_hashes` depend on, so that requests with different salts share no KV.

        The salt also names the owner of the request's chunks.
        """
        return None

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token of the prompt must be computed."""
        return False

    @property
    def resumable(self) -> bool:
        """Whether the client may add more tokens to the prompt later (a streaming session)."""
        return False


WholeSpan = tuple[int, int]
"""Tokens [first, stop) that attend to each other in both directions, like the tokens of an image."""
SpansOf = Callable[[Request], Sequence[WholeSpan]]
"""A function that returns the spans of a request in their order. An engine computes each span in one step.

No hit ends inside a span.
"""


Precedence = tuple[float, int]
"""(priority, number of arrival) of a waiting request. The request with the lowest pair is served first."""


class Block(Protocol):
    """One entry of a block table."""

    @property
    def block_id(self) -> int:
        """The block's index in the paged cache of its group."""

    @property
    def is_null(self) -> bool:
        """Whether the entry has no block, because the entry's tokens are before a sliding window."""


Tables = Sequence[Sequence[Block]]
"""The block tables of one request, by cache group."""


class Blocks(Protocol):
    """The engine's block tables, and its own prefix cache if it has one."""

    def table(self, request_id: str, group: int) -> Sequence[Block]:
        """Return the request's present block table in a cache group.

        The table is empty if the request holds no blocks.
        """

    def knows(self, block_id: int, key: bytes) -> bool:
        """Whether the prefix cache knows a block by `key`, one of a request's `block_hashes`.

        This method is called only for blocks with offered states. If the cache does not know a block any more, another
        request may own it, and may write it in the step that is being planned.
        """

    def forget(self, block_ids: set[int]) -> None:
        """Remove these blocks from the prefix cache, so that no other request gets them.

        Requests that hold the blocks keep the blocks.
        """

    def free(self) -> int:
        """Return how many blocks can be allocated."""


class Step(Protocol):
    """The work that the engine computes next."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """The number of tokens to compute, drafts included, by request id."""

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """The ids of requests that have lost their blocks since the last step.

        This step may schedule these requests again.
        """


class OfferedStates(Protocol):
    """The recurrent states that a step offers, in its attribute `kv_connector_block_state`, which may be missing."""

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Tuples (group, block, tokens) of each request, by request id.

        After the step is computed, and until the next step writes, the block holds the state after exactly `tokens`
        tokens of the request.
        """


class Hit(NamedTuple):
    """The result of a lookup: the number of `tokens` that can be loaded beyond the tokens that the engine holds.

    `waits` says that the request waits until `reported` completes the load, while other requests run. Without `waits`,
    the request is computed in this step.
    """

    tokens: int
    waits: bool


class Later(enum.Enum):
    """The type of `LATER`."""

    LATER = enum.auto()


LATER: Final = Later.LATER
"""The answer is not known yet.

The engine must not admit the request in this step. It repeats the lookup in the next step.
"""

MISS: Final = Hit(0, waits=False)
"""The answer to a lookup if nothing can be loaded."""

LookupAnswer = Hit | Literal[Later.LATER]
"""The answer to a lookup.

Within one scheduling pass, every repeated lookup has the same answer.
"""


class Recovery:
    """The engine's part of recovery: when loads fail, when blocks are scarce, and when weights change.

    The defaults suit an engine that meets three conditions. If a load into a block fails, the engine recomputes the
    block before any request reads the block. The engine can always preempt a request that waits for a load. The engine
    empties its own prefix cache when its weights change.
    """

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that defines methods of older versions, because kvpipe never calls such methods."""
        if old := sorted(vars(cls).keys() & {"step_planned", "extra_loads"}):
            raise TypeError(
                f"{cls.__name__}: rename {' and '.join(old)} to one method begin_step(step, requests, *, loading)"
            )

    def may_wait(self, request: Request, waiting: Mapping[str, Request]) -> bool:
        """Whether `request` may begin an asynchronous load, or be a session, while the requests in `waiting` wait.

        A request is in `waiting` if it is a session (`resumable`), or if it has an asynchronous load and has not run
        since this load began.
        """
        del request, waiting
        return True

    def admitted(self, request_id: str, tables: Tables) -> bool:
        """The request has got blocks.

        Returns whether the KV that the request computes with these blocks must not be saved. The KV must not be saved
        if any of the blocks may hold KV of earlier weights.
        """
        del request_id, tables
        return False

    def continued(self, request_id: str) -> bool:
        """The request continues with its blocks, after a load or with more input.

        The result has the same meaning as for `admitted`.
        """
        del request_id
        return False

    def planned(self, block_ids: Collection[int]) -> None:
        """A load into these blocks is part of the next step."""

    def failed(self, block_ids: set[int], requests: Collection[str]) -> None:
        """A sync load into these blocks has failed.

        Any of the unfinished `requests` may have read these blocks after the failure.
        """

    def given_away(self, block_ids: set[int]) -> None:
        """No unfinished request has held these blocks since the last failed load was planned.

        A request that holds such a block now has got it after this plan, and writes the block before any request reads
        it.
        """

    def begin_step(self, step: Step, requests: Iterable[Request], *, loading: bool) -> Mapping[str, Sequence[int]]:
        """Return, by request, the blocks that `step` would read too early.

        kvpipe plans a load of these blocks that is certain to fail, and reports the failure, so that the engine
        recovers. This method is called once per step, before the step's saves are planned. `requests` are all
        unfinished requests. The blocks are of group 0. `loading` says that some sync load is not reported yet.
        """
        del step, requests, loading
        return {}

    def weights_changed(self, requests: Collection[str]) -> None:
        """The weights have changed.

        All KV computed so far, including the KV of `requests`, belongs to earlier weights.
        """

    def finished(self, request_id: str, *, loading: bool) -> None:
        """The request has ended, and still has its blocks. `loading` says that some sync load is not reported yet."""
