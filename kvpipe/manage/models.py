"""Bodies of requests and answers of the management interface, as OpenAPI describes them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field

TOKENS_MAX: Final = 1 << 18
SALT_CHARS_MAX: Final = 4096

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=SALT_CHARS_MAX)]


class _FromOperator(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _ToOperator(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdapterOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The LoRA adapter of a prompt: vLLM's `lora_name`, `lora_int_id`, `lora_path`."""

    name: Text
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    path: Text


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt without images. All that is given decides under which keys its KV is kept.

    `tokens`: token ids. `cache_salt`: vLLM's of its requests. Read by msgspec: while a long list is read, the engine
    waits for the interpreter: with pydantic several times as long.
    """

    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)
    ]
    cache_salt: Text | None = None
    adapter: AdapterOf | None = None


class PromptLookup(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to look up. `tiers`: ask them, too."""

    tiers: bool = False


class PinOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to pin. `seconds`: for so long at most; the configuration's `manage_pin_s_max` is the most."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class EvictOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to evict, from the chunk on that holds its token `from_token`."""

    from_token: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


class EvictMatching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to evict, whatever its prompts are: what all that is given is true of.

    `cache_salt`, `salt_digest` (see `Holders`), or `no_salt`: of these requests. `adapter`, `adapter_digest`: the name
    of a LoRA adapter, and its bytes, or `no_adapter`. `idle_s`: what nobody holds, and was of no use for so long.
    `all`: everything; it stands alone.
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
    """What the pool has of the requests with one salt and one adapter."""

    salt_digest: str = Field(description="Of their `cache_salt`: `kvpipe cache salt` computes it. Nothing: no salt.")
    adapter: str = Field(description="Their LoRA adapter's name; nothing: none.")
    adapter_digest: str = Field(description="Of its bytes.")
    chunks: int
    bytes: int = Field(description="Of their slots, on the rank that the scheduler knows.")
    held: int = Field(description="Of the chunks, those that somebody reads or writes, or that are pinned.")
    idle_s: float = Field(description="Since any of them was of use, to the second.")


class LeaseHolder(_ToOperator):
    """Who keeps chunks from being evicted by others."""

    holder: str = Field(description="A request, or `pin:` with the number of a pin.")
    kind: str = Field(
        description="`request`: it loads them; `tiers`: it waits for more, or they are being stored; `pin`."
    )
    chunks: int


class Holders(_ToOperator):
    """Who holds the pool, those who hold most first. It was looked at slot by slot while the engine served."""

    chunks: int
    tenants: int = Field(description="Pairs of salt and adapter.")
    tenants_shown: list[TenantHolds]
    chunks_untold: int = Field(description="Of tenants beyond the first 4,096, which are not counted by name.")
    holders: int = Field(description="Requests and pins with leases.")
    holders_shown: list[LeaseHolder]


class WarmOrder(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt to fetch from tiers. `seconds`: it is pinned then, as by a pin order; 0: it is not."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class Pinned(_ToOperator):
    """A prompt that is pinned."""

    pin: int = Field(description="Its number, by which it is given back.")
    tokens: int = Field(description="Tokens from its beginning that could be a hit when it was pinned, and are kept.")
    chunks: int = Field(description="Chunks that it holds.")
    left_s: float = Field(description="Until it ends.")


class PinnedPrompts(_ToOperator):
    """All that is pinned."""

    pins: list[Pinned]
    chunks: int = Field(description="That pins hold; one that several hold counts once.")
    chunks_max: int = Field(description="That they may hold: `manage_pinned_share_max` of the pool.")


class EvictedChunks(_ToOperator):
    """What an eviction has done."""

    chunks: int = Field(description="Chunks that cannot be found any more.")
    held: int = Field(description="Of these, those whose slots are free only when who reads or writes them is done.")
    pins_ended: int = Field(description="Pins that held any of them.")


class Warmed(_ToOperator):
    """A prompt of which tiers were asked."""

    tokens: int = Field(description="Tokens from its beginning that are a hit in memory now for who goes on behind it.")
    fetched_tokens: int = Field(description="Tokens that came from tiers for it.")
    pin: int = Field(description="The number of the pin that holds it; 0: none does.")
    left_s: float = Field(description="Until the pin ends.")


class Pending(_ToOperator):
    """An order that waits for a step of the engine, or is carried out in its steps."""

    order: int = Field(description="Its number: GET /v1/orders/ORDER returns its result.")
    pending: bool = True
    waits_for: str = "the engine's next step: while it has nothing to do it makes none"


class HeldByTier(_ToOperator):
    """How much of a prompt one tier has, whatever else has it."""

    name: str
    held_tokens: int | None = Field(
        description="Tokens from its beginning that this tier could bring alone. Nothing: it is not known."
    )
    unknown: str = Field(description="Why it is not known, or nothing.")


class HeldTokens(_ToOperator):
    """How much of a prompt would be found in memory now."""

    tokens: int = Field(description="Tokens of the prompt.")
    held_tokens: int = Field(
        description="Tokens from its beginning whose KV is in memory, as far as they can be a hit."
    )
    why: str = Field(description="Why it is no more: one of the reasons in docs/tracing.md, or nothing.")
    reach_tokens: int | None = Field(
        default=None,
        description="What memory and the tiers that have answered hold together, if tiers were asked. At least: of one "
        "tier's last chunk it is not asked how much of it another has.",
    )
    tiers: list[HeldByTier] = Field(default=[], description="What each has by itself, if tiers were asked.")


class SwitchStates(_ToOperator):
    """What is switched on and off."""

    freeze: bool = Field(description="Hits are served, nothing new is saved.")
    bypass: bool = Field(description="Nothing is saved or loaded.")


class SetSwitches(_FromOperator):
    """SwitchStates to set; those that are not given stay as they are."""

    freeze: Annotated[bool, Field(strict=True)] | None = None
    bypass: Annotated[bool, Field(strict=True)] | None = None


class QuotaState(_ToOperator):
    """The slots of one quota, docs/quotas.md."""

    name: str
    slots: int = Field(description="Those that hold something of its requests.")
    slots_sure: int = Field(description="Those that nobody else's requests take from it.")
    slots_max: int = Field(description="Those that it may hold.")


class PoolState(_ToOperator):
    """The host pool of each rank, which all hold the same chunks."""

    slots: int = Field(description="Of each rank's pool.")
    slots_ready: int = Field(description="Those whose memory every rank has.")
    slots_used: int = Field(description="Those that hold something.")
    slot_bytes: int = Field(description="Of one slot, on the rank that the scheduler knows.")
    bytes_used: int
    bytes_max: int
    leases: int = Field(description="Chunks held by requests; one that several hold counts several times.")
    oldest_lease_s: float
    pieces_writing: int = Field(description="Pieces of chunks that are being saved or fetched.")
    chunks_pinned: int = Field(description="That operators have pinned.")
    quotas: list[QuotaState] = Field([], description="Who holds the slots that are used; none: there are no quotas.")


class RequestHolds(_ToOperator):
    """One living request."""

    request: str
    lived_s: float = Field(description="Since it came.")
    tokens: int = Field(description="Of its prompt and its answer so far.")
    preemptions: int
    state: str = Field(description="Of its machine, docs/machines/request.md.")
    saving: str = Field(description="Of docs/machines/saving.md.")
    saved_tokens: int = Field(description="Tokens from its beginning that are saved, being saved, or held already.")
    chunks_held: int = Field(description="Leases: of its load, or while it waits for tiers.")
    waits_for_tiers: bool


class JobCounts(_ToOperator):
    """What the ranks have not reported yet."""

    saves: int
    loads: int
    tier_orders: int
    save_bytes: int = Field(description="Of the saves, on the rank that the scheduler knows.")
    load_bytes: int = Field(description="Of the loads, on that rank.")
    tier_bytes_max: int = Field(description="Of the slots that tier orders fill or read: they carry no more.")


class Traffic(_ToOperator):
    """What admissions found, since the engine began. Tokens that vLLM's own prefix cache had are in none of it."""

    hit_tokens: dict[str, int] = Field(description="Tokens that are loaded, by the tier that they came from.")
    missed_tokens: dict[str, int] = Field(description="Tokens that nobody had, by reason: docs/tracing.md.")
    evicted: int = Field(description="Chunks.")
    faults: int = Field(description="Of the scheduler's side: see docs/counters.md.")


class TierState(_ToOperator):
    """One tier, as the scheduler's process sees it."""

    name: str
    kind: str
    breaker: str = Field(description="Of lookups: CLOSED: it is asked; else see docs/machines/breaker.md.")
    left_by_ranks: bool = Field(description="Some rank does not read it for now.")


class AdapterHeld(_ToOperator):
    """An adapter that ranks hold."""

    number: int
    digest: str = Field(description="Of its bytes; empty: ranks differ, or not all have reported.")


class EngineState(_ToOperator):
    """A moment of the engine. Its parts are looked at one after the other while it serves."""

    kvpipe: str = Field(description="Version.")
    engine: str
    up_s: float
    namespace: str = Field(description="Of its chunks in tiers; nothing: tiers are not used.")
    step: int = Field(description="Steps planned so far.")
    switches: SwitchStates
    saving: bool = Field(description="Whether what becomes final is saved.")
    pool: PoolState
    requests: int = Field(description="Living requests.")
    requests_shown: list[RequestHolds]
    jobs: JobCounts
    traffic: Traffic
    tiers: list[TierState]
    adapters: list[AdapterHeld]


class Refused(_ToOperator):
    """Why a request was refused."""

    error: str
