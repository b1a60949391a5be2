"""`kvpipe check --model` makes vLLM's configuration without an engine, and refuses what vLLM or kvpipe would refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpipe.cli.main import main
from kvpipe.connectors.vllm.tiny.models import make_model


def _check(capsys: pytest.CaptureFixture[str], extra: Mapping[str, str | int], *command: str) -> tuple[int, str, str]:
    status = main(["check", json.dumps(extra), "--model", *command])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_check_shows_the_chunks_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The block size comes from vLLM's option. The output names options of vLLM's server as not checked."""
    model = str(make_model("llama"))
    status, printed, _ = _check(capsys, {"chunk_tokens": 100}, model, "--block_size=64", "--port", "8000")
    assert status == 0
    lines = printed.splitlines()
    assert lines[0] == f"model = {model} (LlamaForCausalLM, blocks of 64 tokens)"
    assert lines[1].endswith(": --port 8000")
    assert "chunk_tokens = 128 (100, rounded up to blocks of 64)" in lines


@pytest.mark.parametrize(
    ("extra", "options", "why"),
    [
        ({}, ["--seed", "abc"], "vLLM refuses an option: argument --seed: invalid int value: 'abc'"),
        ({}, ["--decode-context-parallel-size", "2"], "tp_size=1 must be divisible by dcp_size=2"),
        ({}, ["--distributed-executor-backend", "external_launcher", "-tp", "2"], "'external_launcher' with several"),
        ({"tiers": "{tmp}"}, ["--prefix-caching-hash-algo", "xxhash"], "or set the same PYTHONHASHSEED"),
        ({}, ["--max_model_len", "1000000"], "max_model_len"),
        ({}, ["--kv-transfer-config", "{}"], "--kv-transfer-config behind --model"),
        ({}, ["--kv-offloading-size", "-1"], "kv_offloading_size=-1.0 is not valid"),
    ],
    ids=str,
)
def test_check_refuses_an_engine_in_one_line(
    extra: dict[str, str],
    options: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason is the message, of vLLM or of kvpipe, with which the engine would stop."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tmp_path.chmod(0o700)
    there = {key: value.format(tmp=tmp_path) for key, value in extra.items()}
    status, printed, error = _check(capsys, there, str(make_model("llama")), *options)
    assert (status, printed, error.count("\n")) == (2, "", 1)
    assert why in error


@pytest.mark.parametrize(("command", "why"), [([], "--model has no model"), (["/nowhere"], "--model=/nowhere is no")])
def test_check_needs_a_model(command: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says that the model is missing, or that its folder does not exist."""
    status, _, error = _check(capsys, {}, *command)
    assert status == 2
    assert why in error
