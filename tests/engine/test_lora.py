"""LoRA adapters on real engines: a request finds KV only if the bytes of its adapter have computed this KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_adapter
from kvpipe.threads.adapter_files import SETTLED_S
from kvpipe.worker.side import WorkerSide
from tests.engine.common import BLOCK, assert_clean, engine, prompt, whole_blocks

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine

P, Q = prompt(300, 1), prompt(333, 2)
BASE, ONE, TWO = 0, 1, 2
TOKENS = 12
HELD, HELD_Q = whole_blocks(BLOCK, len(P)), whole_blocks(BLOCK, len(Q))
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3, "enable_prefix_caching": False}
Answers = dict[tuple[int, int], list[int]]


def _disk(folder: Path) -> dict[str, Any]:
    return {"chunk_tokens": 64, "tiers": [{"kind": "disk", "path": str(folder / "kv")}]}


def _adapter(name: str, number: int, folder: Path, **more: Any) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder), **more)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return vLLM's answers without a connector, by adapter and prompt length. Adapter 0 is the base model."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [None, *(_adapter(f"x{i}", i, make_adapter(folder / f"{i}", i)) for i in (ONE, TWO))]
    with engine(**OPTIONS) as plain:
        out = {(i, len(p)): plain.generate([p], TOKENS, lora=a)[0] for i, a in enumerate(adapters) for p in (P, Q)}
    assert len({tuple(answer) for answer in out.values()}) == len(out)
    return out


def _answers(live: Engine, tokens: Sequence[int], *adapters: LoRARequest | None) -> list[list[int]]:
    """Return the answers of one batch, in which each adapter has the same prompt."""
    ids = [live.add(tokens, TOKENS, lora=adapter) for adapter in adapters]
    outputs = live.drain()
    return [list(outputs[i].outputs[0].token_ids) for i in ids]


def _loaded(live: Engine) -> int:
    return assert_clean(live).get("tokens_loaded", 0)


def _readings(live: Engine) -> int:
    side, worker = live.connector.scheduler, live.worker_connector.worker
    assert side is not None
    assert isinstance(worker, WorkerSide)
    return side.adapters.reader.readings + worker.adapters.readings


def test_lora_adapters_never_share(tmp_path: Path, right: Answers) -> None:
    """The KV of an adapter is a miss for other adapters and for the base model, and a hit for the same adapter."""
    adapters = [None, *(_adapter(f"a{i}", i, make_adapter(tmp_path / f"{i}", i)) for i in (ONE, TWO))]
    with engine(kvpipe={}, **OPTIONS) as live:
        loaded = 0
        for i, adapter in enumerate(adapters):
            assert _answers(live, P, adapter) == [right[i, len(P)]]
            assert _loaded(live) == loaded
            assert _answers(live, P, adapter) == [right[i, len(P)]]
            loaded += HELD
            assert _loaded(live) == loaded


def test_names_ids_and_bytes_change_between_restarts(tmp_path: Path, right: Answers) -> None:
    """KV of an adapter is found only if the adapter's bytes are equal. Names and ids have no effect.

    Two adapters and the base model run in one batch. The files of both adapters are overwritten while vLLM serves the
    loaded bytes. In the next engine the adapters have exchanged bytes, names and numbers. In the last engine they have
    the bytes, names and numbers of the first engine.
    """
    a, b, kv = tmp_path / "a", tmp_path / "b", _disk(tmp_path)
    make_adapter(a, ONE), make_adapter(b, TWO)
    with engine(kvpipe=kv, **OPTIONS) as live:
        first = (None, _adapter("a", 1, a), _adapter("b", 2, b))
        assert _answers(live, P, *first) == [right[i, len(P)] for i in (BASE, ONE, TWO)]
        make_adapter(a, TWO), make_adapter(b, ONE)
        (a / "adapter_config.json").touch()  # the other adapter's file keeps its modification time
        assert _answers(live, Q, *first) == [right[i, len(Q)] for i in (BASE, ONE, TWO)]
        assert _loaded(live) == 0
    with engine(kvpipe=kv, **OPTIONS) as live:
        swapped = (None, _adapter("a", 2, a), _adapter("b", 1, b))
        for tokens, held in ((P, HELD), (Q, HELD + HELD_Q)):
            assert _answers(live, tokens, *swapped) == [right[i, len(tokens)] for i in (BASE, TWO, ONE)]
            assert _loaded(live) == held  # the KV of the base model
    make_adapter(a, ONE), make_adapter(b, TWO)
    with engine(kvpipe=kv, **OPTIONS) as live:
        for tokens, held in ((P, 3 * HELD), (Q, 3 * (HELD + HELD_Q))):
            assert _answers(live, tokens, *first) == [right[i, len(tokens)] for i in (BASE, ONE, TWO)]
            assert _loaded(live) == held


def test_an_adapter_changes_in_a_running_engine(tmp_path: Path, right: Answers) -> None:
    """An adapter is loaded in place, or evicted and loaded again.

    KV is found only while the adapter has the bytes that computed the KV.
    """
    a, b = make_adapter(tmp_path / "a", ONE), make_adapter(tmp_path / "b", TWO)
    one, other = _adapter("a", 1, a), _adapter("b", 2, b)
    with engine(kvpipe={}, **OPTIONS | {"max_loras": 1, "max_cpu_loras": 1}) as live:

        def wording(which: int, loaded: int, request: LoRARequest = one) -> None:
            before = live.connector.stats().get("tokens_loaded", 0)
            assert _answers(live, P, request) == [right[which, len(P)]]
            live.settle()
            assert live.connector.stats().get("tokens_loaded", 0) - before == loaded

        wording(ONE, 0)
        wording(ONE, HELD)
        make_adapter(a, TWO)
        wording(ONE, HELD)  # vLLM has the adapter in memory
        live.llm.llm_engine.add_lora(_adapter("a", 1, a, load_inplace=True))
        wording(TWO, 0)
        wording(TWO, HELD)
        live.llm.llm_engine.remove_lora(1)
        make_adapter(a, ONE)
        wording(ONE, HELD)
        live.llm.llm_engine.add_lora(one)  # the adapter is loaded, so vLLM does nothing
        make_adapter(a, TWO)
        wording(ONE, HELD)
        make_adapter(a, ONE)
        in_place = _adapter("a", 1, a, load_inplace=True)
        wording(ONE, HELD, in_place)  # after the first request, an API server sends requests in this form
        make_adapter(a, TWO)
        wording(TWO, HELD, in_place)
        wording(TWO, 0, other)  # vLLM has room for one adapter
        make_adapter(a, ONE)
        wording(ONE, HELD)
        counters = assert_clean(live)
        assert "worker.adapter_changed" not in counters, "no load was promised that failed"


def test_the_same_files_taken_for_another_layout(tmp_path: Path, right: Answers) -> None:
    """One engine reads an adapter's files as those of fused experts.

    This engine finds no KV of engines that read the files otherwise.
    """
    a, kv = make_adapter(tmp_path / "a", ONE), _disk(tmp_path)
    for fused, held in ((False, 0), (True, 0), (False, HELD), (True, HELD)):
        with engine(kvpipe=kv, **OPTIONS) as live:
            assert _answers(live, P, _adapter("a", 1, a, is_3d_lora_weight=fused)) == [right[ONE, len(P)]]
            assert _loaded(live) == held, "a model without experts computes the same, but nobody knows that"


def test_many_requests_of_one_new_adapter(tmp_path: Path, right: Answers) -> None:
    """Sixty requests of a new adapter read its bytes once before vLLM loads it, and once while vLLM loads it."""
    new = _adapter("a", 1, make_adapter(tmp_path / "a", ONE))
    time.sleep(SETTLED_S)
    with engine(kvpipe=_disk(tmp_path), **OPTIONS) as live:
        assert _answers(live, P, *[new] * 60) == [right[ONE, len(P)]] * 60
        assert_clean(live)
        assert _readings(live) == 2


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks, two adapters never share KV, even if the second is loaded in place of the first."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = OPTIONS | {"tensor_parallel_size": 2}
    folder = make_adapter(tmp_path / "a", ONE)
    asked = (None, _adapter("a", 1, folder), _adapter("b", 2, make_adapter(tmp_path / "b", TWO)))
    with engine(**options) as plain:
        answers = _answers(plain, P, *asked)
    assert len({tuple(answer) for answer in answers}) == 3
    with engine(kvpipe={}, **options) as live:
        for held in (0, 3 * HELD):
            assert _answers(live, P, *asked) == answers
            assert _loaded(live) == held
        make_adapter(folder, TWO)
        live.llm.llm_engine.add_lora(_adapter("a", 1, folder, load_inplace=True))
        assert _answers(live, P, *asked) == [answers[BASE], answers[TWO], answers[TWO]]
        assert_clean(live)
