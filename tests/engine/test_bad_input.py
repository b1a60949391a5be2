"""Bad input is refused before the engine serves, in one sentence that names key, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.models import make_model
from tests.engine.common import BLOCK, engine, prompt

pytestmark = pytest.mark.engine


def _refusal(config: dict[str, Any], **options: Any) -> str:
    """The message of the error that starting the engine raises, whichever error wraps it."""
    with pytest.raises(Exception, match=r"kvpipe|kv_role") as caught, engine(kvpipe=config, **options):
        pass
    error: BaseException | None = caught.value
    while error is not None and "kvpipe" not in str(error):
        error = error.__cause__ or error.__context__
    return str(error or caught.value)


@pytest.fixture(autouse=True)
def _forget_the_half_started_engine() -> Any:
    """An engine that was refused leaves vLLM's process-wide state behind."""
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
        ({"chunk_tokens": 250}, {}, ["chunk_tokens=250", f"block size {BLOCK}", "set chunk_tokens=256"]),
        ({"pool_bytes_max": "1MiB"}, {}, ["pool_bytes_max=1048576", "not even one chunk", "at least"]),
        ({"chunk_tokens": "many"}, {}, ["chunk_tokens='many'", "Default: 256"]),
        ({"bypass": True, "freeze": True}, {}, ["bypass=true contradicts freeze=true", "set only one"]),
        ({}, {"role": "kv_boss"}, ["kv_boss", "kv_both"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(config: dict[str, Any], options: dict[str, Any], expected: list[str]) -> None:
    """Each is refused, and the sentence names what to change."""
    message = _refusal(config, **options)
    for words in expected:
        assert words in message, message


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"async_scheduling": True}], ids=str)
def test_an_engine_that_cannot_be_served_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """No process is started for an engine whose settings are refused, in one sentence."""

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
    """It takes no report of several groups' blocks, and reads what lies before a failed block of a window as it is."""
    with pytest.raises(Exception, match=f"load='sync' for a model with {what} is not supported"):  # noqa: SIM117
        with engine(model, {"load": "sync"}):
            pass


def test_two_layouts_under_one_name(tmp_path: Path) -> None:
    """A second engine of another layout cannot use a running engine's name; one of the same layout can."""
    import subprocess
    import sys

    config = {"name": "shared", "state_dir": str(tmp_path)}
    code = (
        "from kvpipe.connectors.vllm.trial.engine import Engine\n"
        "for dtype in ('float32', 'bfloat16'):\n"
        f"    e = Engine({str(make_model('llama'))!r}, kvpipe={config!r}, dtype=dtype)\n"
        "    print(dtype, len(e.generate([[5] * 40], 2)), flush=True)\n"
        "    e.close()\n"
    )
    with engine(kvpipe=config) as live:
        live.generate([prompt(40, 1)], 2)
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert [line for line in other.stdout.splitlines() if "float" in line] == ["float32 1"], other.stderr[-2000:]
    assert "kvpipe: name='shared' is used by a running engine whose" in other.stderr
    assert "choose another name" in other.stderr
