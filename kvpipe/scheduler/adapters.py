"""The scheduler side of LoRA adapters: of whose bytes each request's KV is, and so under which keys it is kept.

What counts is what the ranks hold: they report it, and check every job against it in its step. Before they hold an
adapter, its files are read for what they will hold. Until its bytes are known, an adapter's requests have no keys:
nothing is found for them and nothing is saved.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.adapter_files import KNOWN_MAX, AdapterReader, remember
from kvpipe.messages import Claim, Job, Kind
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Adapter, Request

ALWAYS: Final = 1 << 60
"""A step that never comes: an adapter may have changed at any time before."""

FRESH_S: Final = 0.5
"""For how long what was found out counts for a request that waits; the ranks see to what changes meanwhile."""


class Use:
    """A request's adapter. `since_step`: from when on it must have had these bytes for what the request computes."""

    __slots__ = ("asked_s", "asked_step", "digest", "keys", "lora", "named_s", "since_step", "torn", "waits")

    def __init__(self, lora: Adapter) -> None:
        """Its bytes are not known."""
        self.lora = lora
        self.digest = b""
        self.keys: list[bytes] = []
        self.since_step, self.asked_step = 0, -1
        self.asked_s = self.named_s = 0.0  # since when it is asked what they are; when that was answered
        self.torn = False  # the adapter changed under the request
        self.waits = False


class Question(NamedTuple):
    """A question to the ranks about an adapter, since a call after `step`: steps up to that one ran before it."""

    step: int
    answered: set[int]  # ranks


class Adapters:
    """One per scheduler side."""

    def __init__(self, ranks: int, seconds_max: float, counters: Counters) -> None:
        """`seconds_max`: longest that a request waits until an adapter's files are read."""
        self._ranks, self._seconds_max, self._counters = ranks, seconds_max, counters
        self._held: dict[int, dict[int, bytes]] = {}  # by rank: digests by the adapters' numbers
        self._open: dict[int, Question] = {}  # adapters that not all ranks have reported since a call
        self._uses: dict[str, Use] = {}
        self._once: OrderedDict[str, None] = OrderedDict()  # paths under which something may be kept
        self.reader = AdapterReader(lambda path, why: counters.fault("adapter_not_read", path=repr(path), why=why))

    # ---- a request's life -----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """A request has come: if it is not known what its adapter is, its files are read from now on."""
        lora = request.lora_request
        if lora is not None:
            self._uses[request.request_id] = use = Use(lora)
            self._now(use, time.monotonic() - FRESH_S)

    def waits(self, request: Request, step: int, *, worth: bool) -> bool:
        """Find out which bytes count for a lookup in `step`; True: not known yet, and `worth` waiting for.

        Answers the same within a step.
        """
        use = self._uses.get(request.request_id)
        if use is None or use.asked_step == step:
            return use is not None and use.waits
        use.asked_step, now_s = step, time.monotonic()
        if now_s < use.named_s + FRESH_S:
            return use.waits
        use.asked_s = use.asked_s or now_s
        digest = self._now(use, use.asked_s)
        unknown = digest is None and (not use.digest or use.lora.lora_int_id in self._open)
        use.waits = unknown and (worth or use.lora.lora_path in self._once)
        if use.waits and now_s >= use.asked_s + self._seconds_max:
            self._counters["adapter_late"] += 1
            use.waits = False
        if digest is not None or (unknown and not use.waits):
            use.named_s, use.asked_s, use.torn = now_s, 0.0, False
            self._name(use, digest or b"")
        return use.waits

    def known(self, request: Request) -> bool:
        """Whether it is known which bytes the request's adapter has, if it has one."""
        use = self._uses.get(request.request_id)
        return use is None or bool(use.digest)

    def certain(self, request: Request) -> bool:
        """Whether every rank holds those bytes already: an asynchronous load ends before its request runs."""
        use = self._uses.get(request.request_id)
        return use is None or (bool(use.digest) and self._agreed(use.lora.lora_int_id) == use.digest)

    def admitted(self, request: Request, step: int, local_tokens: int) -> None:
        """The request computes from `step` on; of what the engine holds itself nobody knows when it was computed."""
        use = self._uses.get(request.request_id)
        if use is not None:
            use.since_step, use.named_s = 0 if local_tokens else step, 0.0

    def end(self, request: Request) -> None:
        """The request is over."""
        self._uses.pop(request.request_id, None)

    # ---- keys -----------------------------------------------------------------------------------------------------

    def digest(self, request: Request) -> bytes:
        """Return what of the request's adapter is in its keys; empty: it has none, or no keys."""
        use = self._uses.get(request.request_id)
        return b"" if use is None else use.digest

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the request's blocks: the engine's hashes, and the bytes of its adapter if it has one."""
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return hashes
        use = self._uses.get(request.request_id)
        if use is None:
            return ()
        if not use.digest and not use.torn:  # a rank has reported it meanwhile
            self._name(use, self._agreed(use.lora.lora_int_id) or b"")
        if not use.digest:
            return ()
        keys, digest = use.keys, use.digest
        del keys[len(hashes) :]
        while keys and keys[-1] != hashes[len(keys) - 1] + digest:  # a streaming session has cut its tokens
            keys.pop()
        keys += [key + digest for key in hashes[len(keys) :]]
        return keys

    def _name(self, use: Use, digest: bytes) -> None:
        if digest != use.digest:
            use.digest, use.keys = digest, []
        if digest:
            remember(self._once, use.lora.lora_path, None, KNOWN_MAX)

    def claims(self, jobs: Iterable[Job]) -> tuple[Claim, ...]:
        """Return what the ranks are to check of a step's jobs."""
        if not self._uses:
            return ()
        used = ((job, self._uses.get(job.request)) for job in jobs)
        questions = (Claim(0, number, b"", 0) for number in self._open)
        return *questions, *(
            Claim(job.id, use.lora.lora_int_id, use.digest, use.since_step if job.kind == Kind.SAVE else ALWAYS)
            for job, use in used
            if use is not None
        )

    # ---- what is known --------------------------------------------------------------------------------------------

    def called(self, number: int, step: int) -> None:
        """The engine loads or removes an adapter after `step`, the last that was planned: the next asks the ranks."""
        self._open[number] = Question(step, set())
        for use in self._uses.values():
            if use.lora.lora_int_id == number:
                use.named_s = 0.0

    def reported(self, news: dict[int, dict[int, bytes]], step: int) -> None:
        """Take what ranks have reported in `step`: by rank, digests by adapters' numbers; b"": not held any more."""
        for rank, changes in news.items():
            held = self._held.setdefault(rank, {})
            held.update(changes)
            for number in [number for number, digest in changes.items() if not digest]:
                del held[number]
            for number in changes.keys() & self._open.keys():
                asked = self._open[number]
                asked.answered.update([rank] if step > asked.step else ())
                if len(asked.answered) == self._ranks:
                    del self._open[number]
        changed = {number for changes in news.values() for number in changes}
        for use in self._uses.values():
            if use.lora.lora_int_id in changed and use.digest:
                digest = self._agreed(use.lora.lora_int_id)
                if digest is not None and digest != use.digest:  # what it has computed is of both
                    use.torn, use.named_s = True, 0.0
                    self._name(use, b"")

    def agreed(self) -> dict[int, bytes]:
        """Return what all ranks hold, by the adapters' numbers; empty: they differ, or not all have reported.

        Any thread; RuntimeError: it has changed meanwhile.
        """
        return {number: self._agreed(number) or b"" for held in self._held.values() for number in held}

    def _now(self, use: Use, since_s: float) -> bytes | None:
        """Return which bytes count from now on; empty: nobody can know; None: ask again."""
        if not use.lora.load_inplace:  # else it is loaded again with every step
            digest = self._agreed(use.lora.lora_int_id)
            if digest is not None or use.lora.lora_int_id in self._open:
                return digest
        return self.reader.digest(use.lora.lora_path, since_s)

    def _agreed(self, number: int) -> bytes | None:
        """Return what all ranks hold under `number`; empty: they differ; None: not all of them hold it, or may not."""
        held = [one.get(number) for one in self._held.values()]
        if len(held) < self._ranks or None in held or number in self._open:
            return None
        return held[0] if len(set(held)) == 1 else b""
