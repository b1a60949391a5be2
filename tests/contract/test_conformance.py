"""Tests of the conformance kit with faulty connectors, with vLLM's own connectors, and with vLLM itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpipe.connectors.vllm.tiny.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.cli.main import main
from kvpipe.connectors.vllm.trial.children import KINDS, Case, CaseLimits, CaseOutcome, CaseRunner
from kvpipe.connectors.vllm.trial.conformance import OUTSIDE, read_finding
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES, Connector
from kvpipe.connectors.vllm.trial.trial import Move

DOCS = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
EXAMPLE = Connector("ExampleConnector", None, '{"shared_storage_path": "{tmp}"}')
SAVES_EACH_STEP = SHAPES["async-load"]._replace(save_steps=1)
RETRYING = Connector(
    "RetryingConnector", "kvpipe.connectors.vllm.trial.retrying", json.dumps(SAVES_EACH_STEP.kvpipe_extra())
)
FAULTY = """
import os, signal, time
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

class Base(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs): pass
    def wait_for_layer_load(self, layer_name): pass
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): pass
    def wait_for_save(self): pass
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, blocks, num_external_tokens): pass
    def build_connector_meta(self, scheduler_output): return KVConnectorMetadata()

class Hangs(Base):
    def wait_for_save(self):
        while True:
            time.sleep(0.01)

class Exits(Base):
    def wait_for_save(self): os._exit(3)

class Dies(Base):
    def wait_for_save(self): os.kill(os.getpid(), signal.SIGSEGV)

class Raises(Base):
    def request_finished(self, request, block_ids): raise KeyError(request.request_id)

class Holds(Base):
    def request_finished(self, request, block_ids): return True, None

class LoadsNothing(Base):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return max(0, (request.num_tokens - 1) // 32 * 32 - num_computed_tokens), False

class CannotStart(Base):
    def __init__(self, *args, **kwargs): raise ValueError("no storage_url given")
"""


@pytest.fixture(scope="module")
def bench() -> Iterator[CaseRunner]:
    """Yield a runner that reports a hang after a short wait."""
    with CaseRunner(CaseLimits(stuck_seconds=5)) as made:
        yield made


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a module of connectors with one fault each."""
    path = tmp_path_factory.mktemp("modules") / "kvpipe_test_faulty.py"
    path.write_text(FAULTY, encoding="utf-8")
    return path


def fuzz(out: Path, connector: str, module: Path | str, *more: str) -> int:
    """Run the command briefly, as an author of a connector does."""
    limits = ["--seeds", "1", "--shape", "sync", "--shrink-seconds", "8", "--stuck-seconds", "3"]
    return main(["fuzz", "--connector", connector, "--module", str(module), "--out", str(out), *limits, *more])


def only_finding(out: Path) -> dict[str, object]:
    """Return the one finding in `out`."""
    (path,) = out.iterdir()
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_nothing_is_found_in_kvpipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kit finds no fault in kvpipe."""
    shapes = ["--shape", "sync", "--shape", "async-scheduler-async-load", "--shape", "hybrid"]
    assert main(["fuzz", "--seeds", "2", *shapes, "--shrink-seconds", "3", "--out", str(tmp_path)]) == 0
    assert "6 trials" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_missing_module_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing module is a finding in one sentence, not a traceback."""
    assert fuzz(tmp_path, "Nobody", "kvpipe_no_such_module") == 1
    assert only_finding(tmp_path)["kind"] == "cannot_import"
    message = capsys.readouterr().out
    assert "Nobody cannot be imported from kvpipe_no_such_module: ModuleNotFoundError" in message


def test_a_connector_that_cannot_start_reports_why(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finding has the reason why the constructor refuses."""
    assert fuzz(tmp_path, "CannotStart", faulty) == 1
    assert "CannotStart cannot be constructed: ValueError: no storage_url given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("connector", "kind", "name"),
    [
        ("Hangs", "hung", ""),
        ("Exits", "died", "exited with code 3"),
        ("Dies", "died", "killed by SIGSEGV"),
        ("Raises", "raised", "KeyError in request_finished"),
        ("LoadsNothing", "broken", "every_read_is_right"),
        ("Holds", "broken", "no_hang"),
    ],
)
def test_each_kind_of_fault_is_found_and_shrunk(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], connector: str, kind: str, name: str
) -> None:
    """Hangs, deaths, exceptions and broken invariants are found and shrunk to a few moves."""
    assert fuzz(tmp_path, connector, faulty) == 1
    found = only_finding(tmp_path)
    assert (found["kind"], found["name"]) == (kind, name)
    moves = found["moves"]
    assert isinstance(moves, list)
    assert len(moves) <= 12  # the case had 200 moves; the result depends on the time for shrinking
    assert "kvpipe fuzz --replay" in capsys.readouterr().out
    if kind == "hung":
        assert any("in wait_for_save" in line for line in found["detail"])  # type: ignore[attr-defined]


def test_a_finding_replays_and_a_mended_connector_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding's file reproduces the fault until the fault is fixed."""
    module, out = tmp_path / "kvpipe_test_mended.py", tmp_path / "out"
    module.write_text(FAULTY, encoding="utf-8")
    assert fuzz(out, "LoadsNothing", module) == 1
    (path,) = out.iterdir()
    assert main(["fuzz", "--replay", str(path)]) == 1
    assert "FOUND broken every_read_is_right" in capsys.readouterr().out
    module.write_text(FAULTY.replace("max(0, (request", "0 * max(0, (request"), encoding="utf-8")
    assert main(["fuzz", "--replay", str(path)]) == 0
    assert "does not happen any more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--extra", "{"],
        ["--extra", "[]"],
        ["--module", "missing.py"],
        ["--shape", "round"],
        ["--set", "colour=1"],
        ["--set", "blocks=many"],
        ["--replay", "missing.json"],
        ["--out", "/dev/null/out"],
        ["--seconds", "0"],
        ["--stuck-seconds", "-1"],
        ["--steps-max", "0"],
    ],
)
def test_bad_input_is_status_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Options with meaningless values are refused."""
    assert main(["fuzz", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvpipe: ")


def test_a_file_that_is_no_finding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says that `kvpipe fuzz` did not write the file."""
    path = tmp_path / "other.json"
    kept = {
        "connector": KVPIPE._asdict(), "shape": "sync", "changes": {}, "seed": 0, "policy": "recompute",
        "careful": True, "kind": "broken", "name": "no_hang", "moves": [["drain"]],
    }  # fmt: skip
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert read_finding(path)[1] == ("broken", "no_hang")
    other: list[str] = []
    for wrong in (other, kept | {"moves": [["abort"]]}, kept | {"moves": [["fly", 1]]}, kept | {"shape": "round"}):
        path.write_text(json.dumps(wrong), encoding="utf-8")
        assert main(["fuzz", "--replay", str(path)]) == 2
        assert "is not a finding of kvpipe fuzz" in capsys.readouterr().err


# ---- vLLM's own connector, and vLLM itself: the sequences of docs/conformance.md -----------------------------------

FORGET: Move = ("reset", False, False)
DRAIN: Move = ("drain",)
TWO_CHUNKS: tuple[Move, ...] = (("add", 1, 130, 0, 0), DRAIN)
SALT: tuple[Move, ...] = (("add", 0, 65, 0, 0, 0, 0), ("drain",), ("add", 0, 65, 0, 0, 1, 0), ("drain",))
SAME: tuple[Move, ...] = (*SALT[:2], FORGET, *SALT[:2])
FAILED_SYNC: tuple[Move, ...] = (
    ("add", 0, 200, 0, 5), ("drain",), FORGET, ("fail", 0, True, 0), ("add", 0, 200, 0, 5), ("drain",),
)  # fmt: skip
RETRIED: tuple[Move, ...] = (
    ("add", 1, 143, 40, 40), ("step", 6), ("step", 4), ("step", 3), ("step", 4), ("add", 0, 68, 17, 48),
    ("add", 2, 61, 1, 61, 0, 1), ("step", 7), ("fail", 3, True, 0), ("step", 7), ("step", 4),
    ("follow", 1, 1, 37), ("drain",),
)  # fmt: skip
SESSIONS: tuple[Move, ...] = (
    ("session", 0, 75, 0), ("session", 1, 91, 0), ("more", 0, 40, 69), ("more", 1, 40, 69), ("more", 0, 40, 0),
    ("more", 1, 40, 0), ("drain",),
)  # fmt: skip
RESET: tuple[Move, ...] = (
    ("add", 0, 200, 0, 0), ("drain",), FORGET, ("add", 0, 200, 0, 0), ("step", 0), ("reset", False, True),
)  # fmt: skip


def test_the_example_connector_ignores_cache_salt(bench: CaseRunner) -> None:
    """The sequence that passes and the sequence that fails differ only in the salt."""
    assert bench.run(Case(EXAMPLE, "sync", 0, SAME)) == CaseOutcome(moves=SAME, steps=4)
    assert bench.run(Case(EXAMPLE, "sync", 0, SALT)).signature == ("broken", "every_read_is_right")


@pytest.mark.parametrize(
    ("shape", "moves", "signature"),
    [
        ("sync", (*SALT[:2], ("add", 0, 65, 0, 0, 0, 1), DRAIN), ("broken", "every_read_is_right")),
        ("two-ranks", SAME, ("broken", "every_read_is_right")),
        ("sync", (*TWO_CHUNKS, FORGET, *TWO_CHUNKS), ("raised", "RuntimeError in inject_kv_into_layer")),
        ("sync", (*SALT[:2], FORGET, ("add", 0, 96, 0, 0), DRAIN), ("raised", "FileNotFoundError in load_file")),
        (
            "sync",
            (("add", 0, 65, 0, 50), *[("step", 7)] * 5, ("reset", False, True), DRAIN),
            ("raised", "FileNotFoundError in load_file"),
        ),
    ],
    ids=["adapter", "ranks", "chunked", "rounding", "resumed"],
)
def test_other_findings_in_the_example_connector(
    bench: CaseRunner, shape: str, moves: tuple[Move, ...], signature: tuple[str, str]
) -> None:
    """The sequences on the page cause the findings that the page lists."""
    assert bench.run(Case(EXAMPLE, shape, 0, moves)).signature == signature


def test_vllm_answers_wrongly_after_a_failed_sync_load(bench: CaseRunner) -> None:
    """The page lists this as the first fault of vLLM's scheduler."""
    failing = '{"failing": true}'
    found = bench.run(Case(KVPIPE, "async-scheduler", 0, FAILED_SYNC, failing))
    assert found.signature in {("broken", "no_hang"), ("broken", "right_answers")}
    assert not bench.run(Case(KVPIPE, "async-scheduler", 0, FAILED_SYNC)).kind  # passes if loads do not fail
    assert not bench.run(Case(KVPIPE, "sync", 0, FAILED_SYNC)).kind  # vLLM's plain scheduler recovers


def test_vllm_never_ends_when_a_failed_async_load_is_tried_again(bench: CaseRunner) -> None:
    """The page lists this as the second fault of vLLM's scheduler."""
    assert bench.run(Case(RETRYING, "async-load", 3, RETRIED)).signature == ("broken", "no_hang")
    assert not bench.run(Case(KVPIPE, "async-load", 3, RETRIED)).kind  # kvpipe does not retry after the first failure


def test_vllm_raises_when_it_resets_while_a_load_is_in_flight(bench: CaseRunner) -> None:
    """The page lists this as the third fault of vLLM's scheduler."""
    found = bench.run(Case(KVPIPE, "async-load", 0, RESET, careful=False))
    assert found.signature == ("raised", "RuntimeError in reset_prefix_cache")
    assert not bench.run(Case(KVPIPE, "async-load", 0, RESET)).kind


def test_vllms_streaming_sessions_wait_for_each_others_blocks(faulty: Path, bench: CaseRunner) -> None:
    """The page lists this as the eighth fault of vLLM's scheduler. The connector of this test does nothing."""
    sys.path.insert(0, str(faulty.parent))
    try:
        case = Case(Connector("Base", faulty.stem), "sync", 0, SESSIONS, careful=False)
        assert bench.run(case).signature == ("broken", "no_hang")
        assert not bench.run(case._replace(connector=KVPIPE, careful=True)).kind
    finally:
        sys.path.remove(str(faulty.parent))


def test_the_page_lists_every_check_and_finding() -> None:
    """The page lists every check and every finding."""
    page = DOCS.read_text(encoding="utf-8")
    for name, sentence in OUTSIDE.items():
        assert f"| `{name}` | {sentence} |" in page
    for kind in KINDS:
        assert f"`{kind}`" in page
