"""Bodies of the management interface's requests and responses, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field

TOKENS_MAX: Final = 1 << 18
SALT_CHARS_MAX: Final = 4096

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=SALT_CHARS_MAX)]


class _ToOperator(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AdapterOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The LoRA adapter of a prompt: vLLM's `lora_name`, `lora_int_id`, `lora_path`."""

    name: Text
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    path: Text


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt without images. All its fields decide under which keys its KV is kept.

    `tokens`: token ids. `cache_salt`: that of its requests in vLLM. Parsed by msgspec, because the engine waits for the
    interpreter while a long list is parsed, and pydantic takes several times as long.
    """

    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)
    ]
    cache_salt: Text | None = None
    adapter: AdapterOf | None = None


class PromptLookup(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to look up. `tiers`: ask the tiers, too."""

    tiers: bool = False


class PinOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to pin for at most `seconds`, which the configuration's `manage_pin_s_max` limits."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class EvictOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to evict, from the chunk on that holds its token `from_token`."""

    from_token: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


class EvictMatching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which chunks to evict, whatever their prompts: those for which every given field holds.

    `cache_salt`, `salt_digest` (see `Holders`) or `no_salt`: of requests with this salt, or with none. `adapter`,
    `adapter_digest` or `no_adapter`: of a LoRA adapter with this name, with this digest of its bytes, or of none.
    `idle_s`: chunks that nobody holds and that were not used for so many seconds. `all`: everything; no other field
    may be given then.
    """

    cache_salt: Text | None = None
    salt_digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] | None = None
    no_salt: bool = False
    adapter: Text | None = None
    adapter_digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{2,128}$")] | None = None
    no_adapter: bool = False
    idle_s: Annotated[float, msgspec.Meta(ge=1, le=1e9)] | None = None
    all: bool = False


class TenantHolds(_ToOperator):
    """The chunks in the pool of requests with one salt and one adapter."""

    salt_digest: str = Field(description="Digest of their `cache_salt`, as of `kvpipe cache salt`; empty: no salt.")
    adapter: str = Field(description="Their LoRA adapter's name; empty: none.")
    adapter_digest: str = Field(description="Digest of the adapter's bytes.")
    chunks: int
    bytes: int = Field(description="Of the chunks' slots, on the rank that the scheduler knows.")
    held: int = Field(description="Of the chunks, those that are read, written or pinned.")
    idle_s: float = Field(description="Seconds since the last use of any of them, to the second; 0: one is held.")


class LeaseHolder(_ToOperator):
    """A holder of leases: its chunks are not evicted."""

    holder: str = Field(description="A request's id, `pin:` with the number of a pin, `stores` or `warm`.")
    kind: str = Field(
        description="`request`: it loads them; `tiers`: it waits for more, or they are being stored; `pin`."
    )
    chunks: int


class Holders(_ToOperator):
    """Who uses the pool, those with most chunks first. Counted slot by slot while the engine serves."""

    chunks: int
    tenants: int = Field(description="Pairs of salt and adapter.")
    tenants_shown: list[TenantHolds]
    chunks_unnamed: int = Field(description="Of tenants beyond the first 4,096, which are not counted by name.")
    holders: int = Field(description="Requests and pins with leases.")
    holders_shown: list[LeaseHolder]


class WarmOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to fetch from tiers. `seconds`: how long to pin it after that; 0: it is not pinned."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class Pinned(_ToOperator):
    """A pin on a prompt."""

    pin: int = Field(description="The pin's number, for DELETE /v1/pins/PIN.")
    tokens: int = Field(description="Tokens from the prompt's beginning that were a hit when it was pinned, and stay.")
    chunks: int = Field(description="Chunks that it holds.")
    left_s: float = Field(description="Seconds until the pin ends.")


class PinnedPrompts(_ToOperator):
    """All pins."""

    pins: list[Pinned]
    chunks: int = Field(description="Chunks that pins hold; one that several pins hold counts once.")
    chunks_max: int = Field(description="Chunks that pins may hold: `manage_pinned_share_max` of the pool.")


class EvictedChunks(_ToOperator):
    """The result of an eviction."""

    chunks: int = Field(description="Chunks that cannot be found any more.")
    held: int = Field(description="Of these, those whose slots are free only when their readers and writers are done.")
    pins_ended: int = Field(description="Pins that held any of them, and have ended.")


class Warmed(_ToOperator):
    """The result of a warm order."""

    tokens: int = Field(description="Tokens from its beginning that are a hit in memory now, for a longer prompt.")
    fetched_tokens: int = Field(description="Tokens that were fetched from tiers for it.")
    pin: int = Field(description="The number of the pin that holds it; 0: it is not pinned.")
    left_s: float = Field(description="Seconds until the pin ends.")


class Pending(_ToOperator):
    """An order that is not carried out yet: the engine's next steps do that."""

    order: int = Field(description="The order's number, for GET /v1/orders/ORDER, which returns its result.")
    pending: bool = True
    waits_for: str = "the engine's next step: while it has nothing to do it makes none"


class HeldByTier(_ToOperator):
    """How much of a prompt one tier holds by itself."""

    name: str
    held_tokens: int | None = Field(
        description="Tokens from the prompt's beginning that this tier alone could serve. Null: not known."
    )
    unknown: str = Field(description="Why it is not known; empty if it is.")


class HeldTokens(_ToOperator):
    """How much of a prompt a lookup would find now."""

    tokens: int = Field(description="Tokens of the prompt.")
    held_tokens: int = Field(
        description="Tokens from its beginning whose KV is in memory, as far as they can be a hit."
    )
    why: str = Field(description="Why there are no more: a reason of docs/tracing.md; empty if all are held.")
    reach_tokens: int | None = Field(
        default=None,
        description="Tokens that memory and the tiers that have answered hold together; null: tiers were not asked. A "
        "lower bound: where one tier's last chunk ends early, the others are not asked for its rest.",
    )
    tiers: list[HeldByTier] = Field(default=[], description="What each tier holds by itself, if tiers were asked.")


class SwitchStates(_ToOperator):
    """The switches."""

    freeze: bool = Field(description="Hits are served, nothing new is saved.")
    bypass: bool = Field(description="Nothing is saved or loaded.")


class SetSwitches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Switches to set; those that are not given stay as they are."""

    freeze: bool | None = None
    bypass: bool | None = None


class QuotaState(_ToOperator):
    """The slots of one quota, docs/quotas.md."""

    name: str
    slots: int = Field(description="Slots that its requests' chunks use.")
    slots_sure: int = Field(description="Slots that are guaranteed to it.")
    slots_max: int = Field(description="Slots that it may use at most.")


class PoolState(_ToOperator):
    """The host pool of a rank; all ranks' pools hold the same chunks."""

    slots: int = Field(description="Slots of each rank's pool.")
    slots_ready: int = Field(description="Slots that may be used: every rank has their memory, or has it to spare.")
    slots_used: int = Field(description="Slots that are not free.")
    slot_bytes: int = Field(description="Bytes of one slot, on the rank that the scheduler knows.")
    bytes_used: int
    bytes_max: int
    leases: int = Field(description="Leases on chunks; a chunk that several requests hold counts several times.")
    oldest_lease_s: float = Field(description="Age of the oldest lease in seconds; 0: there is none.")
    pieces_writing: int = Field(description="Pieces of chunks that are being saved or fetched.")
    chunks_pinned: int = Field(description="Chunks that operators have pinned.")
    quotas: list[QuotaState] = Field([], description="The used slots by quota; empty: there are no quotas.")


def slowness(lived_s: float, answer_tokens: int) -> tuple[bool, float]:
    """How slow a request is, for comparisons: whether it has no token of its answer yet, and its seconds per token."""
    return not answer_tokens, lived_s / max(1, answer_tokens)


class RequestHolds(_ToOperator):
    """One request that is not finished."""

    request: str = Field(description="Its id.")
    lived_s: float = Field(description="Seconds since it arrived.")
    tokens: int = Field(description="Tokens of its prompt and of its answer so far.")
    answer_tokens: int = Field(description="Of these, those of its answer.")
    preemptions: int
    state: str = Field(description="Its state in the machine of docs/machines/request.md.")
    saving: str = Field(description="Its state in the machine of docs/machines/saving.md.")
    saved_tokens: int = Field(description="Tokens from its beginning that are saved, being saved, or held already.")
    chunks_held: int = Field(description="Leases of its load, or of its stage while it waits for tiers.")
    waits_for_tiers: bool


class JobCounts(_ToOperator):
    """Jobs and tier orders that not all ranks have reported yet."""

    saves: int
    loads: int
    tier_orders: int
    save_bytes: int = Field(description="Bytes that the saves copy, on the rank that the scheduler knows.")
    load_bytes: int = Field(description="Bytes that the loads copy, on that rank.")
    tier_bytes_max: int = Field(description="Bytes of the slots that tier orders fill or read: an upper bound.")


class Traffic(_ToOperator):
    """Totals over all admissions since the engine's start, without the tokens of vLLM's own prefix cache."""

    hit_tokens: dict[str, int] = Field(description="Tokens that were loaded, by the tier that they came from.")
    missed_tokens: dict[str, int] = Field(description="Tokens that were not found, by reason: docs/tracing.md.")
    evicted: int = Field(description="Chunks that were evicted.")
    faults: int = Field(description="Faults of the scheduler side: see docs/counters.md.")


class TierState(_ToOperator):
    """One tier, as the scheduler's process sees it."""

    name: str
    kind: str
    breaker: str = Field(description="State of its breaker for lookups (docs/machines/breaker.md); CLOSED: it is used.")
    left_by_ranks: bool = Field(description="Whether some rank does not read it at present.")
    read_bytes_per_s: float = Field(0.0, description="Of its reads, on the slowest rank, of late; 0: not known.")
    slow: bool = Field(
        default=False, description="Whether requests do without it: the engine computes sooner than it is read."
    )


class AdapterHeld(_ToOperator):
    """An adapter that ranks hold."""

    number: int = Field(description="vLLM's `lora_int_id`.")
    digest: str = Field(description="Digest of its bytes; empty: ranks differ, or not all have reported.")


class EngineState(_ToOperator):
    """The state of the engine. Its parts are read one after the other while it serves."""

    kvpipe: str = Field(description="kvpipe's version.")
    engine: str = Field(description="The engine's name, as in traces.")
    up_s: float = Field(description="Seconds since the engine's start.")
    namespace: str = Field(description="The namespace of its chunks in tiers; empty: tiers are not used.")
    step: int = Field(description="Steps planned so far.")
    switches: SwitchStates
    saving: bool = Field(description="Whether units that become final are saved.")
    pool: PoolState
    requests: int = Field(description="Requests that are not finished.")
    requests_shown: list[RequestHolds] = Field(
        description="The slowest first: those without a token of their answer by their age, then by seconds per token."
    )
    jobs: JobCounts
    traffic: Traffic
    tiers: list[TierState]
    adapters: list[AdapterHeld]


class Refused(_ToOperator):
    """Why a request was refused."""

    error: str
