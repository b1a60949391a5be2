"""A prefix-aware router beside a real engine. The router uses only the engine's KV cache events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvpipe.connectors.vllm.tiny.models import make_adapter
from kvpipe.connectors.vllm.trial.router import Router
from kvpipe.testing.waiting import PATIENT, WAIT_S, eventually
from kvpipe.tiers.base import Key
from tests.engine.common import BLOCK, assert_clean, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine


def test_a_router_distinguishes_salts_and_adapters(tmp_path: Path) -> None:
    """The router computes each request's block hashes, and finds the media that hold these blocks.

    The router continues after a reset of vLLM's own cache.
    """
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    adapter = LoRARequest("french", 1, str(make_adapter(tmp_path / "french", 1)))
    router = Router({"french": adapter.lora_path}, BLOCK)

    def publish(batch: KVEventBatch) -> None:
        router.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events)

    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "kv_events_config": reported}
    tokens, hasher, in_chunk = prompt(8 * BLOCK + 2, 1), get_request_block_hasher(BLOCK, sha256), 4
    with engine(kvpipe={"chunk_tokens": in_chunk * BLOCK}, enable_prefix_caching=True, **options) as live:
        live.scheduler.kv_event_publisher.publish = publish  # type: ignore[method-assign, assignment]
        asked: list[dict[str, Any]] = [{}, {"salt": "alice"}, {"lora": adapter}, {"salt": "bob", "lora": adapter}]
        blocks: list[set[bytes]] = []
        ends: set[bytes] = set()
        for one in asked:
            live.generate([tokens], 2, **one)
            live.settle()
            named = Request(
                "named", tokens, SamplingParams(), None,
                block_hasher=hasher, cache_salt=one.get("salt"), lora_request=one.get("lora"),
            )  # fmt: skip
            blocks.append(set(named.block_hashes))
            ends.update(named.block_hashes[in_chunk - 1 :: in_chunk])
        assert router.problems == []
        assert router.index["GPU", 0] == set().union(*blocks)
        assert router.index["CPU", 0] == ends, "kvpipe announces ends of chunks"
        assert len(ends) == 2 * len(asked), "no chunk is another's"
        assert live.llm.reset_prefix_cache()
        live.generate([prompt(40, 2)], 2)
        live.settle()
        assert router.problems == []
        assert ends <= router.index["CPU", 0], "kvpipe's blocks are announced again"
        assert not set().union(*blocks) & router.index["GPU", 0]
        live.generate([tokens], 2, **asked[3])
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, len(tokens))


def test_prompt_that_shares_part_of_a_chunk_hits_the_announced_blocks() -> None:
    """Prompts share parts of three chunks with a saved prompt: every announced length, and lengths between."""
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    in_chunk, router = 4, Router({}, BLOCK)
    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    tokens, hasher = prompt(3 * in_chunk * BLOCK, 3), get_request_block_hasher(BLOCK, sha256)
    with engine(
        kvpipe={"chunk_tokens": in_chunk * BLOCK}, enable_prefix_caching=True, kv_events_config=reported
    ) as live:
        live.scheduler.kv_event_publisher.publish = lambda batch: router.apply(batch.events)  # type: ignore[method-assign]
        answer = live.generate([tokens[: -2 * BLOCK]], BLOCK + 2)[0]  # the answer ends within the third chunk
        live.settle()
        held = tokens[: -2 * BLOCK] + answer[:-1]
        hits: list[int] = []
        for shared in (2 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK, 7 * BLOCK + 1, 9 * BLOCK, 10 * BLOCK, 11 * BLOCK):
            assert live.llm.reset_prefix_cache()
            asked = held[:shared] + prompt(2 * BLOCK, 4 + shared)
            named = Request("named", asked, SamplingParams(), None, block_hasher=hasher)
            promised = router.promised(("CPU", 0), named.block_hashes) * BLOCK
            before = assert_clean(live).get("tokens_loaded", 0)
            live.generate([asked], 1)
            hits.append(assert_clean(live).get("tokens_loaded", 0) - before)
            assert hits[-1] == promised, f"{shared} tokens are shared"
        assert router.problems == []
        assert hits == [blocks * BLOCK for blocks in (0, 0, 4, 4, 8, 10, 11)]


class Subscriber:
    """A router beside an engine that publishes with vLLM's own publisher over ZMQ."""

    def __init__(self, folder: Path) -> None:
        """Subscribe to the sockets in `folder`."""
        self.router, self.folder, self.first = Router({}, BLOCK), folder, 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"ipc://{folder}/events")
        self._socket.subscribe("")

    def replay(self) -> None:
        """Request all events that were published before this call, as a router does that starts late."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        with socket:
            socket.connect(f"ipc://{self.folder}/replay")
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while socket.poll(int(WAIT_S * 1000)):
                _, _, number, batch = socket.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    return
                self._apply(int.from_bytes(number, "big"), batch)

    def has(self, place: tuple[str, int], wanted: set[bytes]) -> bool:
        """Receive the published events. Return whether the blocks in `place` are exactly the blocks `wanted`."""
        while self._socket.poll(0):
            _, number, batch = self._socket.recv_multipart()
            self._apply(int.from_bytes(number, "big"), batch)
        return self.router.index.get(place, set()) == wanted

    def _apply(self, number: int, batch: bytes) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        if number >= self.first:
            self.first = number + 1
            self.router.apply(msgspec.msgpack.decode(batch, type=KVEventBatch).events)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def test_subscriber_knows_the_chunks_of_a_disk_tier(tmp_path: Path) -> None:
    """vLLM's publisher announces a chunk when it is stored, and withdraws a chunk when its files were deleted.

    A subscriber that starts late gets the same events from vLLM's replay.
    """
    from vllm.config import KVEventsConfig

    sockets, store = tmp_path / "s", tmp_path / "kv"
    sockets.mkdir()
    published = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{sockets}/events",
        replay_endpoint=f"ipc://{sockets}/replay",
    )  # fmt: skip
    settings = {
        "chunk_tokens": 4 * BLOCK,
        "tiers": [{"kind": "disk", "path": str(store), "bytes_max": "1GiB"} | PATIENT],
    }
    first, place = prompt(8 * BLOCK + 2, 1), ("STORAGE/disk", 0)
    with engine(kvpipe=settings, enable_prefix_caching=False, kv_events_config=published) as live:
        early = Subscriber(sockets)
        live.generate([first], 2)
        live.settle()
        assert eventually(lambda: early.has(place, _ends(first)))
        files = [file for file in store.rglob("*-g0-*") if Key.parse(file.name).chunk in _ends(first)]
        assert len(files) == 2
        for file in files:
            file.unlink()

        later, expected = list[list[int]](), set[bytes]()

        def is_withdrawn() -> bool:
            later.append(prompt(8 * BLOCK + 2, 2 + len(later)))
            # the lookup of a new prompt lists the folder, unless a recent lookup listed the folder
            live.generate([later[-1]], 2)
            live.settle()
            expected.update(_ends(later[-1]))
            early.has(place, expected)
            return not early.router.index[place] & _ends(first)

        assert eventually(is_withdrawn)
        assert eventually(lambda: early.has(place, expected))
        assert early.router.index["CPU", 0] == _ends(first) | expected
        late = Subscriber(sockets)
        late.replay()
        assert late.router.index == early.router.index
        assert early.router.problems == late.router.problems == []
        assert assert_clean(live)["tier_blocks_withdrawn"] == len(files)
        early.close()
        late.close()


def _ends(tokens: list[int]) -> set[bytes]:
    """Return the hash of the last block of each of a prompt's chunks. A chunk has four blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, sha256)
    return set(Request("named", tokens, SamplingParams(), None, block_hasher=hasher).block_hashes[3::4])
