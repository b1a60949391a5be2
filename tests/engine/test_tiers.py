"""Tiers on real engines: an engine finds chunks that another engine has saved, and failures cost only hits."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES, make_model
from tests.engine.child_engine import child
from tests.engine.common import BLOCK, assert_clean, baseline, engine, patient, prompt, whole_blocks
from tests.rigs.tier_worlds import WORLDS
from tests.rigs.tier_worlds.disk import grow_old

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 1), prompt(611, 2), prompt(150, 3)]
DUE = whole_blocks(BLOCK, *map(len, PROMPTS))
TOKENS = 20
OWN: dict[str, Any] = {"enable_prefix_caching": False}
SMALL: dict[str, Any] = {"chunk_tokens": 64}


def _disk(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the configuration of a disk tier with small chunks."""
    store = more.pop("tiers_store", "all")
    return SMALL | {"tiers": [{"kind": "disk", "path": str(folder / "kv"), "bytes_max": "1GiB", "store": store}]} | more


def _hits(live: Engine) -> dict[str, int]:
    side = live.connector.scheduler
    assert side is not None
    return dict(side.tracer.hit_tokens)


def _fill(folder: Path, **options: Any) -> None:
    """Make an engine save and store all of `PROMPTS`, and stop the engine."""
    with engine(kvpipe=_disk(folder), **OWN | options) as live:
        live.generate(PROMPTS, TOKENS)
        assert assert_clean(live)["chunks_stored"] > 0


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the chunks of an engine."""
    folder = tmp_path_factory.mktemp("filled")
    _fill(folder)
    return folder


@pytest.mark.parametrize("recipe", ["llama", "gemma2-hybrid"])
def test_restart_with_disk(tmp_path: Path, recipe: str) -> None:
    """A restarted engine finds the chunks of the engine before on disk, and its answers are the same."""
    expected = baseline(PROMPTS, TOKENS, recipe, **OWN)
    for restarted in (False, True):
        with engine(recipe, _disk(tmp_path), **OWN) as live:
            assert live.generate(PROMPTS, TOKENS) == expected
            stats, hits = assert_clean(live), _hits(live)
        assert hits.get("disk", 0) == restarted * DUE, (hits, stats)
        assert stats.get("tokens_loaded", 0) == restarted * DUE
    assert "worker.chunk_damaged" not in stats


def test_the_longest_prompt_is_part_of_the_name(tmp_path: Path) -> None:
    """Rotary factors may depend on `max_model_len`, so engines with different values share no chunks."""
    asked = [prompt(300, 65)]
    for tokens_max, hits in ((512, 0), (1024, 0), (512, whole_blocks(BLOCK, 300))):
        options = OWN | {"max_model_len": tokens_max}
        expected = baseline(asked, TOKENS, "phi3-longrope", **options)
        with engine("phi3-longrope", _disk(tmp_path), **options) as live:
            assert live.generate(asked, TOKENS) == expected
            assert assert_clean(live).get("tokens_loaded", 0) == hits
    assert expected != baseline(asked, TOKENS, "phi3-longrope", **OWN | {"max_model_len": 1024})


@pytest.mark.parametrize("kind", ["disk", "redis", "s3", "mooncake"])
def test_two_engines_at_once(tmp_path: Path, kind: str) -> None:
    """Two running engines share a store.

    Each engine finds the chunks of the other engine, and both give the same answers.
    """
    first, second = [prompt(300, 61)], [prompt(420, 62)]
    expected = baseline([*first, *second], TOKENS, **OWN)
    with WORLDS[kind](tmp_path) as world:
        config = SMALL | {"tiers": [json.loads(world.spec.model_dump_json(exclude_none=True))]}
        with child(kvpipe=config, **OWN) as other, engine(kvpipe=config, **OWN) as live:
            assert live.generate(first, TOKENS) == expected[:1]
            assert_clean(live)
            answers, hits = other.generate([*first, *second], TOKENS)
            assert answers == expected
            assert hits[kind] == whole_blocks(BLOCK, 300)
            assert live.generate(second, TOKENS) == expected[1:]
            assert_clean(live)
            assert _hits(live)[kind] == 416


def test_producer_and_consumer(tmp_path: Path) -> None:
    """A consumer loads the chunks that a producer has saved, and saves nothing itself."""
    expected = baseline(PROMPTS, TOKENS, **OWN)
    with engine(kvpipe=_disk(tmp_path), role="kv_producer", **OWN) as live:
        assert live.generate(PROMPTS, 1) == [answer[:1] for answer in expected]
        assert_clean(live)
    files = sorted((tmp_path / "kv").rglob("*-g0-*"))
    with engine(kvpipe=_disk(tmp_path), role="kv_consumer", **OWN) as live:
        assert live.generate(PROMPTS, TOKENS) == expected
        assert_clean(live)
        assert _hits(live)["disk"] == DUE
    assert sorted((tmp_path / "kv").rglob("*-g0-*")) == files
    assert files


def test_two_ranks_with_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks reads its own parts. A chunk that lacks a part is computed."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = OWN | {"tensor_parallel_size": 2}
    with engine(kvpipe=_disk(tmp_path), **options) as live:
        expected = live.generate(PROMPTS, TOKENS)
        assert_clean(live)
        assert _hits(live) == {"memory": 0}
    with engine(kvpipe=_disk(tmp_path), **options) as live:
        assert live.generate(PROMPTS, TOKENS) == expected
        assert_clean(live)
        assert _hits(live)["disk"] == DUE
        for part in (tmp_path / "kv").rglob("*-r1of2"):
            part.unlink()
        side = live.connector.scheduler
        assert side is not None
        assert side.staging is not None
        grow_old(side.staging.finder.tiers[0].tier)
        side.catalog.reset()
        assert live.generate(PROMPTS, TOKENS) == expected
        assert_clean(live)
        assert _hits(live)["disk"] == DUE


def test_a_pool_of_eight_chunks_over_disk(tmp_path: Path) -> None:
    """The prompts are larger than memory, so most chunks are read from disk again and again. Answers are the same."""
    prompts = [prompt(200 + 7 * i, 70 + i) for i in range(8)]
    expected = baseline(prompts, 4, **OWN)
    eight = 8 * 64 * TOKEN_BYTES
    with engine(kvpipe=_disk(tmp_path, pool_bytes_max=eight), **OWN) as live:
        assert live.connector.stats()["slots"] == 8
        for _ in range(3):
            for one, answer in zip(prompts, expected, strict=True):
                assert live.generate([one], 4) == [answer]
                live.settle()
        assert_clean(live)
        assert live.generate(prompts, 4) == expected
        assert_clean(live)
        assert _hits(live)["disk"] > sum(map(len, prompts))


def test_prompt_in_a_tier_is_found_under_the_same_salt_only(tmp_path: Path) -> None:
    """Another engine finds a prompt in the tier only with the same salt."""
    expected = baseline(PROMPTS[:1], TOKENS, **OWN)
    with engine(kvpipe=_disk(tmp_path), **OWN) as live:
        assert live.generate(PROMPTS[:1], TOKENS, salt="mine") == expected
        assert_clean(live)
    with engine(kvpipe=_disk(tmp_path), **OWN) as live:
        for salt, due in (("yours", 0), (None, 0), ("mine", whole_blocks(BLOCK, 300))):
            assert live.generate(PROMPTS[:1], TOKENS, salt=salt) == expected
            assert_clean(live)
            assert _hits(live).get("disk", 0) == due, salt


def _block_names(tokens: list[int]) -> set[str]:
    """Return vLLM's block hashes of a prompt, which anybody can compute."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return {key.hex() for key in Request("guess", tokens, SamplingParams(), None, block_hasher=hasher).block_hashes}


def test_guess_of_a_prompt_is_confirmed_on_a_plain_disk_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk without encryption, the guess is confirmed block by block.

    An encrypted disk confirms no guess, and still serves hits.
    """
    monkeypatch.setenv("DISK_KEY", base64.b64encode(os.urandom(32)).decode())
    plain, hidden = (
        {"kind": "disk", "path": str(tmp_path / name), "bytes_max": "1GiB"} for name in ("plain", "hidden")
    )
    hidden["encryption_key_env"] = "DISK_KEY"
    with engine(kvpipe=SMALL | {"tiers": [plain, hidden]}, **OWN) as live:
        expected = live.generate(PROMPTS, TOKENS)
        assert_clean(live)
        space = live.connector.scheduler.staging.space.name  # type: ignore[union-attr]
    guesses = {space} | _block_names(PROMPTS[0])
    for folder, confirmed in (("plain", True), ("hidden", False)):
        files = [file for file in (tmp_path / folder).rglob("*") if file.is_file()]
        seen = [text for file in files for text in (str(file).encode(), file.read_bytes())]
        assert any(guess.encode() in text for guess in guesses - {space} for text in seen) == confirmed
        assert any(space.encode() in text for text in seen) == confirmed
        assert any(bytes.fromhex(guess) in text for guess in guesses for text in seen) is False
    shutil.rmtree(tmp_path / "plain")
    with engine(kvpipe=SMALL | {"tiers": [plain, hidden]}, **OWN) as live:
        assert live.generate(PROMPTS, TOKENS) == expected
        assert_clean(live)
        assert _hits(live) == {"memory": 0, "disk-2": DUE}


@pytest.mark.parametrize(
    ("options", "config", "found"),
    [
        pytest.param({}, {}, True, id="same model elsewhere"),
        pytest.param({"dtype": "bfloat16"}, {}, False, id="dtype"),
        pytest.param({}, {"chunk_tokens": 128}, False, id="chunks"),
        pytest.param({"block_size": 2 * BLOCK}, {}, False, id="blocks"),
        pytest.param({"weights": "others"}, {}, False, id="weights"),
    ],
)
def test_engines_share_chunks_when_weights_and_layouts_are_equal(
    tmp_path: Path,
    filled: Path,
    options: dict[str, Any],
    config: dict[str, Any],
    found: bool,
) -> None:
    """An engine with the same model in another folder finds the chunks.

    An engine with other weights, dtypes or layouts does not.
    """
    model, options = tmp_path / "model", dict(options)
    shutil.copytree(make_model("llama"), model)
    if options.pop("weights", None):
        weights = load_file(model / "model.safetensors")
        save_file({name: tensor * 1.01 for name, tensor in weights.items()}, model / "model.safetensors")
    live = Engine(str(model), kvpipe=patient(_disk(filled, **config, tiers_store="never")), **OWN | options)
    try:
        live.generate(PROMPTS, 2)
        stats = assert_clean(live)
        assert _hits(live) == ({"memory": 0, "disk": DUE} if found else {"memory": 0})
        assert stats["tier_lookup"] == len(PROMPTS)
    finally:
        live.close()


def test_engines_share_a_tier_whatever_other_tiers_they_have(tmp_path: Path, filled: Path) -> None:
    """A tier's chunks are found although another tier is asked before it.

    After that, they are found in this other tier alone. The first tier's chunks are also found with a third tier after
    it.
    """
    (far,) = _disk(filled, tiers_store="never")["tiers"]
    near, other = (far | {"path": str(tmp_path / name), "store": "all"} for name in ("near", "other"))
    for tiers, found in (([near, far], "disk-2"), ([near], "disk"), ([far, other], "disk")):
        with engine(kvpipe=SMALL | {"tiers": tiers}, **OWN) as live:
            live.generate(PROMPTS, 2)
            assert_clean(live)
            assert _hits(live) == {"memory": 0, found: DUE}


def test_a_reset_forgets_tiers_too(tmp_path: Path) -> None:
    """After a reset, for example for new weights, no older chunk is found in a tier."""
    with engine(kvpipe=_disk(tmp_path), **OWN) as live:
        expected = live.generate(PROMPTS[:1], TOKENS)
        live.settle()
        assert live.llm.reset_prefix_cache(reset_connector=True)
        assert live.generate(PROMPTS[:1], TOKENS) == expected
        assert_clean(live)
        assert _hits(live) == {"memory": 0}
