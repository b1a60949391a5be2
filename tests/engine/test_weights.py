"""Changes of weights on real engines: on disk between two starts, or in a running engine, in every known way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvpipe.connectors.vllm.tiny.engine import DEFAULTS, Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.testing.waiting import WAIT_S
from tests.engine.common import BLOCK, assert_clean, patient, prompt, waiting, whole_blocks
from tests.rigs.forked import forks_of_this_process, run_forked

pytestmark = pytest.mark.engine

PROMPT = [prompt(300, 1)]
FOUND = whole_blocks(BLOCK, 300)
TOKENS = 12
OWN: dict[str, Any] = {"enable_prefix_caching": False}


def _copies(folder: Path) -> tuple[Path, Path]:
    """Return two models with one configuration, whose weight files have equal sizes and times."""
    first, second = folder / "first", folder / "second"
    for path, factor in ((first, 1.0), (second, 1.3)):
        shutil.copytree(make_model("llama"), path)
        file = path / "model.safetensors"
        save_file({name: tensor * factor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        os.utime(file, (1_000_000_000, 1_000_000_000))
    assert (first / "model.safetensors").stat().st_size == (second / "model.safetensors").stat().st_size
    return first, second


def _replace(model: Path, other: Path) -> None:
    """Replace the weights of `model` by others with the same path, size and time."""
    shutil.copyfile(other / "model.safetensors", model / "model.safetensors")
    os.utime(model / "model.safetensors", (1_000_000_000, 1_000_000_000))


@contextmanager
def _engine(model: Path, folder: Path | None, **options: Any) -> Iterator[Engine]:
    """Yield an engine with a disk tier in `folder`, or without kvpipe if `folder` is None."""
    config = None
    if folder is not None:
        config = {
            "chunk_tokens": 64, "state_dir": str(folder / "state"),
            "tiers": [{"kind": "disk", "path": str(folder / "kv"), "bytes_max": "1GiB"}],
        }  # fmt: skip
    live = Engine(str(model), kvpipe=patient(config), **OWN | options)
    try:
        yield live
    finally:
        live.close()


def _ask(live: Engine) -> tuple[list[list[int]], int]:
    """Return the engine's answer, and the number of prompt tokens that kvpipe found."""
    before = _hits(live)
    answer = live.generate(PROMPT, TOKENS)
    assert_clean(live)
    return answer, _hits(live) - before


def _hits(live: Engine) -> int:
    side = live.connector.scheduler
    assert side is not None
    return sum(side.tracer.hit_tokens.values())


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[int]], list[list[int]]]:
    """Return two models, and the answers of each without kvpipe."""
    models, answers = _copies(tmp_path_factory.mktemp("models")), []
    for model in models:
        with _engine(model, None) as plain:
            answers.append(plain.generate(PROMPT, TOKENS))
    assert answers[0] != answers[1]
    return *models, answers[0], answers[1]


Right = tuple[Path, Path, list[list[int]], list[list[int]]]


def test_files_replaced_between_two_starts(tmp_path: Path, right: Right) -> None:
    """After weights are replaced in place, no old chunk is found.

    After the old weights are restored, all old chunks are found.
    """
    model = tmp_path / "model"
    shutil.copytree(right[0], model)
    first, second, old, new = right
    for weights, expected, found in ((first, old, 0), (second, new, 0), (second, new, FOUND), (first, old, FOUND)):
        _replace(model, weights)
        with _engine(model, tmp_path) as live:
            assert _ask(live) == (expected, found)


def test_files_replaced_after_the_load(tmp_path: Path, right: Right) -> None:
    """KV is stored under the loaded weights, even if the model's files were replaced after vLLM had loaded them."""
    model = tmp_path / "model"
    shutil.copytree(right[0], model)
    with _engine(model, tmp_path) as live:
        _replace(model, right[1])
        assert _ask(live) == (right[2], 0)
    with _engine(model, tmp_path) as live:
        assert _ask(live) == (right[3], 0)
    with _engine(right[0], tmp_path) as live:
        assert _ask(live) == (right[2], FOUND)


def _reload_weights(live: Engine, model: Path) -> None:
    live.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def _reload_in_worker(live: Engine, model: Path) -> None:
    def load(worker: Any) -> None:
        worker.reload_weights(weights_path=str(model))

    live.llm.collective_rpc(load)


def _apply_model(live: Engine, model: Path) -> None:
    """Write directly into the tensors of the embedding, because a CPU build has packed the other weights."""
    tensor = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

    def write(loaded: Any) -> None:
        loaded.model.embed_tokens.weight.data.copy_(tensor)

    live.llm.apply_model(write)


def _load_weights(live: Engine, model: Path) -> None:
    """Load weights as training frameworks in the same process do: directly into the model, without vLLM's calls."""
    tensors = load_file(model / "model.safetensors")
    loaded = live.core.model_executor.driver_worker.worker.model_runner.model
    loaded.load_weights([("model.embed_tokens.weight", tensors["model.embed_tokens.weight"])])


def _write_and_reset(live: Engine, model: Path) -> None:
    """Write new weights without any call that kvpipe notices.

    Then reset vLLM's prefix cache, but not the connector's cache.
    """
    tensor = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    loaded = live.core.model_executor.driver_worker.worker.model_runner.model
    loaded.model.embed_tokens.weight.data.copy_(tensor)
    live.llm.reset_prefix_cache()


ROADS: list[Callable[[Engine, Path], None]] = [
    _reload_weights, _reload_in_worker, _apply_model, _load_weights, _write_and_reset
]  # fmt: skip


def test_weights_changed_in_a_running_engine(tmp_path: Path, right: Right) -> None:
    """After every way of changing weights, old KV is found neither by kvpipe nor in vLLM's own cache.

    After the old weights are restored, their KV is found.
    """
    prompts = [[prompt(300, 20 + i)] for i in range(len(ROADS))]
    old, new = [], []
    with _engine(right[0], None) as plain:
        for change, ask in zip(ROADS, prompts, strict=True):
            old.append(plain.generate(ask, TOKENS))
            change(plain, right[1])
            new.append(plain.generate(ask, TOKENS))
            _reload_weights(plain, right[0])
    with _engine(right[0], tmp_path, enable_prefix_caching=True) as live:
        assert _ask(live) == (right[2], 0)
        for change, ask, was, will_be in zip(ROADS, prompts, old, new, strict=True):
            assert was != will_be, change.__name__
            assert live.generate(ask, TOKENS) == was
            live.settle()
            before = _hits(live)
            change(live, right[1])
            assert live.generate(ask, TOKENS) == will_be, change.__name__
            assert _hits(live) == before, change.__name__
            assert live.generate(ask, TOKENS) == will_be
            _reload_weights(live, right[0])
            assert live.generate(ask, TOKENS) == was, change.__name__
            assert _hits(live) - before == FOUND, change.__name__
            assert_clean(live)
        assert live.connector.stats()["weights_changed"] == 2 * len(ROADS)
    with _engine(right[0], tmp_path) as fresh:
        assert _ask(fresh) == (right[2], FOUND)


def test_calls_that_change_nothing(tmp_path: Path, right: Right) -> None:
    """Calls that may change weights, but do not, lose no chunk."""
    with _engine(right[0], tmp_path) as live:
        assert _ask(live) == (right[2], 0)
        live.llm.collective_rpc(lambda worker: worker.rank)
        assert _ask(live) == (right[2], FOUND)
        live.llm.reset_prefix_cache()
        assert _ask(live) == (right[2], FOUND)
        stats = live.connector.stats()
        assert (stats["weights_unchanged"], stats.get("weights_changed", 0)) == (2, 0)


def test_weights_changed_under_running_requests(tmp_path: Path, right: Right) -> None:
    """Requests that run during the change have KV of the old weights.

    Neither kvpipe nor vLLM's own cache offers this KV to other requests.
    """
    with _engine(right[0], tmp_path, enable_prefix_caching=True) as live:
        live.add(PROMPT[0], 100, request_id="old")
        for _ in range(40):
            live.step()
        _reload_weights(live, right[1])
        heirs = [live.add(PROMPT[0], TOKENS, request_id=f"new{i}") for i in range(2)]
        outputs = live.drain()
        assert live.connector.stats()["weights_changed"] == 1
        assert [list(outputs[heir].outputs[0].token_ids) for heir in heirs] == right[3] * 2
        followed = [PROMPT[0] + list(outputs["old"].outputs[0].token_ids)]
        answer = live.generate(followed, TOKENS)
        assert_clean(live)
    with _engine(right[1], None) as plain:
        assert answer == plain.generate(followed, TOKENS)
    with _engine(right[1], tmp_path) as fresh:
        assert fresh.generate(followed, TOKENS) == answer
        assert_clean(fresh)


def test_a_reset_stays_a_reset(tmp_path: Path, right: Right) -> None:
    """After a reset, an engine with the same weights finds none of the chunks from before the reset."""
    with _engine(right[0], tmp_path) as live:
        assert _ask(live) == (right[2], 0)
        assert live.llm.reset_prefix_cache(reset_connector=True)
        _reload_weights(live, right[1])
        assert _ask(live) == (right[3], 0)
        _reload_weights(live, right[0])
        assert _ask(live) == (right[2], 0)
    with _engine(right[1], tmp_path) as fresh:
        assert _ask(fresh) == (right[3], 0)


def test_two_ranks(tmp_path: Path, right: Right, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks in their own processes, each rank digests its weights, and a change is noticed."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with _engine(right[0], tmp_path, tensor_parallel_size=2) as live:
        assert _ask(live)[1] == 0
        old, found = _ask(live)
        assert found == FOUND
        _reload_weights(live, right[1])
        new, found = _ask(live)
        assert found == 0
        assert new != old
        _reload_weights(live, right[0])
        assert _ask(live) == (old, FOUND)
    with _engine(right[1], tmp_path, tensor_parallel_size=2) as fresh:
        assert _ask(fresh) == (new, FOUND)


def _answers_around_a_reload(model: str, other: str, folder: str, out: str) -> None:
    """Write the answers of an engine before and after a reload of its weights.

    The engine runs in a fork of this process.
    """
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    config = {"chunk_tokens": 64, "pool_bytes_max": "64MiB", "tiers": [{"kind": "disk", "path": folder}]}
    transfer: Any = {
        "kv_connector": "KVPipeConnector", "kv_role": "kv_both", "kv_connector_extra_config": patient(config),
        "kv_connector_module_path": "kvpipe.connectors.vllm.connector",
    }  # fmt: skip
    with waiting(), forks_of_this_process():
        llm = LLM(model, kv_transfer_config=transfer, **DEFAULTS)
        assert not hasattr(llm.llm_engine.engine_core, "engine_core"), "the engine runs in this process"

        def answer() -> list[int]:
            params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
            return list(llm.generate({"prompt_token_ids": PROMPT[0]}, params)[0].outputs[0].token_ids)

        answers = [answer()]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        answers += [answer(), answer()]
        Path(out).write_text(json.dumps(answers), encoding="utf-8")
        llm.llm_engine.engine_core.shutdown()


def test_an_engine_process_of_its_own(tmp_path: Path, right: Right) -> None:
    """If vLLM's engine runs in its own process, calls of the client that change weights are noticed in that process."""
    log, out = tmp_path / "log", tmp_path / "answers.json"
    asked = (str(right[0]), str(right[1]), str(tmp_path / "kv"), str(out))
    assert run_forked(log, 5 * WAIT_S, _answers_around_a_reload, *asked) == 0, log.read_text("utf-8", "replace")[-3000:]
    assert json.loads(out.read_text(encoding="utf-8")) == [right[2][0], right[3][0], right[3][0]]
