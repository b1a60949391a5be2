"""Each attribute that the connector reads of vLLM's objects is in a list.

Every release is checked against this list.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import judging, relied
from tests.contract import sources as c
from tests.contract.reads import AttributeRead, Reader
from tests.contract.test_contract import installed_root

READER = Reader(c.folder_reader(installed_root())[1])
ADAPTER = judging.CONNECTOR_SOURCE.parent
CORE = ADAPTER.resolve().parents[1] / "kvpipe"
SOURCES = sorted([
    *ADAPTER.glob("*.py"),
    *(ADAPTER / "identity").glob("*.py"),
    *(ADAPTER / "remedies").glob("*.py"),
    *(path for room in ("protocol", "cache", "scheduler", "features") for path in (CORE / room).glob("*.py")),
])  # fmt: skip
RECORDED = {(cls, name) for classes in relied.RELIED.values() for cls, names in classes.items() for name in names}
READ_MIN = 70
"""The smallest number of attributes that the reader must find. With fewer, the reader has a fault."""


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_attribute_read_of_vllm_is_recorded(source: Path) -> None:
    """Every attribute that the connector or the core reads of an object of vLLM is in `RELIED`."""
    seen = READER.seen(source.read_text(encoding="utf-8"))
    assert [one for one in seen if (one.cls, one.name) not in RECORDED] == []


def test_the_reader_finds_most_recorded_attributes() -> None:
    """The reader finds most of the recorded attributes, even if the code uses unusual names."""
    seen = {(one.cls, one.name) for path in SOURCES for one in READER.seen(path.read_text(encoding="utf-8"))}
    assert len(seen) >= READ_MIN
    assert seen >= {
        ("BlockPool", "num_gpu_blocks"),
        ("KVCacheGroupSpec", "layer_names"),
        ("KVTransferConfig", "engine_id"),
        ("ModelConfig", "rswa_window"),
        ("ParallelConfig", "use_ubatching"),
        ("Request", "skip_reading_prefix_cache"),
        ("VllmConfig", "is_mm_encoder_only"),
    }


def test_classes_of_objects_follow_from_annotations_origins_and_names() -> None:
    """The class follows from annotations, origins and names.

    The reader also follows lists, options, comprehensions and other names of an object.
    """
    source = """
class Own:
    def __init__(self, manager: KVCacheManager | None, cache):
        self._manager, self.cache = manager, cache
    def ask(self, some: dict[str, Request], groups: list[KVCacheGroupSpec]):
        parallel, other = some_config.x, self.cache
        model = self.config.model_config
        for name, one in some.items():
            one.a; name
        [each.b for each in groups], getattr(model, "c", 0), some["r"].d, self._manager.e
        (lambda config: config.parallel_config.f), other.g, self.cache.h, some.get("r").i
"""
    assert READER.seen(source) == [
        AttributeRead("KVCacheGroupSpec", "b", 10),
        AttributeRead("KVCacheManager", "e", 10),
        AttributeRead("ModelConfig", "c", 10),
        AttributeRead("ParallelConfig", "f", 11),
        AttributeRead("Request", "a", 9),
        AttributeRead("Request", "d", 10),
        AttributeRead("Request", "i", 11),
        AttributeRead("VllmConfig", "model_config", 7),
        AttributeRead("VllmConfig", "parallel_config", 11),
    ]
