"""Tests the checks of a GPU, and the later runs, on fake machines. So errors are found before a run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.gpu import probe, runs
from kvpipe.errors import TransferError
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.movers import Mover

ROOT = Path(__file__).parents[2]
BATCHES = len(probe.COPY_BYTES) * 2 * len(probe.HOWS)
ANSWERS = 2 + 2 + BATCHES + 1 + 3 + 2


class Unpinned(probe.Simulated):
    """A machine that pins only twice, as with a small limit on locked memory."""

    pieces = 0

    def pin(self) -> float:
        """See `Machine.pin`."""
        self.pieces += 1
        if self.pieces > 2:
            raise TransferError("CUDA error 2")
        return super().pin()


class OneByOne(probe.Simulated):
    """A machine whose driver refuses all batches, or batches with certain orders and flags."""

    def __init__(self, refused: set[tuple[int, int]]) -> None:
        """`refused` has the orders and flags of refused batches."""
        self._refused = refused

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> probe.Batch:
        """See `Machine.batch`."""
        got = super().batch(copy_bytes, how, loading=loading)
        return got._replace(how="one by one: CUDA error 801") if how in self._refused else got


class Failing(probe.Simulated):
    """A machine whose batches of loads fail, as after the loss of the context."""

    def __init__(self, error: Exception) -> None:
        """`error` is the exception that is raised."""
        self._error = error

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> probe.Batch:
        """See `Machine.batch`."""
        if loading:
            raise self._error
        return super().batch(copy_bytes, how, loading=loading)


class Strange(probe.Simulated):
    """A machine on which one check raises an unexpected error."""

    def held_up(self, priority: int) -> int:
        """See `Machine.held_up`."""
        if priority:
            raise KeyError(priority)
        return super().held_up(priority)


class Watched(probe.Simulated):
    """A machine that reads the file of answers when the last check, which may end the process, begins."""

    def __init__(self, path: Path) -> None:
        """`path` is the file of the answers."""
        self._path, self.seen = path, -1

    def during_capture(self, *, enters: bool) -> list[str]:
        """See `Machine.during_capture`."""
        if not enters:
            self.seen = len(json.loads(self._path.read_text())["figures"])
        return super().during_capture(enters=enters)


class Deaf(probe.Simulated):
    """A machine whose helper threads fail during captures, even after `enter_thread`."""

    def during_capture(self, *, enters: bool) -> list[str]:  # noqa: ARG002
        """See `Machine.during_capture`."""
        return super().during_capture(enters=False)


def asked(machine: probe.Machine, path: Path) -> tuple[int, dict[str, object]]:
    """Return the exit status and the written answers."""
    return probe.ask(machine, path), json.loads(path.read_text())


def test_every_check_has_an_answer_on_a_good_gpu(tmp_path: Path) -> None:
    """On a good GPU every check has an answer."""
    status, message = asked(probe.Simulated(), tmp_path / "probe.json")
    assert status == 0
    assert message["refused"] == ""
    assert message["troubles"] == []
    assert message["facts"] == {"gpu": "none: simulated", "batches": "taken", "completions": "block"}
    assert len(message["figures"]) == ANSWERS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        (Unpinned(), "kvpipe: host memory cannot be pinned (CUDA error 2); every later figure would be of a fallback"),
        (
            OneByOne({*probe.OURS.values()}),
            "kvpipe: batches of copies are queued one by one: CUDA error 801; every later figure",
        ),
        (Failing(TransferError("CUDA error 700")), "kvpipe: a batch of copies fails (load by 8 KiB, stream order, ov"),
        (Failing(RuntimeError("CUDA error: lost\nadvice")), "kvpipe: a batch of copies fails (load by 8 KiB, stream "),
    ],
)
def test_refusal_ends_the_checks_with_one_sentence(
    machine: probe.Machine, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal ends the checks with one sentence and a status for refusals. Earlier answers are kept."""
    status, message = asked(machine, tmp_path / "probe.json")
    assert status == probe.REFUSED
    assert message["refused"]
    assert message["figures"] or isinstance(machine, Unpinned)
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(sentence)


def test_the_longest_launch_during_a_pin_is_reported(tmp_path: Path) -> None:
    """A machine fails the check if a launch during a pin takes longer than a few decode steps."""

    class Stalled(probe.Simulated):
        def launches(self, *, pinning: bool) -> float:
            return 27.0 if pinning else 0.1

    status, message = asked(Stalled(), tmp_path / "probe.json")
    assert status == 1
    (figure,) = [one for one in message["figures"] if one["name"] == "longest launch while memory is pinned"]  # type: ignore[attr-defined]
    assert figure["value"] == 27.0


def test_refusal_of_an_unused_order_does_not_end_the_checks(tmp_path: Path) -> None:
    """If the driver refuses an order of copies that kvpipe does not use, the checks continue."""
    others = set(probe.HOWS.values()) - {*probe.OURS.values()}
    assert asked(OneByOne(others), tmp_path / "probe.json")[0] == 0


def test_check_reports_the_batches_that_kvpipe_uses(tmp_path: Path) -> None:
    """The check reports whether the driver accepts batches with the order and the flags that kvpipe uses."""
    message = asked(OneByOne({*probe.OURS.values()}), tmp_path / "ours.json")[1]
    assert message["facts"]["batches"] == "one by one: CUDA error 801"  # type: ignore[index]
    others = set(probe.HOWS.values()) - {*probe.OURS.values()}
    assert asked(OneByOne(others), tmp_path / "others.json")[1]["facts"]["batches"] == "taken"  # type: ignore[index]


def test_unexpected_error_costs_one_answer(tmp_path: Path) -> None:
    """An unexpected error loses only its own answer. The exit status is that of a failure."""
    status, message = asked(Strange(), tmp_path / "probe.json")
    assert status == 1
    assert message["troubles"] == ["streams: -1"]
    assert len(message["figures"]) == ANSWERS - 1  # type: ignore[arg-type]


def test_answers_are_written_before_the_last_check(tmp_path: Path) -> None:
    """All answers are written before the last check, because that check may end the process."""
    machine = Watched(tmp_path / "probe.json")
    assert asked(machine, tmp_path / "probe.json")[0] == 0
    assert machine.seen == ANSWERS - 1


def test_a_spoilt_capture_is_a_failure(tmp_path: Path) -> None:
    """The checks fail if a helper thread like kvpipe's cannot work during a capture."""
    assert asked(Deaf(), tmp_path / "probe.json")[0] == 1


def test_parts_fit_into_calls_of_ten_minutes() -> None:
    """Each part takes at most 10 minutes. The default parts together take at most 25 minutes.

    No two runs have one name.
    """
    spent = [sum(one.seconds_max for one in part) for part in runs.PARTS]
    assert max(spent) <= runs.PART_S_MAX
    assert sum(spent[: runs.PARTS_MAIN]) <= runs.TOTAL_S_MAX == 1500
    names = [one.name for part in runs.PARTS for one in part]
    assert len(set(names)) == len(names)
    assert names[:2] == ["probe", "fa3-movers"], "an illegal access beside FlashAttention 3 would end engines"


def test_optional_parts_are_run_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional parts are selected by number, and single runs by name."""
    ran: list[str] = []

    def note(one: runs.Run, *_: object, **__: object) -> int:
        ran.append(one.name)
        return 0

    monkeypatch.setattr(runs, "run", note)
    main = ["--simulated", "--out", str(tmp_path)]
    assert runs.main(main) == 0
    assert ran == [one.name for part in runs.PARTS[:3] for one in part]
    ran.clear()
    assert runs.main([*main, "--part", "5"]) == runs.main([*main, "--only", "speed-8b"]) == 0
    assert ran == ["engine-full", "engine-v1", "engine-eager", "hiding-32-queues", "speed-8b"]


@pytest.mark.parametrize("one", [one for part in runs.PARTS for one in part], ids=lambda one: one.name)
def test_every_run_is_understood(one: runs.Run, tmp_path: Path) -> None:
    """Each run's module accepts the run's arguments."""
    if one.module == runs.ENGINE:
        from benchmarks.gpu.engine import arguments
        from benchmarks.gpu.engine_correctness import CASES

        assert set(arguments(one.command(tmp_path, simulated=False)[3:]).cases) <= {case.name for case in CASES}
    elif one.module == runs.PLANE:
        from benchmarks.gpu.__main__ import parts
        from benchmarks.gpu.rig import Gpu

        known = {name for name, _ in parts(Gpu(simulated=True))}
        assert set(one.arguments[1::2]) <= known


def test_runs_work_in_their_own_processes(tmp_path: Path) -> None:
    """Runs work in processes of their own: checks, and measurements."""
    command = [sys.executable, "-m", "benchmarks.gpu.runs", "--simulated", "--only", "probe", "--only", "races"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=5 * WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == ["probe: good", "races: good"]
    assert {path.name for path in tmp_path.iterdir()} == {"probe.json", "probe.txt", "races.json", "races.txt"}


def test_nothing_follows_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a refusal no run starts, because a run's figures would be those of a fallback."""

    def refused(one: runs.Run, folder: Path, *, simulated: bool, more: tuple[str, ...]) -> int:  # noqa: ARG001
        (folder / f"{one.name}.txt").write_text("a table\nkvpipe: host memory cannot be pinned\n")
        return probe.REFUSED

    monkeypatch.setattr(runs, "run", refused)
    assert runs.main(["--simulated", "--out", str(tmp_path)]) == probe.REFUSED
    assert capsys.readouterr().out.splitlines()[-1] == "kvpipe: host memory cannot be pinned"
    assert [path.name for path in tmp_path.iterdir()] == ["probe.txt"]


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A run that takes too long is ended, and has a status for this case."""
    script = tmp_path / "test_endless.py"
    script.write_text("import time\n\ndef test_endless():\n    time.sleep(60)\n")
    slow = runs.Run("endless", 3, "pytest", ("-q", str(script), "-p", "no:cacheprovider"))
    assert runs.run(slow, tmp_path, simulated=False) == 124


def test_make_needs_no_setup_where_torch_has_a_gpu(tmp_path: Path) -> None:
    """If the machine's torch has a GPU, `make` uses the machine's Python without a setup.

    In this test that Python is a fake.
    """
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase $1 in -m) echo "$@";; esac\n')
    python.chmod(0o755)
    line = ["make", "--no-print-directory", "bench-gpu", "PART=1 2", "ARGS=--breakable"]
    paths = {"PATH": os.pathsep.join((str(tmp_path), os.environ["PATH"]))}
    done = subprocess.run(line, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["-m benchmarks.gpu.runs --part 1 --part 2 --breakable"], done.stderr


@pytest.mark.parametrize(("name", "stated"), [("probe", "nothing to run"), ("movers", "failed (2)")])
def test_status_2_of_pytest_is_no_refusal(
    name: str, stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pytest's status 2 means that tests could not be read.

    The runs must not treat it like the status 2 of kvpipe's checks.
    """
    monkeypatch.setattr(runs, "run", lambda *_, **__: 2)
    assert runs.main(["--simulated", "--only", name, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{name}: {stated}, ")


def test_the_movers_tested_are_the_devices() -> None:
    """The runs of tests select only tests of real devices, by their ids.

    Without a device all of these tests are skipped.
    """
    movers = next(one for one in runs.PARTS[0] if one.name == "movers")
    line = [sys.executable, "-m", "pytest", *movers.arguments, "--collect-only"]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=WAIT_S)
    tests = [message for message in done.stdout.splitlines() if "::" in message]
    assert {mover.value for mover in Mover} == {test.rpartition("cuda_")[2].rstrip("]") for test in tests}


@pytest.mark.parametrize("program", [runs, probe])
def test_without_a_gpu_both_report_that(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, the checks and the runs print one sentence and end with a status for this case."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 2
    assert "no GPU is here" in capsys.readouterr().err
