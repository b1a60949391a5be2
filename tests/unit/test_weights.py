"""Which weights an engine has: every byte counts, wherever the files lie; and what cannot be read shares nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm import support, weights
from kvpipe.connectors.vllm.weights import Weights
from kvpipe.errors import UnsupportedError


def _digest(model: Path | str, state: Path, load_format: str = "auto") -> str:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, seed=0),
        load_config=SimpleNamespace(load_format=load_format),
    )
    told: list[str] = []
    Weights(config, state, told.append).start(20.0)
    return told[0] if told else ""


def test_every_byte_counts(tmp_path: Path) -> None:
    """One byte anywhere makes other weights; the same bytes in another folder do not."""
    data = bytearray(os.urandom(1 << 20))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    assert _digest(tmp_path / "a", tmp_path) == _digest(tmp_path / "b", tmp_path)
    data[777_777] ^= 1
    (tmp_path / "b" / "model.safetensors").write_bytes(data)
    assert _digest(tmp_path / "a", tmp_path) != _digest(tmp_path / "b", tmp_path)


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file came to is remembered until it changes; a record that is no JSON is not minded."""
    model, reads = tmp_path / "m", list[Path]()
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x")
    (tmp_path / "weights.json").write_text("{", encoding="utf-8")
    read = weights.file_digest

    def counted(path: Path) -> str:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(weights, "file_digest", counted)
    assert _digest(model, tmp_path) == _digest(model, tmp_path)
    assert len(reads) == 1


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    """Where a file cannot be read nothing is said, so that tiers stay unused."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert _digest(tmp_path, tmp_path) == ""
    assert _digest("no/such-model", tmp_path)
    assert _digest(tmp_path, tmp_path, "dummy")


def test_images_that_are_numbered() -> None:
    """A multimodal model whose images vLLM numbers anew in every process is refused with tiers."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        cache_config=SimpleNamespace(enable_prefix_caching=False, prefix_caching_hash_algo="sha256"),
    )
    with pytest.raises(UnsupportedError, match="multimodal"):
        support.check_hashes(config)
    config.cache_config.enable_prefix_caching = True
    support.check_hashes(config)
