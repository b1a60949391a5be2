"""Bad input is refused before the engine serves, and one sentence names the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.testing.waiting import WAIT_S
from tests.engine.common import engine, prompt
from tests.rigs.forked import run_forked

pytestmark = pytest.mark.engine

SECOND_USE = {"kind": "disk", "path": "/mnt/kv", "store": "second_use"}


def _refusal(config: dict[str, Any], **options: Any) -> str:
    """Start the engine, and return the message of the error, even if another error wraps it."""
    with pytest.raises(Exception, match=r"kvpipe|kv_role") as caught, engine(kvpipe=config, **options):
        pass
    error: BaseException | None = caught.value
    while error is not None and "kvpipe" not in str(error):
        error = error.__cause__ or error.__context__
    return str(error or caught.value)


@pytest.fixture(autouse=True)
def _forget_the_half_started_engine() -> Any:
    """Remove the process-wide state of vLLM that a refused engine leaves."""
    yield
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    ensure_kv_transfer_shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({"chunk_sizee": 256}, {}, ["'chunk_sizee'", "did you mean"]),
        ({"pool_bytes_max": "512KiB"}, {}, ["pool_bytes_max=512KiB", "smaller than one chunk", "at least"]),
        ({"chunk_tokens": "many"}, {}, ["chunk_tokens='many'", "Default: 256"]),
        ({"bypass": True, "freeze": True}, {}, ["bypass=true contradicts freeze=true", "set only one"]),
        ({}, {"role": "kv_boss"}, ["kv_boss", "kv_both"]),
        ({"tiers": [SECOND_USE]}, {"role": "kv_producer"}, ["tier 1 (disk)", "store='second_use'", "set store='all'"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_bad_configuration_is_refused(
    config: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    """Each configuration is refused, and the message names the key to change."""
    message = _refusal(config, **options)
    for words in expected:
        assert words in message, message


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"async_scheduling": True}], ids=str)
def test_an_engine_that_cannot_be_served_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """If an engine's settings are refused, no process is started. The message is one sentence."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was begun")

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", never)
    several = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    message = _refusal({}, **several, **options)
    what = "distributed_executor_backend='external_launcher' with several ranks"
    assert message == f"kvpipe: {what} is not supported; use 'mp' or 'ray'"


@pytest.mark.parametrize(
    ("model", "what"), [("gemma2-hybrid", "2 KV cache groups"), ("mistral-sw", "a sliding window of 128 tokens")]
)
def test_sync_loads_that_vllm_cannot_recover_from_are_refused(model: str, what: str) -> None:
    """After a failed load within a step, vLLM cannot recover with these models.

    If there are several groups, vLLM accepts no report of failed blocks. If there is a window, vLLM reads the window's
    blocks before a failed block without a check.
    """
    with pytest.raises(Exception, match=f"load='sync' for a model with {what} is not supported"):  # noqa: SIM117
        with engine(model, {"load": "sync"}):
            pass


def test_second_layout_under_one_name_is_refused(tmp_path: Path) -> None:
    """A second engine cannot use a running engine's name with another layout.

    With the same layout, a second engine can use the name.
    """
    config, log = {"name": "shared", "state_dir": str(tmp_path)}, tmp_path / "log"
    with engine(kvpipe=config) as live:
        live.generate([prompt(40, 1)], 2)
        code = run_forked(log, 5 * WAIT_S, _same_layout_then_another, str(make_model("llama")), config)
    stated = log.read_text("utf-8")
    assert code != 0
    answers = [line for line in stated.splitlines() if line.startswith(("float32 ", "bfloat16 "))]
    assert answers == ["float32 1"], stated[-2000:]
    assert "kvpipe: name='shared' is used by a running engine whose" in stated
    assert "choose another name" in stated


def _same_layout_then_another(model: str, config: dict[str, Any]) -> None:
    """Start an engine with the layout of the running engine, and then an engine with another layout."""
    for dtype in ("float32", "bfloat16"):
        live = Engine(model, kvpipe=config, dtype=dtype)
        print(dtype, len(live.generate([[5] * 40], 2)), flush=True)
        live.close()
