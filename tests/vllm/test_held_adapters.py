"""An adapter has the digest of the files that vLLM has read.

If the files changed during the reading, the digest is unique.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvpipe.connectors.vllm import held_adapters
from kvpipe.threads import adapter_files
from kvpipe.threads.adapter_files import FILES, AdapterFiles
from kvpipe.trace.log import Counters
from kvpipe.worker.adapters import HeldAdapters

NUMBER = 1
CONFIG, WEIGHTS = FILES[:2]


class Adapter:
    """An adapter that vLLM has loaded."""


class Manager:
    """The part of vLLM's manager of adapters that kvpipe reads.

    In vLLM, `list_adapters` is a method of a manager inside this manager.
    """

    def __init__(self) -> None:
        """Start without adapters."""
        self.adapters: dict[int, Adapter] = {}
        self._adapter_manager = self

    def list_adapters(self) -> dict[int, Adapter]:
        """Return the adapters by number."""
        return self.adapters


class Loads:
    """Loads of one adapter by vLLM. A function of the test replaces vLLM's code that reads the files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write the adapter's files, and record vLLM's loads from now on."""
        # files never count as settled, so that each load reads them again
        monkeypatch.setattr(adapter_files, "SETTLED_S", float("inf"))
        self._folder, self._manager, self._held = folder, Manager(), HeldAdapters(Counters())
        self._read: Callable[[], object] = int
        self.write(b"first")
        (folder / CONFIG).write_bytes(b"{}")
        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", self._load)
        held_adapters.record_loads(self._held)

    def _load(self, *_: object) -> Adapter:
        self._read()
        return Adapter()

    def write(self, weights: bytes) -> None:
        """Replace the adapter's weights."""
        (self._folder / WEIGHTS).write_bytes(weights)

    def remove(self) -> None:
        """Delete the adapter."""
        for name in (CONFIG, WEIGHTS):
            (self._folder / name).unlink()

    def load(self, read: Callable[[], object] = int) -> bytes:
        """Load the adapter, and return the digest that the rank reports for the adapter.

        `read` runs while vLLM reads the files.
        """
        self._read = read
        load: Any = WorkerLoRAManager._load_adapter
        self._manager.adapters[NUMBER] = load(self._manager, LoRARequest("one", NUMBER, str(self._folder)))
        return self._held.now()[NUMBER]

    @property
    def on_disk(self) -> bytes:
        """Return the digest of the files as they are now."""
        return AdapterFiles().read(str(self._folder)).digest


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Return an adapter that vLLM can load."""
    return Loads(tmp_path, monkeypatch)


def test_loaded_adapter_has_the_digest_of_its_files(loads: Loads) -> None:
    """The rank digests the files again at each load."""
    first = loads.load()
    assert first == loads.on_disk
    loads.write(b"other")
    assert loads.load() == loads.on_disk != first


def test_loaded_adapter_is_unique_when_it_is_replaced_while_vllm_reads_it(loads: Loads) -> None:
    """The adapter's KV is never shared, because vLLM may have read the old weights, the new weights or a mixture."""
    first = loads.on_disk
    digests = [loads.load(lambda: loads.write(b"other")), loads.load(lambda: loads.write(b"third"))]
    assert len({first, loads.on_disk, *digests}) == 4


def test_loaded_adapter_is_unique_when_it_is_deleted_while_vllm_reads_it(loads: Loads) -> None:
    """The adapter's digest is not that of the deleted files."""
    first = loads.on_disk
    assert loads.load(loads.remove) != first
