"""A scheduler side in a world of plain namespaces, which stand in for vLLM's objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvpipe.cache.chunks import Chunk
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.engine_protocols import ManagedBlocks, Remedies
from kvpipe.connectors.vllm.remedies.admission import LoadAdmission
from kvpipe.node.client import NodePool
from kvpipe.protocol.engine import LATER, SpansOf
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, Report, Tally, TierOrder
from kvpipe.scheduler.hooks import EngineFacts, EngineHooks
from kvpipe.scheduler.records import BEYOND_TOKENS
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.tiers.guard import GuardedTier
from kvpipe.trace.recorder import OFF, Recorder

UNIT = 16
GROUP_BYTES = 4
"""The number of bytes at the end of a key of vLLM's prefix cache, after the block's hash, that name the group."""
SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


class TableEntry(NamedTuple):
    """A block, as a block table stores it."""

    block_id: int
    is_null: bool


class PlayedBlocks(ManagedBlocks):
    """The block tables of a fake cache manager, made without vLLM."""

    def knows(self, block_id: int, key: bytes) -> bool:
        """Whether vLLM's prefix cache has a block under `key`."""
        known = self._manager.block_pool.blocks[block_id].block_hash
        return known is not None and known[:-GROUP_BYTES] == key


class CountingIndex(dict[bytes, Chunk]):
    """An index that counts the lookups in it."""

    probes = 0

    def __contains__(self, key: object) -> bool:
        """Count the lookup, and return whether the index has the key."""
        self.probes += 1
        return super().__contains__(key)

    def get(self, key: bytes, default: Any = None) -> Any:
        """Count the lookup, and return the entry."""
        self.probes += 1
        return super().get(key, default)


def geometry_of_windows(
    windows: tuple[int | None, ...],
    chunk_units: int,
    slots: int,
    states: tuple[int, ...] = (),
    ahead_tokens: int = 0,
    dropped_units: int = 0,
) -> Geometry:
    """Return a geometry with one group per window, in chunks of `chunk_units` units.

    `states` are the groups of states.
    """
    groups = tuple(Group((Layer(f"l{i}", 64),), UNIT, window, i in states) for i, window in enumerate(windows))
    return Geometry(groups, chunk_units * UNIT, slots * 4096, ahead_tokens, dropped_units)


class SchedulerWorld:
    """A scheduler side with requests, their block tables, and the content that each page must have."""

    def __init__(
        self,
        *,
        windows: tuple[int | None, ...] = (None,),
        chunk_units: int = 16,
        slots: int = 256,
        ranks: int = 1,
        loads: bool = True,
        load: str = "auto",
        touch: str = "use",
        policy: str = "lru",
        trace: Recorder = OFF,
        states: tuple[int, ...] = (),
        waits_idle: bool = False,
        ahead_tokens: int = 0,
        dropped_units: int = 0,
        tiers: Sequence[GuardedTier] = (),
        quotas: Sequence[dict[str, Any]] = (),
        spans_of: SpansOf | None = None,
        also_of: Callable[[str], str] = lambda _: "",
        save_steps: int | None = 1,
        pipeline_stages: int = 1,
        node: NodePool | None = None,
    ) -> None:
        """Make an empty cache. `node` is the node's memory that the engine uses, or None for a private pool."""
        keys: dict[str, Any] = {"load": load, "prefault": touch, "policy": policy, "save_decode_steps": save_steps}
        # if the key is left out, variables of the environment may set quotas
        keys |= {"quotas": list(quotas)} if quotas else {}
        settings = load_settings(keys)
        geometry = geometry_of_windows(windows, chunk_units, slots, states, ahead_tokens, dropped_units)
        self.ranks, self.groups, self.free, self._states = ranks, len(windows), 1 << 20, states
        self.remedies = Remedies(geometry, LoadAdmission(geometry, BEYOND_TOKENS, 64 * UNIT))
        self.side = SchedulerSide(
            settings,
            geometry,
            EngineFacts(
                hash_tokens=UNIT,
                ranks=ranks,
                saves=True,
                loads=loads,
                waits_idle=waits_idle,
                pipeline_stages=pipeline_stages,
            ),
            EngineHooks(recovery=self.remedies, spans_of=spans_of, also_of=also_of),
            tiers=tiers,
            trace=trace,
            node=node,
        )
        self.tables: list[dict[str, list[TableEntry]]] = [{} for _ in windows]
        self.forgotten: set[int] = set()
        self.known: dict[int, Any] = {}
        """The blocks of the offered states, as they are in vLLM's prefix cache."""
        managers: Any = [SimpleNamespace(req_to_blocks=tables, num_cached_block={}) for tables in self.tables]
        manager: Any = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=managers),
            evict_blocks=self.forgotten.update,
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free, num_gpu_blocks=0, blocks=self.known),
        )
        self.blocks = PlayedBlocks(manager)
        self.side.bind(self.blocks)
        self.remedies.bind(self.blocks, self.side.counters)
        self.prefixes: dict[bytes, list[bytes]] = {}
        self.pages: dict[tuple[int, int], bytes] = {}
        self.orders: tuple[TierOrder, ...] = ()
        """The tier orders of the last step. A test carries them out."""
        self._blocks = self.wait_ms = 0

    def request(self, name: str, units: int, *, shared: int = 0, extra: int = 0) -> Any:
        """Make a request of `units` units and `extra` tokens. All requests share their first `shared` units."""
        made = SimpleNamespace(request_id=name, num_preemptions=0, num_computed_tokens=0, block_hashes=[])
        made.skip_reading_prefix_cache = made.resumable = False
        made.lora_request = None
        made.num_tokens = made.num_prompt_tokens = units * UNIT + extra
        made.shared = shared
        made.all_token_ids = range(made.num_tokens)  # every request's prompt begins with these tokens
        self._hash(made)
        return made

    def grow(self, request: Any, units: int) -> None:
        """Generate tokens of `request` until it has `units` units."""
        request.num_tokens = units * UNIT
        self._hash(request)
        self.allocate(request)

    def _hash(self, request: Any) -> None:
        for unit in range(len(request.block_hashes), request.num_tokens // UNIT):
            whose = "" if unit < request.shared else request.request_id
            request.block_hashes.append(f"{whose}/{unit}".encode())
            self.prefixes[request.block_hashes[-1]] = list(request.block_hashes)

    def allocate(self, request: Any, null: int = 0) -> Any:
        """Extend the request's block tables to its number of tokens. The first `null` blocks are null blocks."""
        for tables in self.tables:
            table = tables.setdefault(request.request_id, [])
            while len(table) * UNIT < request.num_tokens:
                self._blocks += 1
                table.append(
                    TableEntry(0, is_null=True) if len(table) < null else TableEntry(self._blocks, is_null=False)
                )
        return tuple(tables[request.request_id] for tables in self.tables)

    def ask(self, request: Any, local: int = 0) -> int:
        """Look up `request`, and return the number of promised tokens."""
        answer = self.side.lookup(request, local)
        assert answer is not LATER
        return answer.tokens

    def admit(self, request: Any) -> int:
        """Look up and admit `request`, and load its hit. Returns the number of loaded tokens."""
        tokens = self.ask(request)
        self.side.admitted(request, self.allocate(request), tokens)
        request.num_computed_tokens = tokens
        return tokens

    def admit_local(self, request: Any, tokens: int) -> int:
        """Look up and admit `request`, while vLLM's own cache holds `tokens` tokens.

        Returns the number of tokens that kvpipe adds.
        """
        external = self.ask(request, tokens)
        self.side.admitted(request, self.allocate(request), 0)
        request.num_computed_tokens = tokens
        return external

    def step(self, *requests: Any, boundaries: tuple[int, ...] = ()) -> list[Job]:
        """Schedule all remaining tokens of `requests`, and return the step's jobs.

        `boundaries` are the numbers of units after which the step leaves a final state, in every group of states.
        """
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        offered = {r.request_id: [self._offer(r, g, at) for g in self._states for at in boundaries] for r in requests}
        states = SimpleNamespace(boundary_state_offloads=offered) if boundaries else None
        plan = self.side.plan_step(
            SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=None, kv_connector_block_state=states)
        )
        self.wait_ms, self.orders = plan.wait_ms, plan.orders
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        hashes = {r.request_id: r.block_hashes for r in requests}
        for job in plan.jobs:
            if job.kind == SAVE:
                for group, slot, page, block in job.table().tolist():
                    table = self.tables[group][job.request]
                    unit = next(i for i, held in enumerate(table) if held.block_id == block)
                    self.pages[slot, page] = hashes[job.request][unit]
        return list(plan.jobs)

    def _offer(self, request: Any, group: int, units: int) -> tuple[int, int, int]:
        block = self.tables[group][request.request_id][units - 1].block_id
        key = request.block_hashes[: units or 1][-1] + group.to_bytes(GROUP_BYTES, "big")
        self.known.setdefault(block, SimpleNamespace(block_hash=key))
        return group, block, units * UNIT

    def report(self, *tallies: tuple[Job, int, int]) -> None:
        """Report each (job, ok, bad): `ok` ranks have succeeded, and `bad` ranks have failed."""
        self.side.reported(Report({job.id: Tally(ok, bad) for job, ok, bad in tallies}))
        self.check()

    def succeed(self, *jobs: Job) -> None:
        """Report that `jobs` have succeeded on every rank."""
        self.report(*((job, self.ranks, 0) for job in jobs))

    def preempt(self, request: Any) -> None:
        """Preempt `request`: vLLM takes its blocks."""
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        for tables in self.tables:
            del tables[request.request_id]

    def publish(self, request: Any) -> None:
        """Run `request` to its end, with all of its KV saved."""
        self.admit(request)
        self.succeed(*self.step(request))
        self.side.finished(request)
        assert self.found(request) == len(request.block_hashes)

    def found(self, request: Any) -> int:
        """Return the number of units in the longest prefix of `request` that the first group's index has."""
        index = self.side.catalog.index(0)
        return max((i for i, key in enumerate(request.block_hashes, 1) if key in index), default=0)

    def drop(self, group: int, key: bytes) -> None:
        """Drop the chunk that is found under `key`."""
        chunk = self.side.catalog.find(group, key)
        assert chunk is not None
        self.side.catalog._drop(chunk, "evicted")

    def check(self) -> None:
        """Check that the catalog is consistent, and that the pages have every prefix that can be found."""
        catalog = self.side.catalog
        check_integrity(catalog)
        for group in range(self.groups):
            for key, chunk in catalog.index(group).items():
                units = next(mark.units for mark in chunk.marks if mark.key == key)
                held = [self.pages[chunk.slot, page] for page in range(units)]
                ahead = 0 if group in self._states else self.side.prefixes.ahead_tokens // UNIT
                known = self.prefixes[key][: len(self.prefixes[key]) - ahead]
                assert held == known[-units:], f"{key!r} is found where {held} lie"


def slots_of(job: Job) -> list[int]:
    """Return the slot of each row."""
    return [int(slot) for slot in job.table()[:, 1]]
