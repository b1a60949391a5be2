"""The scheduler side of LoRA adapters: with which adapter's bytes each request's KV is computed, as part of its keys.

The adapters that the ranks hold count: the ranks report their digests, and check every job against them in its step.
Before the ranks hold an adapter, its files are read to learn its digest. Until that is known, the adapter's requests
have no keys: nothing is found for them and nothing is saved.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.adapter_files import KNOWN_MAX, AdapterReader, read_as, remember
from kvpipe.messages import Claim, Job, Kind
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Adapter, Request

ALWAYS: Final = 1 << 60
"""A step that never comes: an adapter may have changed at any time before."""

FRESH_S: Final = 0.5
"""For how long a digest that was found counts for a waiting request. The ranks' checks catch later changes."""


class Use:
    """A request's adapter. `since_step`: from this step on the ranks must have held its bytes."""

    __slots__ = ("asked_s", "asked_step", "digest", "keys", "lora", "named_s", "since_step", "torn", "waits")

    def __init__(self, lora: Adapter) -> None:
        """Start without a digest."""
        self.lora = lora
        self.digest = b""
        self.keys: list[bytes] = []
        self.since_step, self.asked_step = 0, -1
        self.asked_s = self.named_s = 0.0  # since when the digest is wanted; when it was last found
        self.torn = False  # the adapter changed under the request
        self.waits = False


class Question(NamedTuple):
    """A question to the ranks about an adapter, because of an engine's call after step `step` was planned.

    `answered`: the ranks that have reported in a later step.
    """

    step: int
    answered: set[int]


class Adapters:
    """One per scheduler side."""

    def __init__(self, ranks: int, seconds_max: float, counters: Counters) -> None:
        """`ranks`: their number. `seconds_max`: how long a request waits at most for an adapter's files to be read."""
        self._ranks, self._seconds_max, self._counters = ranks, seconds_max, counters
        self._held: dict[int, dict[int, bytes]] = {}  # by rank: digests by the adapters' numbers
        self._open: dict[int, Question] = {}  # adapters that not all ranks have reported since a call
        self._uses: dict[str, Use] = {}
        self._once: OrderedDict[str, None] = OrderedDict()  # paths under which something may be kept
        self.reader = AdapterReader(lambda path, why: counters.fault("adapter_not_read", path=repr(path), why=why))

    # ---- a request's life -----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """A request has arrived: begin to read its adapter's files, unless the digest is known."""
        lora = request.lora_request
        if lora is not None:
            self._uses[request.request_id] = use = Use(lora)
            self._now(use, time.monotonic() - FRESH_S)

    def waits(self, request: Request, step: int, *, worth: bool) -> bool:
        """Find the digest for a lookup in `step`. Returns True if the request should wait for it: not known yet.

        `worth`: a hit in tiers is possible, so waiting is worth it even if nothing was ever saved with this adapter.
        Within a step the answer does not change.
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
        """Whether the request has no adapter, or one whose digest is known."""
        use = self._uses.get(request.request_id)
        return use is None or bool(use.digest)

    def certain(self, request: Request) -> bool:
        """Whether the request has no adapter, or every rank holds its bytes already.

        An asynchronous load needs that: it ends before its request runs.
        """
        use = self._uses.get(request.request_id)
        return use is None or (bool(use.digest) and self._agreed(use.lora.lora_int_id) == use.digest)

    def admitted(self, request: Request, step: int, local_tokens: int) -> None:
        """The request computes from `step` on. `local_tokens`: of the engine's prefix cache, computed at any time."""
        use = self._uses.get(request.request_id)
        if use is not None:
            use.since_step, use.named_s = 0 if local_tokens else step, 0.0

    def end(self, request: Request) -> None:
        """The request is over."""
        self._uses.pop(request.request_id, None)

    # ---- keys -----------------------------------------------------------------------------------------------------

    def digest(self, request: Request) -> bytes:
        """Return the adapter's digest, as it is in the request's keys; b"": no adapter, or no keys."""
        use = self._uses.get(request.request_id)
        return b"" if use is None else use.digest

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the request's blocks: the engine's block hashes, each followed by its adapter's digest.

        Empty while the digest of its adapter is not known.
        """
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
        """Return what the ranks must check for a step's jobs, and open questions."""
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
        """The engine loads or removes adapter `number` after `step`, the last planned step. The next asks the ranks."""
        self._open[number] = Question(step, set())
        for use in self._uses.values():
            if use.lora.lora_int_id == number:
                use.named_s = 0.0

    def reported(self, news: dict[int, dict[int, bytes]], step: int) -> None:
        """Take the ranks' report of `step`: by rank, digests by the adapters' numbers; b"": not held any more."""
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
        """Return the digests that all ranks hold, by the adapters' numbers; b"": they differ, or not all have reported.

        On any thread; raises RuntimeError if that changes meanwhile.
        """
        return {number: self._agreed(number) or b"" for held in self._held.values() for number in held}

    def _now(self, use: Use, since_s: float) -> bytes | None:
        """Return the digest that counts from now on; b"": it cannot be known; None: not known yet, ask again."""
        if not use.lora.load_inplace:  # else it is loaded again with every step
            digest = self._agreed(use.lora.lora_int_id)
            if digest is not None or use.lora.lora_int_id in self._open:
                return digest
        digest = self.reader.digest(use.lora.lora_path, since_s)
        return digest and read_as(digest, fused=use.lora.is_3d_lora_weight)

    def _agreed(self, number: int) -> bytes | None:
        """Return the digest that all ranks hold under `number`; b"": they differ; None: not all hold it, or asked."""
        held = [one.get(number) for one in self._held.values()]
        if len(held) < self._ranks or None in held or number in self._open:
            return None
        return held[0] if len(set(held)) == 1 else b""
