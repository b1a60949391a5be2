"""A real engine answers its operators, whether requests run or the engine is idle."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.started import serve_operators
from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from kvpipe.errors import ConfigError
from kvpipe.inputs.listening import Address
from kvpipe.manage.client import send_request
from tests.engine.common import assert_clean, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine
TOKEN = "t0" * 16


def _keys(folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN, encoding="utf-8")
    return {"manage": f"unix:{folder}/{{engine}}.sock", "manage_token_file": str(token)}


def _call(path: Path, method: str, what: str, body: object = None) -> Any:
    return send_request(Address(str(path), "", 0), TOKEN, method, f"/v1/{what}", body)


def _read(live: Engine, path: Path, method: str, what: str, body: object = None) -> Any:
    """Send a request while the engine makes steps. When no request runs, the engine is idle, as in vLLM's own loop."""
    orders = live.connector.scheduler.orders  # type: ignore[union-attr]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_call, path, method, what, body)
        while not answer.done():
            if live.scheduler.has_requests() and orders.reads:
                _ = live.step() if live.busy else live.core.step()
            time.sleep(0.001)
        return answer.result()


def test_an_engine_answers_its_operators(tmp_path: Path) -> None:
    """A lookup returns the tokens that the next request with this salt loads, and a switch takes effect.

    A second engine with the same address is refused.
    """
    with engine(kvpipe=_keys(tmp_path), enable_prefix_caching=False) as live:
        (path,) = tmp_path.glob("*.sock")
        call = functools.partial(_read, live, path)
        long, salted = prompt(611, 1), prompt(300, 2)
        assert call("GET", "state")["requests"] == 0
        assert call("POST", "lookup", {"tokens": long})["held_tokens"] == 0
        live.generate([long])
        live.generate([salted], salt="tenant")
        live.settle()
        assert call("POST", "lookup", {"tokens": long})["held_tokens"] == whole_blocks(live, 611)
        assert call("POST", "lookup", {"tokens": salted})["held_tokens"] == 0
        assert call("POST", "lookup", {"tokens": salted, "cache_salt": "tenant"})["held_tokens"] == whole_blocks(
            live, 300
        )
        loaded = live.connector.stats().get("tokens_loaded", 0)
        live.add(long, 30, request_id="reader")
        live.step()
        (row,) = call("GET", "state")["requests_shown"]
        assert row["request"].startswith("reader")
        assert call("PUT", "switches", {"freeze": True})["freeze"]
        live.drain()
        assert live.connector.stats()["tokens_loaded"] == loaded + whole_blocks(live, 611)
        live.generate([prompt(200, 3)])
        assert call("POST", "lookup", {"tokens": prompt(200, 3)})["held_tokens"] == 0
        assert not call("PUT", "switches", {"freeze": False, "bypass": True})["freeze"]
        live.generate([long])
        assert live.connector.stats()["tokens_loaded"] == loaded + whole_blocks(live, 611)
        call("PUT", "switches", {"bypass": False})
        live.generate([prompt(200, 3)])
        live.settle()
        assert call("POST", "lookup", {"tokens": prompt(200, 3)})["held_tokens"] == whole_blocks(live, 200)
        counted = call("GET", "counters")
        assert (counted["freeze_on"], counted["bypass_on"], counted["leases"]) == (1, 1, 0)
        with pytest.raises(ValueError, match=r"refused \(422\): tokens: 2000 are more than this engine's 1024"):
            call("POST", "lookup", {"tokens": [1] * 2000})
        with pytest.raises(ConfigError, match="a running engine listens there"):
            serve_operators(live.connector.scheduler_role, live.core.vllm_config, path.stem, numbered=False)
        assert_clean(live)
    assert not path.exists()


def test_an_engine_that_idles_pins_and_evicts(tmp_path: Path) -> None:
    """Orders are carried out although no request runs. A pinned prompt stays in memory until its pin is deleted."""
    with engine(kvpipe=_keys(tmp_path) | {"pool_bytes_max": 4096 * TOKEN_BYTES}, enable_prefix_caching=False) as live:
        (path,) = tmp_path.glob("*.sock")
        call = functools.partial(_read, live, path)
        long, salted = prompt(611, 1), prompt(300, 2)
        answer = live.generate([long], 8)
        live.generate([salted], salt="tenant")
        live.settle()
        assert not live.scheduler.has_requests()  # vLLM makes this call before it waits
        pin = call("POST", "pins", {"tokens": long, "seconds": 600})
        assert pin["tokens"] == whole_blocks(live, 611)
        assert call("POST", "evict", {"tokens": salted, "cache_salt": "tenant"})["chunks"] > 0
        assert call("POST", "lookup", {"tokens": salted, "cache_salt": "tenant"})["held_tokens"] == 0
        for seed in range(100, 108):  # these chunks and the pinned chunks do not fit into the pool together
            live.generate([prompt(900, 10 * seed + one) for one in range(4)], 1)
        live.settle()
        assert call("GET", "counters")["evicted"] > 0
        assert call("POST", "lookup", {"tokens": long})["held_tokens"] == whole_blocks(live, 611)
        assert live.generate([long], 8) == answer
        live.settle()
        assert not live.scheduler.has_requests()
        assert call("DELETE", f"pins/{pin['pin']}")["chunks"] == pin["chunks"]
        assert call("GET", "counters")["leases"] == 0
        assert_clean(live)
    assert not path.exists()


def test_an_engine_warms_a_prompt_from_disk(tmp_path: Path) -> None:
    """A prompt that memory has evicted is fetched from disk during steps of other requests.

    After the fetch, a request with this prompt hits in memory.
    """
    tier = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    keys = _keys(tmp_path) | {"tiers": [tier], "chunk_tokens": 64}
    with engine(kvpipe=keys, enable_prefix_caching=False) as live:
        (path,) = tmp_path.glob("*.sock")
        call = functools.partial(_call, path)
        long, due = prompt(611, 1), whole_blocks(live, 611)
        answer = live.generate([long], 8)
        live.settle()
        assert not live.scheduler.has_requests()
        assert call("POST", "evict", {"tokens": long})["chunks"] > 0
        assert _read(live, path, "POST", "lookup", {"tokens": long})["held_tokens"] == 0
        noted: list[Any] = []
        thread = threading.Thread(
            target=lambda: noted.append(call("POST", "warm", {"tokens": long, "seconds": 600})), daemon=True
        )
        thread.start()
        turn = 2
        while thread.is_alive() or "pending" in noted[-1]:
            live.generate([prompt(40, turn)], 1)
            turn += 1
            if not thread.is_alive() and "pending" in noted[-1]:
                noted.append(call("GET", f"orders/{noted[-1]['order']}"))
        warmed = noted[-1]
        assert (warmed["tokens"], warmed["fetched_tokens"], warmed["pin"]) == (due, due, 1)
        assert _read(live, path, "POST", "lookup", {"tokens": long})["held_tokens"] == due
        side = live.connector.scheduler
        assert side is not None
        assert live.generate([long], 8) == answer
        live.settle()
        assert side.tracer.hit_tokens == {"memory": due}
        stats = live.connector.stats()
        assert stats["prefetch_used"] == stats["chunks_prefetched"] > 0
        assert not live.scheduler.has_requests()
        assert call("DELETE", "pins/1")["tokens"] == due
        assert_clean(live)
