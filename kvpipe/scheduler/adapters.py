"""The scheduler side of LoRA adapters: the digest of each request's adapter, which is part of the request's keys.

The ranks report the digests of the adapters that they hold. In each step, the ranks also check every job against these
digests. Before the ranks hold an adapter, the scheduler side reads the adapter's files to learn the digest. While the
digest is unknown, the adapter's requests have no keys, so kvpipe finds and saves nothing for these requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.protocol.messages import Claim, Job, Kind
from kvpipe.threads.adapter_files import KNOWN_MAX, AdapterReader, read_as, remember
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Adapter, Request

ALWAYS: Final = 1 << 60
"""A step number that is never reached. A claim with this number says that the adapter may have changed at any time."""

FRESH_S: Final = 0.5
"""How many seconds a waiting request uses a found digest without a new query. Ranks detect later changes."""


class AdapterUse:
    """The state of one request's adapter. The ranks must have held the adapter's bytes from step `since_step` on."""

    __slots__ = ("asked_s", "asked_step", "digest", "keys", "lora", "named_s", "since_step", "torn", "waits")

    def __init__(self, lora: Adapter) -> None:
        """Start without a digest."""
        self.lora = lora
        self.digest = b""
        self.keys: list[bytes] = []
        self.since_step, self.asked_step = 0, -1
        self.asked_s = self.named_s = 0.0  # the times at which the digest was first wanted and last found
        self.torn = False  # whether the adapter has changed while the request used it
        self.waits = False


class AdapterQuestion(NamedTuple):
    """A question to the ranks about an adapter.

    The engine has loaded or removed the adapter after step `step` was planned. `answered` has the ranks that have
    reported the adapter in a later step.
    """

    step: int
    answered: set[int]


class Adapters:
    """The adapters that an engine's requests use, and the digests that the ranks report."""

    def __init__(self, ranks: int, seconds_max: float, counters: Counters) -> None:
        """Start without requests. `ranks` is the number of ranks.

        `seconds_max` is the longest time for which a request waits for its adapter's files to be read.
        """
        self._ranks, self._seconds_max, self._counters = ranks, seconds_max, counters
        self._held: dict[int, dict[int, bytes]] = {}  # digests by adapter number, by rank
        self._open: dict[int, AdapterQuestion] = {}  # open questions by adapter number: some rank has not answered
        self._uses: dict[str, AdapterUse] = {}
        self._once: OrderedDict[str, None] = OrderedDict()  # paths of adapters with which chunks may have been saved
        self.reader = AdapterReader(lambda path, why: counters.fault("adapter_not_read", path=repr(path), why=why))

    # ---- the life of a request ------------------------------------------------------------------------------------

    def begin_use(self, request: Request) -> None:
        """Begin to read the adapter's files for a request that has arrived, unless the digest is known."""
        lora = request.lora_request
        if lora is not None:
            self._uses[request.request_id] = use = AdapterUse(lora)
            self._now(use, time.monotonic() - FRESH_S)

    def waits(self, request: Request, step: int, *, worth: bool) -> bool:
        """Find the digest for a lookup in `step`.

        Returns True if the request should wait because the digest is not known yet. A request waits only if there may
        be a hit: if `worth` says that tiers may have one, or if chunks may have been saved with this adapter. All calls
        in one step return the same result.
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
        """Whether the request has no adapter, or an adapter with a known digest."""
        use = self._uses.get(request.request_id)
        return use is None or bool(use.digest)

    def certain(self, request: Request) -> bool:
        """Whether the request has no adapter, or every rank already holds the bytes of its adapter.

        An asynchronous load requires this, because the load ends before its request runs.
        """
        use = self._uses.get(request.request_id)
        return use is None or (bool(use.digest) and self._agreed(use.lora.lora_int_id) == use.digest)

    def admitted(self, request: Request, step: int, local_tokens: int) -> None:
        """Record that the request computes from step `step` on.

        `local_tokens` is the length of the request's hit in the engine's prefix cache. The tokens of this hit may have
        been computed in any earlier step.
        """
        use = self._uses.get(request.request_id)
        if use is not None:
            use.since_step, use.named_s = 0 if local_tokens else step, 0.0

    def end_use(self, request: Request) -> None:
        """Forget the adapter of a request that is over."""
        self._uses.pop(request.request_id, None)

    # ---- keys -----------------------------------------------------------------------------------------------------

    def digest(self, request: Request) -> bytes:
        """Return the adapter's digest in the request's keys. b"" means that the request has no adapter or no keys."""
        use = self._uses.get(request.request_id)
        return b"" if use is None else use.digest

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the request's blocks. A key is an engine's block hash, followed by the adapter's digest.

        The result is empty while the digest of the request's adapter is unknown.
        """
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return hashes
        use = self._uses.get(request.request_id)
        if use is None:
            return ()
        if not use.digest and not use.torn:  # a rank may have reported the digest meanwhile
            self._name(use, self._agreed(use.lora.lora_int_id) or b"")
        if not use.digest:
            return ()
        keys, digest = use.keys, use.digest
        del keys[len(hashes) :]
        # a streaming session has cut its tokens, so the last keys are outdated
        while keys and keys[-1] != hashes[len(keys) - 1] + digest:
            keys.pop()
        keys += [key + digest for key in hashes[len(keys) :]]
        return keys

    def _name(self, use: AdapterUse, digest: bytes) -> None:
        if digest != use.digest:
            use.digest, use.keys = digest, []
        if digest:
            remember(self._once, use.lora.lora_path, None, KNOWN_MAX)

    def claims(self, jobs: Iterable[Job]) -> tuple[Claim, ...]:
        """Return the claims that the ranks must check for a step's jobs. Open questions are claims of job 0."""
        if not self._uses:
            return ()
        used = ((job, self._uses.get(job.request)) for job in jobs)
        questions = (Claim(0, number, b"", 0) for number in self._open)
        return *questions, *(
            Claim(job.id, use.lora.lora_int_id, use.digest, use.since_step if job.kind == Kind.SAVE else ALWAYS)
            for job, use in used
            if use is not None
        )

    # ---- the digests that are known -------------------------------------------------------------------------------

    def called(self, number: int, step: int) -> None:
        """Record that the engine loads or removes adapter `number` after step `step` was planned.

        The next step asks the ranks for digests.
        """
        self._open[number] = AdapterQuestion(step, set())
        for use in self._uses.values():
            if use.lora.lora_int_id == number:
                use.named_s = 0.0

    def reported(self, news: dict[int, dict[int, bytes]], step: int) -> None:
        """Process the ranks' report of `step`: digests by adapter number, by rank.

        The digest of a removed adapter is b"".
        """
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
                if digest is not None and digest != use.digest:  # the request's KV was computed with both adapters
                    use.torn, use.named_s = True, 0.0
                    self._name(use, b"")

    def agreed(self) -> dict[int, bytes]:
        """Return the digests on which all ranks agree, by adapter number.

        The value is b"" if ranks differ, or if not all ranks have reported.
        """
        return {number: self._agreed(number) or b"" for held in self._held.values() for number in held}

    def _now(self, use: AdapterUse, since_s: float) -> bytes | None:
        """Return the adapter's present digest. b"" means that no digest can be found, None that it is not known yet."""
        if not use.lora.load_inplace:  # an adapter with `load_inplace` is loaded again with every step
            digest = self._agreed(use.lora.lora_int_id)
            if digest is not None or use.lora.lora_int_id in self._open:
                return digest
        digest = self.reader.digest(use.lora.lora_path, since_s)
        return digest and read_as(digest, fused=use.lora.is_3d_lora_weight)

    def _agreed(self, number: int) -> bytes | None:
        """Return the digest that all ranks hold under `number`; b"" if the ranks hold different digests.

        The result is None if a rank does not hold the adapter, or has yet to answer a question about the adapter.
        """
        held = [one.get(number) for one in self._held.values()]
        if len(held) < self._ranks or None in held or number in self._open:
            return None
        return held[0] if len(set(held)) == 1 else b""
