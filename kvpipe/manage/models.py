"""Bodies of the management interface's requests and responses, as OpenAPI describes them.

Every field has a description. No description names a page, because an installed wheel has no pages.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from kvpipe.statemachine.breaker import BREAKER
from kvpipe.statemachine.core import Machine
from kvpipe.statemachine.request import REQUEST
from kvpipe.statemachine.saving import SAVING
from kvpipe.trace.miss_reasons import REASONS

TOKENS_MAX: Final = 1 << 18
SALT_CHARS_MAX: Final = 4096

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=SALT_CHARS_MAX)]
_REASONS: Final = ", ".join(REASONS)


def _about(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


def _states(machine: Machine) -> str:
    return ", ".join(machine.states)


class _ToOperator(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AdapterOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The LoRA adapter of a prompt, as vLLM's server has loaded it."""

    name: Annotated[Text, _about("The adapter's name: vLLM's `lora_name`.")]
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31), _about("The adapter's number: vLLM's `lora_int_id`.")]
    path: Annotated[Text, _about("The adapter's folder: vLLM's `lora_path`.")]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt without images. The fields together determine the keys under which the prompt's KV is kept.

    msgspec parses it, because the engine waits for the interpreter while a long list is parsed, and pydantic takes
    several times as long.
    """

    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]],
        msgspec.Meta(min_length=1, max_length=TOKENS_MAX),
        _about("The prompt's token ids, as vLLM's server returns them at /tokenize."),
    ]
    cache_salt: Annotated[
        Text | None, _about("The `cache_salt` of the prompt's requests; null: they have no salt.")
    ] = None
    adapter: Annotated[AdapterOf | None, _about("The LoRA adapter of the prompt's requests; null: they have none.")] = (
        None
    )


class PromptLookup(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to look up."""

    tiers: Annotated[
        bool,
        _about("Whether to ask the tiers, too. This takes at most 2 seconds, and only one such lookup runs at a time."),
    ] = False


class PinOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to pin."""

    seconds: Annotated[
        float, msgspec.Meta(gt=0, le=1e9), _about("Time until the pin ends, at most `manage_pin_s_max`.")
    ]


class EvictOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to evict."""

    from_token: Annotated[
        int,
        msgspec.Meta(ge=0, lt=1 << 31),
        _about("Evict the chunk that holds this token, and all later chunks; 0: the whole prompt."),
    ] = 0


class EvictMatching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks to evict, whatever their prompts. A chunk is evicted if every given field holds for it."""

    cache_salt: Annotated[Text | None, _about("Chunks of requests with this salt.")] = None
    salt_digest: Annotated[
        Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] | None,
        _about("Chunks of requests whose salt has this digest, as `holders` shows it."),
    ] = None
    no_salt: Annotated[bool, _about("Chunks of requests without a salt.")] = False
    adapter: Annotated[Text | None, _about("Chunks of requests with a LoRA adapter of this name.")] = None
    adapter_digest: Annotated[
        Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{2,128}$")] | None,
        _about("Chunks of requests with a LoRA adapter whose bytes have this digest."),
    ] = None
    no_adapter: Annotated[bool, _about("Chunks of requests without a LoRA adapter.")] = False
    idle_s: Annotated[
        Annotated[float, msgspec.Meta(ge=1, le=1e9)] | None,
        _about("Chunks that nobody holds and that were not used for this number of seconds."),
    ] = None
    all: Annotated[bool, _about("All chunks. No other field may be given with it.")] = False


class TenantHolds(_ToOperator):
    """The chunks in the pool of requests with one salt and one adapter."""

    salt_digest: str = Field(
        description="Digest of the chunks' `cache_salt`, as `kvpipe cache salt` prints it; empty: no salt."
    )
    adapter: str = Field(description="Name of the chunks' LoRA adapter; empty: no adapter.")
    adapter_digest: str = Field(description="Digest of the adapter's bytes.")
    chunks: int = Field(description="Their number.")
    bytes: int = Field(description="Bytes of the chunks' slots, on the rank that the scheduler knows.")
    held: int = Field(description="Number of these chunks that are read, written or pinned.")
    idle_s: float = Field(
        description="Seconds since the last use of any of these chunks, in whole seconds; 0: one of them is held."
    )


class LeaseHolder(_ToOperator):
    """A holder of leases. Chunks with a lease are not evicted."""

    holder: str = Field(description="A request's id, `pin:` with the number of a pin, `stores` or `warm`.")
    kind: str = Field(
        description="`request`: the request loads the chunks; `tiers`: it waits for more chunks, or the chunks "
        "are being stored; `pin`: an operator has pinned the chunks."
    )
    chunks: int = Field(description="Number of chunks that the holder holds.")


class Holders(_ToOperator):
    """The users of the pool, those with most chunks first. Slots are counted one by one while the engine serves."""

    chunks: int = Field(description="Number of chunks in the pool.")
    tenants: int = Field(description="Number of pairs of salt and adapter.")
    tenants_shown: list[TenantHolds] = Field(description="The pairs with the most chunks, at most `rows_max` pairs.")
    chunks_unnamed: int = Field(
        description="Number of chunks of tenants beyond the first 4,096 tenants, which are not listed by name. On a "
        "node's memory also of chunks that other engines have saved."
    )
    holders: int = Field(description="Number of requests and pins with leases.")
    holders_shown: list[LeaseHolder] = Field(
        description="The holders with the most chunks, at most `rows_max` holders."
    )


class WarmOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to fetch from tiers."""

    seconds: Annotated[
        float,
        msgspec.Meta(ge=0, le=1e9),
        _about("Time for which the prompt is pinned after the fetch; 0: it is not pinned."),
    ] = 0.0


class Pinned(_ToOperator):
    """A pin on a prompt."""

    pin: int = Field(description="The pin's number, for DELETE /v1/pins/PIN.")
    tokens: int = Field(
        description="Tokens from the prompt's beginning that were a hit when it was pinned, and that stay in memory."
    )
    chunks: int = Field(description="Number of chunks that the holder holds.")
    left_s: float = Field(description="Seconds until the pin ends.")


class PinnedPrompts(_ToOperator):
    """All pins."""

    pins: list[Pinned] = Field(description="Every pin that has not ended.")
    chunks: int = Field(description="Number of chunks that pins hold. A chunk that several pins hold counts once.")
    chunks_max: int = Field(
        description="Largest number of chunks that pins may hold: `manage_pinned_share_max` of the pool."
    )


class EvictedChunks(_ToOperator):
    """The result of an eviction."""

    chunks: int = Field(description="Number of chunks that were evicted, so that they cannot be found any more.")
    held: int = Field(
        description="Number of these chunks whose slots become free only when their readers and writers have ended."
    )
    pins_ended: int = Field(description="Number of pins that held any of these chunks and have ended.")


class Warmed(_ToOperator):
    """The result of a warm order."""

    tokens: int = Field(
        description="Tokens from the prompt's beginning that are now a hit in memory for a longer prompt."
    )
    fetched_tokens: int = Field(description="Tokens that were fetched from tiers for the prompt.")
    pin: int = Field(description="The number of the pin that holds the prompt; 0: the prompt is not pinned.")
    left_s: float = Field(description="Seconds until the pin ends.")


class Pending(_ToOperator):
    """An order that is not carried out yet. The engine's next steps carry it out."""

    order: int = Field(description="The order's number, for GET /v1/orders/ORDER, which returns its result.")
    pending: bool = Field(default=True, description="Always true.")
    waits_for: str = Field(
        default="the engine's next step: the engine makes no step while it has nothing to do",
        description="The order's obstacle.",
    )


class HeldByTier(_ToOperator):
    """How much of a prompt one tier holds by itself."""

    name: str = Field(description="The tier's name: its kind, with a number if it is not the first of its kind.")
    held_tokens: int | None = Field(
        description="Tokens from the prompt's beginning that this tier alone could serve. Null: the number is "
        "not known."
    )
    unknown: str = Field(description="The reason why the number is not known; empty if it is known.")


class HeldTokens(_ToOperator):
    """How much of a prompt a lookup would find now."""

    tokens: int = Field(description="Number of tokens of the prompt.")
    held_tokens: int = Field(
        description="Number of tokens from the prompt's beginning whose KV is in memory and can be a hit."
    )
    why: str = Field(description=f"The reason why no more tokens are a hit; empty if all are. One of: {_REASONS}.")
    reach_tokens: int | None = Field(
        default=None,
        description="Number of tokens that memory and the tiers that have answered hold together; null: tiers "
        "were not asked. It is a lower bound: if the last chunk of one tier ends early, the other "
        "tiers are not asked for the rest of the chunk.",
    )
    tiers: list[HeldByTier] = Field(
        default=[], description="The number of tokens that each tier holds by itself, if tiers were asked."
    )


class SwitchStates(_ToOperator):
    """The switches."""

    freeze: bool = Field(description="Whether hits are served, but nothing new is saved.")
    bypass: bool = Field(description="Whether nothing is saved and nothing is loaded.")


class SetSwitches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switches to set. Switches that are not given keep their states."""

    freeze: Annotated[bool | None, _about("True: hits are served, nothing new is saved. Null: unchanged.")] = None
    bypass: Annotated[bool | None, _about("True: nothing is saved or loaded. Null: unchanged.")] = None


class QuotaState(_ToOperator):
    """The slots of one quota. A quota is a share of the pool for the requests with one salt."""

    name: str = Field(description="The quota's name in the configuration.")
    slots: int = Field(description="Number of slots that the chunks of the quota's requests use.")
    slots_sure: int = Field(description="Number of slots that are guaranteed to the quota.")
    slots_max: int = Field(description="Largest number of slots that the quota may use.")


class PoolState(_ToOperator):
    """The host pool of a rank. The pools of all ranks hold the same chunks."""

    slots: int = Field(description="Number of slots in each rank's pool.")
    slots_ready: int = Field(
        description="Number of slots that may be used, because every rank has allocated "
        "their memory or has enough free memory."
    )
    slots_used: int = Field(description="Number of slots that are not free.")
    slot_bytes: int = Field(description="Bytes of one slot, on the rank that the scheduler knows.")
    bytes_used: int = Field(description="Bytes of the used slots, on the rank that the scheduler knows.")
    bytes_max: int = Field(description="Bytes of all slots, on the rank that the scheduler knows.")
    leases: int = Field(
        description="Number of leases on chunks. A chunk that several requests hold counts several times."
    )
    oldest_lease_s: float = Field(description="Age of the oldest lease in seconds; 0: there is no lease.")
    pieces_writing: int = Field(description="Number of pieces of chunks that are being saved or fetched.")
    chunks_pinned: int = Field(description="Number of chunks that operators have pinned.")
    quotas: list[QuotaState] = Field([], description="The used slots by quota; empty: there are no quotas.")


def slowness(lived_s: float, answer_tokens: int) -> tuple[bool, float]:
    """Return a key that sorts requests by slowness: (whether the answer has no token yet, seconds per token)."""
    return not answer_tokens, lived_s / max(1, answer_tokens)


class RequestHolds(_ToOperator):
    """One request that is not finished."""

    request: str = Field(description="Its id.")
    lived_s: float = Field(description="Seconds since the request arrived.")
    tokens: int = Field(description="Tokens of the request's prompt and of its answer so far.")
    answer_tokens: int = Field(description="Tokens of the request's answer so far.")
    preemptions: int = Field(description="Number of times that vLLM has preempted the request.")
    state: str = Field(description=f"State of the request. One of: {_states(REQUEST)}.")
    saving: str = Field(description=f"State of the request's saves. One of: {_states(SAVING)}.")
    saved_tokens: int = Field(
        description="Number of tokens from the request's beginning that are saved, being saved, or held already."
    )
    chunks_held: int = Field(
        description="Number of leases of the request's load, or of its stage while it waits for tiers."
    )
    waits_for_tiers: bool = Field(description="Whether the request waits for chunks from tiers.")


class JobCounts(_ToOperator):
    """Jobs and tier orders that not all ranks have reported yet."""

    saves: int = Field(description="Jobs that save.")
    loads: int = Field(description="Jobs that load.")
    tier_orders: int = Field(description="Orders to fetch chunks from tiers, or to store chunks in tiers.")
    save_bytes: int = Field(description="Bytes that the saves copy, on the rank that the scheduler knows.")
    load_bytes: int = Field(description="Bytes that the loads copy, on the rank that the scheduler knows.")
    tier_bytes_max: int = Field(
        description="Bytes of the slots that tier orders fill or read. It is an upper "
        "bound of the bytes that they move."
    )


class Traffic(_ToOperator):
    """Totals over all admissions since the engine's start, without the tokens of vLLM's own prefix cache."""

    hit_tokens: dict[str, int] = Field(
        description="Number of tokens that were loaded, by the tier that they came from."
    )
    missed_tokens: dict[str, int] = Field(description=f"Number of tokens that were not found, by reason: {_REASONS}.")
    evicted: int = Field(description="Number of chunks that were evicted.")
    faults: int = Field(description="Faults of the scheduler side; `GET /v1/counters` has them by name.")


class TierState(_ToOperator):
    """One tier, as the scheduler's process sees it."""

    name: str = Field(description="The tier's name: its kind, with a number if it is not the first of its kind.")
    kind: str = Field(description="The tier's kind, for example disk or redis.")
    breaker: str = Field(
        description=f"State of the tier's breaker for lookups. CLOSED: the tier is used. One of: {_states(BREAKER)}."
    )
    left_by_ranks: bool = Field(description="Whether some rank does not read the tier at present.")
    read_bytes_per_s: float = Field(
        0.0, description="Bytes per second of recent reads of the tier, on the slowest rank; 0: not known."
    )
    slow: bool = Field(
        default=False,
        description="Whether requests do not wait for the tier, because computing is faster than reading it.",
    )


class AdapterHeld(_ToOperator):
    """An adapter that ranks hold."""

    number: int = Field(description="vLLM's `lora_int_id`.")
    digest: str = Field(
        description="Digest of the adapter's bytes; empty: ranks differ, or not all ranks have reported."
    )


class EngineState(_ToOperator):
    """The state of the engine at one moment. With more than 128 requests, `requests_shown` is of a later moment."""

    kvpipe: str = Field(description="kvpipe's version.")
    engine: str = Field(description="The engine's name: `engine_name`, or a name made of its model and host.")
    up_s: float = Field(description="Seconds since the engine's start.")
    namespace: str = Field(description="The namespace of the engine's chunks in tiers; empty: tiers are not used.")
    step: int = Field(description="Number of steps that were planned so far.")
    switches: SwitchStates = Field(description="The switches that are on.")
    saving: bool = Field(description="Whether units that become final are saved.")
    pool: PoolState = Field(description="The pool of a rank, and its leases.")
    requests: int = Field(description="Number of requests that have not finished.")
    requests_shown: list[RequestHolds] = Field(
        description="The slowest requests first: requests without an answer token by their age, then the others "
        "by seconds per token."
    )
    jobs: JobCounts = Field(description="Copies and tier orders that are in flight.")
    traffic: Traffic = Field(description="Tokens that were hit and missed, since the engine's start.")
    tiers: list[TierState] = Field(description="The tiers, nearest first.")
    adapters: list[AdapterHeld] = Field(description="The LoRA adapters that ranks hold.")


class Refused(_ToOperator):
    """The reason why a request was refused."""

    error: str = Field(description="The field and the value that were refused, the accepted values, and the remedy.")
