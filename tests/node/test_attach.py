"""An engine's processes are attached to the memory of their node before the engine serves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.errors import ConfigError
from kvpipe.node.attach import STOCK_MIN, NodeEngine, node_options
from kvpipe.node.client import NodePool, RankMemory
from kvpipe.node.holder import Holder
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.waiting import eventually
from tests.rigs.node_engine import options


@pytest.mark.parametrize(("step_chunks", "stock"), [(0, 0), (1, STOCK_MIN)])
def test_engine_that_does_not_save_stocks_no_slots(short_path: Path, step_chunks: int, stock: int) -> None:
    """An engine that does not save needs no stock of slots."""
    settings = load_settings({"pool": "node", "pool_dir": str(short_path)})
    geometry = Geometry((Group((Layer("a", 64),), block_tokens=16),), 16, 1 << 20)
    assert node_options(settings, geometry, NodeEngine(b"e" * 16, 1, step_chunks)).stock == stock


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_process_that_cannot_map_the_memory_leaves_no_descriptor_and_no_client(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine then uses a private pool. A leaked descriptor or client would last as long as the engine runs."""

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr("kvpipe.node.client.Segment", refuse)
    folder = short_path / "node"
    holder = Holder(folder, adopt_s=0, keep_s=600)
    thread = threading.Thread(target=holder.run)
    thread.start()
    counts = list[int]()
    try:
        for _ in range(2):
            pool = NodePool(options(folder))
            assert eventually(lambda pool=pool: pool.poll() or pool.state == "REFUSED")  # type: ignore[misc]
            pool.close()
            with pytest.raises(ConfigError, match="no room"):
                RankMemory(options(folder))
            assert eventually(lambda: not holder._has_engines)
            counts.append(_descriptors())
        assert eventually(lambda: _descriptors() <= counts[0])
    finally:
        holder.end()
        thread.join()
        holder.close()
