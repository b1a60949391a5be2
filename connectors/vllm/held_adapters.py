"""The rank's side of LoRA adapters: which it holds, of which bytes, since when; whether a job's adapter is that one.

vLLM loads adapters in one place, `WorkerLoRAManager._load_adapter`: ahead of time, in the step of a request (before
the step's metadata is bound), and again when one was evicted or is to be replaced. What it has loaded carries the
digest of its files; if they changed meanwhile nobody knows what was read, and it is shared with nobody.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvpipe.adapters import KNOWN_MAX, AdapterFiles, Reading, remember
from kvpipe.plan import BROKEN, Claim, Job, StepPlan
from kvpipe.trace.log import Counters

MARK: Final = "kvpipe_loaded"
ORIGINAL: Final = "kvpipe_original"


class Loaded(NamedTuple):
    """An adapter as it was loaded."""

    number: int
    name: str
    path: str
    digest: bytes


class HeldAdapters:
    """One per rank."""

    def __init__(self, counters: Counters) -> None:
        """It holds none."""
        self._counters, self._files = counters, AdapterFiles()
        self.now: Callable[[], dict[int, bytes]] = dict
        """Digests of what is held, by number."""
        self._since: OrderedDict[object, tuple[bytes, int]] = OrderedDict()
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._forgotten_step = 0  # up to which changes may have been forgotten
        self._step = 0
        self._told: dict[int, bytes] = {}
        self.changes = 0

    @property
    def readings(self) -> int:
        """How often files were read."""
        return self._files.readings

    # ---- in every step --------------------------------------------------------------------------------------------

    def checked(self, plan: StepPlan) -> StepPlan:
        """Return the plan with those jobs broken whose adapter is not the one that this rank holds."""
        self._step = max(self._step, plan.step)
        if not plan.claims:
            return plan
        held = self.now()
        refused = {claim.job: claim for claim in plan.claims if not self._stands(claim, held)}
        if not refused:
            return plan
        for claim in refused.values():
            self._told[claim.adapter] = b""  # the scheduler's side does not know it: say it once more
            self._counters.fault("adapter_changed", job=claim.job, adapter=claim.adapter)
        self.changes += 1
        return plan._replace(jobs=tuple(broken(job) if job.id in refused else job for job in plan.jobs))

    def _stands(self, claim: Claim, held: dict[int, bytes]) -> bool:
        if not claim.digest or held.get(claim.adapter) != claim.digest:
            return False
        keys = (claim.adapter, self._names.get(claim.adapter))
        return all(self._since.get(key, (b"", self._forgotten_step))[1] <= claim.since_step for key in keys)

    def news(self) -> dict[int, bytes]:
        """Return what is held otherwise than at the last call; no bytes: not any more."""
        if not self.changes:
            return {}
        self.changes, told, now = 0, self._told, self.now()
        self._told = now
        gone = dict.fromkeys(told.keys() - now.keys(), b"")
        return gone | {number: digest for number, digest in now.items() if told.get(number) != digest}

    # ---- loads ----------------------------------------------------------------------------------------------------

    def loaded(self, one: Loaded) -> None:
        """An adapter was loaded, ahead of the next step."""
        self.changes += 1
        name = one.name, one.path
        remember(self._names, one.number, name, KNOWN_MAX)
        for key in (one.number, name):
            before, since = self._since.get(key, (one.digest, self._forgotten_step))
            if before != one.digest:
                since = self._step + 1
            remember(self._since, key, (one.digest, since), KNOWN_MAX)
        if len(self._since) >= KNOWN_MAX - 1:
            self._forgotten_step = self._step + 1

    def watch(self) -> None:
        """Hear of what vLLM loads in this process from now on, and look at what it holds."""
        from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415  (imports models)

        original: Any = getattr(WorkerLoRAManager._load_adapter, ORIGINAL, WorkerLoRAManager._load_adapter)  # noqa: SLF001
        mine = weakref.ref(self)

        @functools.wraps(original)
        def load(manager: Any, request: Any) -> Any:  # noqa: ANN401
            held = mine()
            return original(manager, request) if held is None else held._load(original, manager, request)  # noqa: SLF001

        setattr(load, ORIGINAL, original)
        WorkerLoRAManager._load_adapter = load  # type: ignore[method-assign]  # noqa: SLF001

    def _load(self, original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:  # noqa: ANN401
        """Load an adapter as vLLM does, and note which bytes it has read."""
        folder, resolved = _resolved(request)
        before = self._read(folder)
        adapter = original(manager, resolved)
        digest = before.digest if before is not None and before == self._read(folder) else secrets.token_bytes(16)
        one = Loaded(request.lora_int_id, request.lora_name, request.lora_path, digest)
        setattr(adapter, MARK, one)
        self._look_at(manager)
        self.loaded(one)
        return adapter

    def _read(self, folder: str) -> Reading | None:
        try:
            return self._files.read(folder)
        except Exception as error:  # noqa: BLE001  (whatever files and paths may raise: vLLM loads it, or says why not)
            self._counters.fault("adapter_not_read", path=repr(folder), why=repr(error))
            return None

    def _look_at(self, manager: Any) -> None:  # noqa: ANN401
        known = weakref.ref(manager)

        def now() -> dict[int, bytes]:
            alive = known()
            there = alive._adapter_manager.list_adapters() if alive is not None else {}  # noqa: SLF001
            marks = ((number, getattr(adapter, MARK, None)) for number, adapter in there.items())
            return {number: mark.digest for number, mark in marks if mark is not None}

        self.now = now


def _resolved(request: Any) -> tuple[str, Any]:  # noqa: ANN401
    """Return the folder that vLLM reads the adapter from, and a request for just that: a hub is asked only once."""
    from vllm.lora.utils import get_adapter_absolute_path  # noqa: PLC0415

    folder = get_adapter_absolute_path(request.lora_path)
    if Path(folder).is_dir() and not Path(request.lora_path).expanduser().exists():
        return folder, msgspec.structs.replace(request, lora_path=folder)
    return folder, request


def broken(job: Job) -> Job:
    """Return the job as one that every rank reports as failed."""
    rows = job.table().copy()
    rows[:, 1] = BROKEN
    return job._replace(rows=rows.tobytes())
