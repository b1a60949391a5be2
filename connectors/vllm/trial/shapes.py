"""The shapes of trials: scheduler, cache groups, ranks, drafts, pool. Shapes are small, so rare events happen often."""

from __future__ import annotations

import functools
import json
import tempfile
from math import gcd, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

import kvpipe.connectors.vllm.tiny.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.connectors.vllm.trial.content import VOCAB

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

BLOCK = 32
INTERLEAVE = 4
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB + 1, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip
MODEL_TOKENS_MAX = 1024
QUOTAS: Final[list[dict[str, Any]]] = [
    {"name": "one", "salt": "1", "share": 0.5, "limit": 0.75},
    {"name": "two", "salt": "2", "share": 0.5},
    {"name": "others", "limit": 0.5},
]


class Connector(NamedTuple):
    """The connector on trial. `extra` is JSON text, so that a `Connector` is hashable."""

    name: str = "KVPipeConnector"
    module: str | None = "kvpipe.connectors.vllm.connector"
    extra: str = "{}"


KVPIPE = Connector()


class Shape(NamedTuple):
    """One engine. `windows` has the sliding window of each cache group in tokens; None is full attention.

    `locals`: groups with local attention. For such a group `windows` has the size of a chunk of local attention.
    `sizes`: tokens per block of each group, if not all groups have `BLOCK`. `hashes`: tokens per block hash, if fewer
    than usual. The usual number is the greatest common divisor of the groups' block sizes. `ranks`: number of ranks; 0:
    the ranks have no connector and no caches, so only the scheduler side is on trial. `asynchronous`: vLLM's
    AsyncScheduler, with two steps in flight. `drafts`: draft tokens per step. `v2`: hooks are called in the order of
    vLLM's second model runner. `deferred`: a step is finalized after its reports, as with a draft model. `drafter`: a
    drafter has its own KV, in the last layer of the first group. The drafter's KV depends on the next token. vLLM's own
    prefix cache is off, because it would give a request KV that depends on another next token. With `states` or `masks`
    the prefix cache is on, but with `states` alone no lookup finds anything in it. `masks`: the drafter is fed context
    (DSpark, DFlash) and has the last layer of the last group. vLLM knows that the group is the drafter's, unless the
    group is the first. The drafter's KV depends on no later token. The drafter's KV is written after the forward, up to
    the last accepted draft. After that position the drafter writes garbage for `masks` tokens. `device`: a device
    orders copies, which complete later. With runner V1 the fence of a step is set in the next step. `graphs`: every
    second step is replayed from a CUDA graph, without hooks. `unhooked`: the first `unhooked` layers of each group call
    no hook. `tiers`: number of dictionaries that the ranks share as tiers. `fresh`: the slots of the ranks' pools
    become ready one by one while steps run. `sibling`: kvpipe is in vLLM's MultiConnector, after a connector whose
    asynchronous loads fail. `events`: vLLM publishes KV cache events, and a router receives the events. `events`
    excludes `states`: vLLM's events of states leave out blocks that vLLM does not keep, but contain the tokens of these
    blocks (`BlockPool.cache_full_blocks`). These events also name parents that no event has announced. `answers`:
    generated tokens are saved, too, not only prompts. `save_steps`: a request's generated tokens are saved only in
    every `save_steps`-th step; None: kvpipe's default, which depends on the number of requests in a step. `priorities`:
    vLLM's priority policy. A request has one of three priorities, by the length of its answer. `states`: the cache
    groups that hold a recurrent state instead of tokens' KV. `dcp`: decode context parallelism over `dcp` ranks. A rank
    holds every `dcp`-th stretch of `INTERLEAVE` tokens of full attention. `whole`: groups of full attention that every
    rank holds completely in spite of `dcp`, as for a drafter that is not MLA. `dense`: vLLM keeps the state of every
    boundary at which a step ends, not only where prompts end or branch. `stages`: number of pipeline stages. Ranks and
    layers are divided among the stages, and layers unevenly. An earlier stage runs ahead of later stages. `hints`:
    requests come with hints for the eviction policy, which counts time in steps. `resumes`: most requests announce when
    they will be resumed. `operators`: operators pin and evict prompts. `warms`: a pin first fetches the prompt's chunks
    from tiers. `quotas`: two salts have a quota each, and all other requests share a third quota. `exports`: layers
    write the state at the end of a prompt's last hash during a step, if that end is a multiple of `exports` tokens from
    the step's start. `undropped`: vLLM does not drop the last block of a hit for a drafter that is fed context: always
    in vLLM 0.33, if configured in 0.32. `long_prefills`: the largest number of tokens of one prefill that a step
    computes if there are other requests; 0: no limit. `branches`: vLLM also keeps the state at which prompts branch
    within a block. `failing`: loads may fail. `failing` is off where vLLM's own recovery is known to give wrong
    answers. `role`: vLLM's `kv_role`. A consumer has a producer, and every move of the consumer is also made on the
    producer. Producer and consumer share the tiers. `slow`: reading the tiers is slower than computing. `fails`: vLLM's
    `kv_load_failure_policy` is `fail`, so vLLM ends a request whose load has failed. `unmet`: the ranks' first reports
    come with the first step, as in an engine. `limits`: requests come with limits on their tokens and on the tiers that
    they load from. `behind`: kvpipe is in vLLM's MultiConnector, before a connector that does what `behind` lists
    (`sibling.DEEDS`). With `sibling`, kvpipe is between two connectors. `cross`: the caches have a cross-layer layout:
    a block has the pages of all layers of its group side by side, and groups overlay each other. `room`: the number of
    values that each tier keeps. A full tier drops its oldest value; 0: no limit. `engines`: 1 or 2 engines on one
    node's memory (`pool: node`); 0: private pools. Every move is made on both engines.
    """

    asynchronous: bool = False
    load: str = "auto"
    mode: str = "layerwise"
    windows: tuple[int | None, ...] = (None,)
    locals: tuple[int, ...] = ()
    layers_per_group: int = 2
    ranks: int = 1
    drafts: int = 0
    drafter: bool = False
    v2: bool = False
    deferred: bool = False
    failing: bool = True
    device: bool = False
    unhooked: int = 0
    graphs: bool = False
    blocks: int = 15
    seqs_max: int = 6
    step_tokens_max: int = 96
    pool_slots: int = 12
    tiers: int = 0
    fresh: bool = False
    policy: str = "lru"
    sibling: bool = False
    events: bool = False
    sizes: tuple[int, ...] = ()
    hashes: int = 0
    priorities: bool = False
    answers: bool = True
    save_steps: int | None = None
    states: tuple[int, ...] = ()
    dense: bool = False
    stages: int = 1
    dcp: int = 1
    masks: int = 0
    hints: bool = False
    whole: tuple[int, ...] = ()
    operators: bool = False
    quotas: bool = False
    exports: int = 0
    warms: bool = False
    undropped: bool = False
    long_prefills: int = 0
    branches: bool = False
    resumes: bool = False
    role: str = "kv_both"
    slow: bool = False
    fails: bool = False
    unmet: bool = False
    behind: str = ""
    cross: bool = False
    limits: bool = False
    room: int = 0
    engines: int = 0

    @property
    def steps_in_flight(self) -> int:
        """The number of steps that vLLM schedules before the results of the first step arrive."""
        if self.stages > 1:
            return self.stages + (self.asynchronous and self.v2)
        return 2 if self.asynchronous else 1

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """The number of tokens per block of each group."""
        return self.sizes or (BLOCK,) * len(self.windows)

    @property
    def unit_tokens(self) -> int:
        """The smallest number of tokens that a hit can have."""
        shards = [self.shards(i) if self.states else 1 for i in range(len(self.windows))]
        return lcm(*(size // n for size, n in zip(self.block_tokens, shards, strict=True)))

    @property
    def whole_tokens(self) -> int:
        """The number of tokens after which blocks of all groups end together."""
        return lcm(*self.block_tokens)

    @property
    def hash_tokens(self) -> int:
        """The number of tokens per block hash."""
        return self.hashes or gcd(*self.block_tokens)

    def shards(self, group: int) -> int:
        """Return the number of ranks among which the tokens of a block of `group` are divided."""
        return self.dcp if self.windows[group] is None and group not in (*self.states, *self.whole) else 1

    def blocks_of(self, tokens: int) -> int:
        """Return the largest number of blocks that one request of `tokens` tokens holds."""
        return sum(
            -(-(tokens if window is None else min(tokens, window + self.step_tokens_max + size)) // size)
            for window, size in zip(self.windows, self.block_tokens, strict=True)
        )

    @property
    def async_loads(self) -> bool:
        """Whether kvpipe may load between steps.

        With `auto`, kvpipe loads between steps as soon as other requests run, even in an engine with one cache group.
        """
        return self.load != "sync"

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank * self.stages // max(1, self.ranks)

    def layer_names(self, rank: int = 0) -> list[list[str]]:
        """Return the names of each group's layers on a rank. The last stage has more layers than the first stage."""
        stage = self.stage_of(rank)
        bounds = [self.layers_per_group * at**2 // self.stages**2 for at in (stage, stage + 1)]
        return [[f"g{g}.l{i}" for i in range(*bounds)] for g in range(len(self.windows))]

    def kvpipe_extra(self) -> dict[str, Any]:
        """Return kvpipe's configuration."""
        slot_bytes = max(4096, self.layers_per_group * 4 * self.unit_tokens * 8)
        return {
            "pool_bytes_max": self.pool_slots * slot_bytes, "chunk_tokens": 4 * self.unit_tokens, "load": self.load,
            "mode": self.mode, "policy": self.policy, "log_level": "error", "stall_ms_max": 0,
            "lookup_ms_max": 600_000, "store_idle_s_max": 86_400, "save_decode": self.answers,
            "save_decode_steps": self.save_steps,
        } | ({"quotas": QUOTAS} if self.quotas else {}) | self._node_extra()  # fmt: skip

    def _node_extra(self) -> dict[str, Any]:
        """Return the keys that differ with a node's memory. Chunks are small, so that requests fill whole chunks."""
        return {"pool": "node", "chunk_tokens": 2 * self.unit_tokens} if self.engines else {}


_HYBRID = Shape(windows=(None, 2 * BLOCK), blocks=24, pool_slots=24, events=True)
_STATES = Shape(windows=(None, None), states=(1,), blocks=24, pool_slots=24)
_TAILS = _HYBRID._replace(windows=(None, BLOCK), sizes=(2 * BLOCK, BLOCK // 2), blocks=24, events=False)
"""A shape with a window that ends within a unit."""
_STAGED_TAILS = _TAILS._replace(ranks=2, stages=2, layers_per_group=4)
_STAGED_DRAFTS: dict[str, Any] = {
    "asynchronous": True, "v2": True, "ranks": 2, "stages": 2, "layers_per_group": 4, "drafts": 3, "deferred": True,
    "drafter": True, "mode": "auto",
}  # fmt: skip
_DRAFTED_STATES = _STATES._replace(drafts=2, deferred=True, drafter=True, mode="auto", dense=True, blocks=36)
_DIVIDED_STATES = _STATES._replace(sizes=(2 * BLOCK, BLOCK), ranks=2, dcp=2)
"""A shape in which a block of attention is two blocks of states."""
_DIVIDED_DRAFTER = Shape(ranks=2, dcp=2, v2=True, drafts=2, deferred=True, drafter=True, mode="auto", failing=False)
_DIVIDED_STATES_DRAFTER = _DRAFTED_STATES._replace(sizes=(2 * BLOCK, BLOCK), ranks=2, dcp=2, v2=True)
_DIVIDED_STATES_MASKS = _DIVIDED_STATES_DRAFTER._replace(
    windows=(None, None, None), sizes=(2 * BLOCK, BLOCK, 2 * BLOCK), drafts=3, masks=3, blocks=48
)
SHAPES: dict[str, Shape] = {
    "sync": Shape(load="sync"),
    "async-load": Shape(load="async", policy="s3fifo", events=True),
    "step-mode": Shape(load="sync", mode="step"),
    "whole-blocks": Shape(load="sync", mode="step", cross=True, layers_per_group=4, ranks=2, tiers=1),
    "async-scheduler-whole-blocks": _HYBRID._replace(
        asynchronous=True, v2=True, ranks=2, device=True, mode="step", cross=True, tiers=1, events=False
    ),
    "either-load": Shape(load="auto", policy="sessions"),
    "hybrid": _HYBRID,
    "window": Shape(windows=(2 * BLOCK,)),
    "local": _HYBRID._replace(windows=(None, 3 * BLOCK), locals=(1,)),
    "async-scheduler-local": _HYBRID._replace(windows=(None, 3 * BLOCK), locals=(1,), asynchronous=True, events=False),
    "block-sizes": Shape(windows=(None, 2 * BLOCK), sizes=(2 * BLOCK, BLOCK), blocks=24, pool_slots=12, events=True),
    "hash-blocks": _HYBRID._replace(hashes=BLOCK // 2),
    "prompts-only": Shape(answers=False, ranks=2),
    "every-step-saves": Shape(load="sync", save_steps=1),
    "grouped-saves": Shape(load="sync", save_steps=5),
    "async-scheduler-grouped-saves": Shape(asynchronous=True, load="async", device=True, save_steps=32),
    "priorities": Shape(priorities=True, events=True),
    "async-scheduler-priorities": Shape(asynchronous=True, load="async", priorities=True),
    "fresh-pool": Shape(ranks=2, fresh=True),
    "device-order": Shape(load="sync", device=True, layers_per_group=4),
    "graphs": Shape(load="sync", graphs=True),
    "async-scheduler-graphs": Shape(asynchronous=True, graphs=True, v2=True, device=True, failing=False),
    "unhooked": Shape(load="sync", layers_per_group=4, unhooked=2, v2=True),
    "async-scheduler-unhooked": Shape(asynchronous=True, device=True, layers_per_group=3, unhooked=1, failing=False),
    "two-ranks": Shape(load="sync", ranks=2, layers_per_group=4, events=True),
    "two-ranks-async-load": Shape(load="async", ranks=2, v2=True),
    "drafts": Shape(load="sync", drafts=3, deferred=True),
    "drafts-async-load": Shape(load="async", drafts=2, ranks=2),
    "drafter": Shape(drafts=2, deferred=True, drafter=True, mode="auto", failing=False),
    "async-scheduler-drafter": _HYBRID._replace(
        asynchronous=True, drafts=3, v2=True, drafter=True, mode="auto", events=False
    ),
    "async-scheduler": Shape(asynchronous=True, load="sync", failing=False),
    "async-scheduler-v2": Shape(asynchronous=True, load="sync", failing=False, v2=True),
    "async-scheduler-async-load": Shape(asynchronous=True, load="async"),
    "async-scheduler-device-order": Shape(asynchronous=True, load="async", device=True),
    "async-scheduler-either-load": Shape(
        asynchronous=True, load="auto", ranks=2, failing=False, device=True, pool_slots=24
    ),
    "async-scheduler-drafts": Shape(asynchronous=True, load="async", drafts=3, v2=True),
    "async-scheduler-hybrid": _HYBRID._replace(asynchronous=True, ranks=2, policy="sessions"),
    "sibling": Shape(sibling=True, tiers=1, policy="sessions", pool_slots=6),
    "sibling-async-load": Shape(sibling=True, load="async", asynchronous=True),
    "sibling-behind": Shape(
        behind="shakes waits keeps returns prefills fails", tiers=1, policy="sessions", pool_slots=6, unmet=True
    ),
    "two-siblings": Shape(
        sibling=True, behind="waits keeps returns prefills", load="async", asynchronous=True, ranks=2, unmet=True
    ),
    "tier": Shape(tiers=1, pool_slots=6, events=True),
    "small-tiers": Shape(tiers=2, ranks=2, load="async", pool_slots=6, events=True, room=12),
    "slow-tier": Shape(tiers=1, pool_slots=6, slow=True),
    "tier-fresh-pool": Shape(asynchronous=True, tiers=1, fresh=True, failing=False),
    "two-tiers": Shape(tiers=2, ranks=2, load="async", policy="sessions", pool_slots=6),
    "async-scheduler-tier": Shape(
        asynchronous=True, load="auto", tiers=1, failing=False, policy="s3fifo", pool_slots=6
    ),
    "states": _STATES,
    "window-and-states": _STATES._replace(windows=(None, 2 * BLOCK, None), states=(2,), blocks=36, dense=True),
    "async-scheduler-states": _STATES._replace(
        asynchronous=True, ranks=2, device=True, dense=True, policy="sessions"
    ),
    "tier-states": _STATES._replace(tiers=1, dense=True, pool_slots=16),
    "tier-hybrid": _HYBRID._replace(tiers=1, policy="sessions", pool_slots=12),
    "pipeline-2": Shape(load="async", ranks=2, stages=2, layers_per_group=8, tiers=1, pool_slots=12),
    "async-scheduler-pipeline-2": _HYBRID._replace(
        asynchronous=True, v2=True, ranks=2, stages=2, layers_per_group=4, events=False
    ),
    "tails": _TAILS,
    "async-scheduler-tails-drafter": _TAILS._replace(
        windows=(BLOCK, None),
        sizes=(BLOCK // 2, 2 * BLOCK),
        asynchronous=True,
        v2=True,
        drafts=3,
        drafter=True,
        mode="auto",
    ),
    "async-scheduler-tails": _TAILS._replace(asynchronous=True, ranks=2, tiers=1, policy="sessions"),
    "context-parallel": Shape(ranks=2, dcp=2, events=True),
    "async-scheduler-context-parallel": _HYBRID._replace(asynchronous=True, ranks=2, dcp=2, events=False, tiers=1),
    "pipeline-2-context-parallel": Shape(load="async", ranks=4, stages=2, layers_per_group=4, dcp=2),
    "states-drafter": _DRAFTED_STATES,
    "async-scheduler-states-drafter": _DRAFTED_STATES._replace(asynchronous=True, v2=True, deferred=False, drafts=3),
    "masks": Shape(drafts=3, deferred=True, drafter=True, masks=4, mode="auto", failing=False),
    "async-scheduler-masks": _HYBRID._replace(
        asynchronous=True, v2=True, drafts=3, drafter=True, masks=3, mode="auto", events=False
    ),
    "states-masks": _DRAFTED_STATES._replace(windows=(None, None, None), drafts=3, masks=3, blocks=48),
    "async-scheduler-states-masks": _DRAFTED_STATES._replace(
        windows=(None, None, None), asynchronous=True, v2=True, deferred=False, drafts=3, masks=3, blocks=48
    ),
    "states-context-parallel": _DIVIDED_STATES._replace(tiers=1),
    "async-scheduler-states-context-parallel": _DIVIDED_STATES._replace(
        asynchronous=True, v2=True, dense=True, device=True
    ),
    "pipeline-2-states-context-parallel": _DIVIDED_STATES._replace(ranks=4, stages=2, layers_per_group=4, blocks=16),
    "async-scheduler-pipeline-2-states": _STATES._replace(
        asynchronous=True, v2=True, ranks=2, stages=2, layers_per_group=4, dense=True
    ),
    "pipeline-2-tails": _STAGED_TAILS._replace(tiers=1),
    "async-scheduler-pipeline-2-drafter": _STAGED_TAILS._replace(
        asynchronous=True, v2=True, drafts=2, deferred=True, drafter=True, mode="auto", blocks=36
    ),
    "hints": Shape(asynchronous=True, load="async", policy="sessions", pool_slots=6, hints=True),
    "context-parallel-drafter": _DIVIDED_DRAFTER,
    "async-scheduler-context-parallel-drafter": _HYBRID._replace(
        asynchronous=True, v2=True, ranks=2, dcp=2, drafts=3, drafter=True, mode="auto", events=False
    ),
    "context-parallel-masks": _DIVIDED_DRAFTER._replace(drafts=3, masks=3),
    "async-scheduler-context-parallel-masks": _HYBRID._replace(
        windows=(None, None), sizes=(2 * BLOCK, BLOCK), whole=(1,), asynchronous=True, v2=True, ranks=2, dcp=2,
        drafts=3, drafter=True, masks=4, mode="auto", events=False, tiers=1,
    ),
    "states-context-parallel-drafter": _DIVIDED_STATES_DRAFTER,
    "async-scheduler-states-context-parallel-drafter": _DIVIDED_STATES_DRAFTER._replace(
        asynchronous=True, deferred=False, drafts=3
    ),
    "states-context-parallel-masks": _DIVIDED_STATES_MASKS._replace(tiers=1),
    "async-scheduler-states-context-parallel-masks": _DIVIDED_STATES_MASKS._replace(
        sizes=(2 * BLOCK, BLOCK, BLOCK), whole=(2,), asynchronous=True, deferred=False, device=True
    ),
    "async-scheduler-pipeline-2-masks": _HYBRID._replace(masks=4, events=False, **_STAGED_DRAFTS),
    "async-scheduler-pipeline-2-states-drafter": _STATES._replace(blocks=36, **_STAGED_DRAFTS),
    "async-scheduler-pipeline-2-states-masks": _STATES._replace(
        windows=(None, None, None), masks=3, blocks=48, **_STAGED_DRAFTS
    ),
    "async-scheduler-pipeline-2-states-context-parallel-masks": _DIVIDED_STATES_MASKS._replace(
        dense=False, **_STAGED_DRAFTS | {"ranks": 4}
    ),
    "operators": _HYBRID._replace(tiers=1, pool_slots=12, operators=True),
    "async-scheduler-operators": _STATES._replace(asynchronous=True, ranks=2, pool_slots=16, operators=True),
    "states-hash-blocks": _STATES._replace(hashes=BLOCK // 4),
    "async-scheduler-states-hash-blocks": _STATES._replace(
        hashes=BLOCK // 4, asynchronous=True, v2=True, ranks=2, device=True, dense=True, tiers=1
    ),
    "states-context-parallel-hash-blocks": _DIVIDED_STATES._replace(hashes=BLOCK // 4),
    "quotas": _HYBRID._replace(tiers=1, pool_slots=8, policy="sessions", operators=True, quotas=True),
    "states-exported": _STATES._replace(hashes=BLOCK // 4, exports=BLOCK // 2),
    "async-scheduler-states-exported": _DIVIDED_STATES._replace(
        hashes=BLOCK // 4, exports=BLOCK // 4, asynchronous=True, v2=True, device=True, dense=True, tiers=1
    ),
    "states-drafter-within-blocks": _DRAFTED_STATES._replace(hashes=BLOCK // 4),
    "states-masks-exported": _DIVIDED_STATES_MASKS._replace(hashes=BLOCK // 4, exports=BLOCK // 2, tiers=1),
    "async-scheduler-states-masks-exported": _DIVIDED_STATES_MASKS._replace(
        hashes=BLOCK // 4, exports=BLOCK // 4, asynchronous=True, deferred=False, device=True
    ),
    "async-scheduler-pipeline-2-states-masks-exported": _DIVIDED_STATES_MASKS._replace(
        hashes=BLOCK // 4, exports=BLOCK // 4, dense=False, **_STAGED_DRAFTS | {"ranks": 4}
    ),
    "warmed": _HYBRID._replace(tiers=2, pool_slots=8, policy="sessions", operators=True, quotas=True, warms=True),
    "async-scheduler-warmed": _STATES._replace(
        asynchronous=True, ranks=2, tiers=1, pool_slots=8, operators=True, warms=True
    ),
    "states-masks-undropped": _DIVIDED_STATES_MASKS._replace(undropped=True, tiers=1),
    "async-scheduler-states-masks-undropped": _DIVIDED_STATES_MASKS._replace(
        hashes=BLOCK // 4, exports=BLOCK // 4, asynchronous=True, deferred=False, device=True, undropped=True
    ),
    "priorities-long-prefills": Shape(priorities=True, long_prefills=2 * BLOCK),
    "async-scheduler-priorities-long-prefills": _HYBRID._replace(
        asynchronous=True, v2=True, drafts=3, load="async", priorities=True, long_prefills=2 * BLOCK, events=False
    ),
    "announced": _HYBRID._replace(tiers=1, pool_slots=12, hints=True, resumes=True, operators=True, warms=True),
    "async-scheduler-announced": _STATES._replace(
        asynchronous=True, ranks=2, tiers=2, pool_slots=8, policy="sessions", hints=True, resumes=True, quotas=True,
        dense=True,
    ),
    "producer": Shape(role=PRODUCER, tiers=1, pool_slots=6, events=True),
    "async-scheduler-producer": _HYBRID._replace(
        role=PRODUCER, asynchronous=True, v2=True, ranks=2, tiers=1, pool_slots=12, events=False
    ),
    "consumer": Shape(role=CONSUMER, load="async", tiers=1, events=True),
    "async-scheduler-consumer": _STATES._replace(
        role=CONSUMER, asynchronous=True, ranks=2, tiers=1, dense=True, pool_slots=16, policy="sessions"
    ),
    "limits": _HYBRID._replace(tiers=2, pool_slots=8, limits=True),
    "async-scheduler-limits": _STATES._replace(
        asynchronous=True, ranks=2, tiers=2, dense=True, pool_slots=16, limits=True
    ),
    "node": Shape(engines=2, pool_slots=40, policy="sessions", events=True, operators=True),
    "async-scheduler-node": _HYBRID._replace(
        engines=2, asynchronous=True, v2=True, ranks=2, device=True, pool_slots=60, operators=True
    ),
    "node-tiers": Shape(engines=2, pool_slots=40, policy="sessions", tiers=1, events=True, operators=True, warms=True),
    "async-scheduler-node-tiers": _HYBRID._replace(
        engines=2, asynchronous=True, v2=True, ranks=2, pool_slots=60, tiers=2
    ),
}  # fmt: skip

# Most shapes save generated tokens with kvpipe's default. The following shapes have explicit settings.
for _name in (
    "two-ranks", "two-tiers", "tier", "drafts", "drafter", "device-order", "priorities", "fresh-pool", "limits",
    "context-parallel", "states-exported", "pipeline-2", "sibling", "async-scheduler-v2", "async-scheduler-hybrid",
    "async-scheduler-device-order", "async-scheduler-tier", "async-scheduler-masks", "async-scheduler-node",
    "async-scheduler-pipeline-2-states", "async-scheduler-graphs", "hybrid", "sibling-behind",
    "hash-blocks", "async-scheduler-drafts", "window",
):  # fmt: skip
    SHAPES[_name] = SHAPES[_name]._replace(save_steps=1)
for _name in (
    "async-scheduler-local", "async-scheduler-priorities", "async-scheduler-states", "async-scheduler-pipeline-2",
):  # fmt: skip
    SHAPES[_name] = SHAPES[_name]._replace(save_steps=3)


def _beside(shape: Shape, connector: Connector, extra: dict[str, Any]) -> tuple[Connector, dict[str, Any]]:
    """Return a MultiConnector and its configuration.

    The MultiConnector contains `connector`, and the siblings that vLLM asks before and after `connector`.
    """
    before = "fails" if "shakes" in shape.behind else "fails shakes"
    does = [before] * shape.sibling, [shape.behind] * bool(shape.behind)
    siblings = [
        [
            Connector("SiblingConnector", "kvpipe.connectors.vllm.trial.sibling", json.dumps({"does": what}))
            for what in one
        ]
        for one in does
    ]
    configured = [
        {
            "kv_connector": one.name, "kv_role": shape.role, "kv_connector_module_path": one.module,
            "kv_connector_extra_config": (extra if one is connector else {}) | json.loads(one.extra),
        }
        for one in (*siblings[0], connector, *siblings[1])
    ]  # fmt: skip
    return Connector("MultiConnector", None), {"connectors": configured}


def make_cache(shape: Shape, rank: int = 0) -> KVCacheConfig:
    """Return vLLM's configuration of a rank's cache groups. The scheduler gets the configuration of the first rank."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs: list[KVCacheSpec] = [
        FullAttentionSpec(block_size=size // shape.shards(i), **common, dcp_sharded=i not in shape.whole)
        if window is None
        else ChunkedLocalAttentionSpec(block_size=size, **common, attention_chunk_size=window)
        if i in shape.locals
        else SlidingWindowSpec(block_size=size, **common, sliding_window=window, dcp_sharded=shape.dcp == 1)
        for i, (window, size) in enumerate(zip(shape.windows, shape.block_tokens, strict=True))
    ]
    for i in shape.states:
        size = shape.block_tokens[i]
        specs[i] = MambaSpec(
            block_size=size, shapes=((size,), (size,)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align",
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN, num_speculative_blocks=shape.drafts,
            num_prefill_checkpoint_blocks=int(shape.exports > 0), prefill_checkpoint_alignment=shape.exports or None,
        )  # fmt: skip
    groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(shape.layer_names(rank), specs, strict=True)]
    cache = KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    cache.hash_block_size = shape.hash_tokens
    cache.cache_hit_alignment_tokens = shape.hash_tokens if shape.states else shape.whole_tokens
    cache.prefix_cache_retention_interval = 0 if shape.states and not shape.dense else None
    return cache


@functools.cache
def _second_runners() -> type:
    """Return vLLM's configuration of an engine whose ranks are runner V2. On a CPU, vLLM itself would choose V1."""
    from vllm.config import VllmConfig

    return type("SecondRunners", (VllmConfig,), {"use_v2_model_runner": True})


@functools.cache
def make_configs(shape: Shape, connector: Connector = KVPIPE) -> tuple[Any, Any]:
    """Return vLLM's (VllmConfig, KVCacheConfig) for `shape`. All engines of this shape share the two objects."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    cache = make_cache(shape)
    extra = shape.kvpipe_extra() if connector.name == KVPIPE.name else {}
    if shape.sibling or shape.behind:
        connector, extra = _beside(shape, connector, extra)
    with tempfile.TemporaryDirectory(prefix="kvpipe-trial-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MODEL_TOKENS_MAX
        )
        drafts: Any = None
        if shape.drafts:
            drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=shape.drafts, prompt_lookup_max=3)
        config = VllmConfig(
            model_config=model,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=shape.seqs_max,
                max_num_batched_tokens=shape.step_tokens_max,
                max_model_len=MODEL_TOKENS_MAX,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                policy="priority" if shape.priorities else "fcfs",
                long_prefill_token_threshold=shape.long_prefills,
            ),
            cache_config=CacheConfig(
                block_size=shape.block_tokens[0] // shape.dcp,
                enable_prefix_caching=not shape.drafter or bool(shape.states or shape.masks),
            ),
            speculative_config=drafts,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=shape.events, publisher="null"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=connector.name,
                kv_role=shape.role,
                kv_connector_module_path=connector.module,
                kv_load_failure_policy="fail" if shape.fails else "recompute",
                kv_connector_extra_config=extra | json.loads(connector.extra),
            ),
        )
    if shape.drafter:
        drafts.method, drafts.draft_model_config = "eagle", model
    if shape.masks:  # the number of masks is the number of drafts, or one more for the sampled token
        drafts.method = "dflash" if shape.masks > shape.drafts else "dspark"
        drafts.disable_eagle_block_drop = shape.undropped
        cache.kv_cache_groups[-1].is_eagle_group = len(shape.windows) > 1 and drafts.use_eagle_block_drop()
    # vLLM's CPU platform turns asynchronous scheduling off for its own runner, but the scheduler supports it
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.num_gpu_blocks = shape.blocks
    config.cache_config.prefix_cache_retention_interval = cache.prefix_cache_retention_interval
    config.cache_config.mamba_cache_mode = "align" if shape.states else "none"
    config.cache_config.enable_mamba_shared_prefix_checkpoint = shape.branches
    parallel = config.parallel_config
    parallel.world_size, parallel.pipeline_parallel_size = max(1, shape.ranks), shape.stages
    parallel.tensor_parallel_size = max(1, shape.ranks) // shape.stages
    parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size = shape.dcp, INTERLEAVE
    if shape.v2:
        config.__class__ = _second_runners()
    return config, cache
