"""The preparation of images and other media is part of a cache's identity."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal import MULTIMODAL_REGISTRY

from kvpipe.connectors.vllm.identity.media import media_facts


def engine(
    model: Path | str,
    *,
    commit: str | None = None,
    revision: str = "main",
    both_directions: bool = False,
    **settings: object,
) -> Any:
    """Return the configuration of a multimodal engine."""
    multimodal = SimpleNamespace(language_model_only=False, mm_processor_kwargs=None, **settings)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=multimodal,
            model=str(model),
            revision=revision,
            hf_config=SimpleNamespace(_commit_hash=commit),
            is_mm_prefix_lm=both_directions,
        )
    )


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return an object whose attribute `one` is every model's processor.

    While `one` is None, creating a processor raises.
    """
    holder = SimpleNamespace(one=None)

    def create(model: object) -> object:
        if holder.one is None:
            message = f"there is no processor for {model}"
            raise ValueError(message)
        return SimpleNamespace(info=SimpleNamespace(get_hf_processor=lambda: holder.one))

    monkeypatch.setattr(MULTIMODAL_REGISTRY, "create_processor", create)
    return holder


class Normalize:
    """A transformation like torchvision's, with plain attributes and without `to_dict`."""

    def __init__(self, mean: object) -> None:
        """Keep the mean for images."""
        self.mean = mean


class Slotted:
    """A class without `__dict__`."""

    __slots__ = ("mean",)

    def __init__(self, mean: object) -> None:
        """Keep the mean for images."""
        self.mean = mean


Slotted.__module__ = "vllm.transformers_utils.processors.some"


class Odd(Normalize):
    """A class whose `to_dict` needs an argument."""

    def to_dict(self, what: object) -> dict[str, object]:
        """Must not be called."""
        raise AssertionError(what)


class PreTrainedTokenizerBase(Normalize):
    """A class with the name of a base class of tokenizers."""


def _in_a_circle(mean: object) -> object:
    one, two = Normalize(mean), Normalize([mean])
    two.mean = [one, {"back": two}]
    return Normalize([one, two, two])


WAYS: list[Any] = [
    lambda mean: mean,
    lambda mean: bytes([mean]),
    lambda mean: [torch.float16, torch.float32][mean],
    lambda mean: np.full((2, 3), mean),
    lambda mean: np.array([Normalize(mean)], object),
    lambda mean: torch.full((2,), mean, dtype=torch.bfloat16),
    torch.tensor,
    lambda mean: functools.partial(max, mean),
    lambda mean: re.compile(str(mean)),
    lambda mean: {(1, mean), (2, 3)},
    lambda mean: {(mean, "a"): Odd},
    lambda mean: {"a" if mean else "b": 1},
    lambda mean: {1 if mean else "1": 1},
    lambda mean: [Odd, Normalize][mean],
    Normalize,
    lambda mean: SimpleNamespace(transforms=[Normalize([0, mean])]),
    Slotted,
    Odd,
    _in_a_circle,
]


@pytest.mark.parametrize("way", WAYS)
def test_every_part_of_a_processor_counts(tmp_path: Path, processor: SimpleNamespace, way: Any) -> None:
    """Every part of a processor changes the facts, even a part of an unknown class. Equal parts give equal facts."""
    message = []
    for mean in (0, 1, 1):
        processor.one = Normalize(way(mean))
        message.append(media_facts(engine(tmp_path)))
    assert message[0] != message[1] == message[2]


def test_a_tokenizer_does_not_count(tmp_path: Path, processor: SimpleNamespace) -> None:
    """A tokenizer does not change the facts, because a key already includes the tokens."""
    message = set()
    for mean in (0, 1):
        processor.one = Normalize(PreTrainedTokenizerBase(mean))
        message.add(media_facts(engine(tmp_path)))
    assert len(message) == 1


def test_engine_starts_with_deep_and_broken_processors(tmp_path: Path, processor: SimpleNamespace) -> None:
    """The engine starts even if its processor has deep, odd or broken parts."""

    class Broken:
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise RuntimeError

    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    for one in (Broken(), Normalize(Broken()), deep, Normalize(deep), torch.ones(2, device="meta")):
        processor.one = one
        assert media_facts(engine(tmp_path))


_ALONE = """
import functools, threading
from pathlib import Path
from types import SimpleNamespace
from kvpipe.connectors.vllm.identity.media import described
one = SimpleNamespace(
    names={"a", "b", "c", ("d", 1)}, path=Path("/x/y"), lock=threading.Lock(), key=object(), call=lambda: 0,
    more=functools.partial(print, object()), objects={object(), SimpleNamespace, print},
)
one.back = [one]
print(described(lambda: one))
"""


def test_every_process_shows_the_same() -> None:
    """The facts contain no address and do not depend on the order of a set."""
    message = {
        subprocess.run(
            [sys.executable, "-c", _ALONE],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(message) == 1
    assert '"names"' in message.pop()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processing_some.py", "image_processor.py"])
def test_files_count_beside_a_processor(tmp_path: Path, processor: SimpleNamespace, name: str, known: bool) -> None:
    """The contents of a processor's files and code are part of the identity, even if creating it fails."""
    processor.one = Normalize(1) if known else None
    file = tmp_path / name
    file.write_text("size = 224", encoding="utf-8")
    before = media_facts(engine(tmp_path))
    assert media_facts(engine(tmp_path)) == before
    file.write_text("size = 448", encoding="utf-8")
    assert media_facts(engine(tmp_path)) != before


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """An unreadable file differs from a missing file, and the engine starts."""
    before = media_facts(engine(tmp_path))
    (tmp_path / "preprocessor_config.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "processor.json").mkdir()
    assert media_facts(engine(tmp_path)) != before
    assert media_facts(engine("a\0b"))


def test_the_commit_of_a_hub_counts(processor: SimpleNamespace) -> None:
    """A model from a hub is identified by its revision and by the commit of that revision."""
    processor.one = Normalize(1)
    message = [
        media_facts(engine("org/model", commit="1")),
        media_facts(engine("org/model", commit="2")),
        media_facts(engine("org/model", commit="2", revision="v1")),
    ]
    assert len(set(message)) == len(message)


def test_settings_that_change_inputs_count(tmp_path: Path) -> None:
    """Settings that only limit the accepted inputs are not part of the identity."""
    plain = media_facts(engine(tmp_path / "org" / "model"))
    assert media_facts(engine(tmp_path / "org" / "model", limit_per_prompt={"image": 2})) == plain
    assert media_facts(engine(tmp_path / "org" / "model", video_pruning_rate=0.5)) != plain


def test_models_whose_images_attend_in_both_directions_have_a_namespace_of_their_own(tmp_path: Path) -> None:
    """Older versions of kvpipe stored KV of images that a step had divided.

    Therefore these models have a new namespace. Other models keep their old namespace.
    """
    assert media_facts(engine(tmp_path, both_directions=True)) != media_facts(engine(tmp_path))
