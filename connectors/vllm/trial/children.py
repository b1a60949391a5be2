"""Runs trials in forked children, because a connector may kill its process or hang, and shrinks failing sequences.

The child reports each move and each step before the move or step begins. So the parent knows the begun moves even if
the child dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvpipe.connectors.vllm.trial import trial as trials
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.moves import show
from kvpipe.connectors.vllm.trial.shapes import SHAPES, Connector, Shape, make_configs
from kvpipe.connectors.vllm.trial.trial import Move, Trial
from kvpipe.connectors.vllm.trial.worlds import shape_named

SHRINK_STUCK_SECONDS = 2.0
SHRINK_DRAIN_STEPS = 600
DUMP_SECONDS = 2.0
TEXT_MAX, LOG_MAX = 600, 4000
FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
TMP = "{tmp}"

KINDS = {
    "cannot_import": "the connector cannot be imported or constructed",
    "raised": "an exception came out of the connector, or out of vLLM because of it",
    "hung": "a trial made no progress",
    "died": "the process ended",
    "broken": "an invariant was broken",
}
"""The kinds of findings, each with a description."""


class Case(NamedTuple):
    """Everything on which a trial's result depends.

    `changes` is JSON text with the fields of the shape that are replaced. `invariant` names the only invariant that is
    checked. If `invariant` is empty, all invariants are checked.
    """

    connector: Connector
    shape: str
    seed: int
    moves: tuple[Move, ...]
    changes: str = "{}"
    policy: str = "recompute"
    careful: bool = True
    invariant: str = ""

    def make_shape(self) -> Shape:
        """Return the shape with its changes."""
        given: dict[str, Any] = json.loads(self.changes)
        changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        shape = shape_named(self.shape)._replace(**changes)
        return shape._replace(fails=True) if self.policy == "fail" else shape


class CaseOutcome(NamedTuple):
    """The result of a trial. `kind` is empty, "skipped" or one of `KINDS`; `moves` are the moves that were made."""

    kind: str = ""
    name: str = ""
    message: str = ""
    detail: str = ""
    moves: tuple[Move, ...] = ()
    steps: int = 0

    @property
    def signature(self) -> tuple[str, str]:
        """The part of an outcome that must stay the same while a sequence is shrunk."""
        return self.kind, self.name


class CaseLimits(NamedTuple):
    """Limits on the time and the size of a case."""

    stuck_seconds: float = 20.0
    steps_max: int = 1500
    drain_steps: int = trials.DRAIN_STEPS_MAX


class CaseRunner:
    """Runs cases in children of this process, one at a time."""

    def __init__(self, limits: CaseLimits | None = None) -> None:
        """Create a temporary folder. `limits` apply to every case that is run without other limits."""
        self.limits = limits or CaseLimits()
        self._root = Path(tempfile.mkdtemp(prefix="kvpipe-fuzz-"))
        self._store, self._log = self._root / "store", self._root / "log"

    def __enter__(self) -> Self:
        """Import the modules that every trial needs, and exclude them from the children's garbage collections."""
        warm_up()
        gc.collect()
        gc.freeze()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        """Remove the temporary folder."""
        gc.unfreeze()
        shutil.rmtree(self._root, ignore_errors=True)

    def run(self, case: Case, limits: CaseLimits | None = None) -> CaseOutcome:
        """Run `case` in a child and return its outcome."""
        limits = limits or self.limits
        shutil.rmtree(self._store, ignore_errors=True)
        self._store.mkdir()
        self._log.write_bytes(b"")
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.close(reader)
            _child(case._replace(connector=self._resolve(case.connector)), limits, writer, self._log)
        os.close(writer)
        try:
            message, status = self._watch(pid, reader, limits.stuck_seconds)
        finally:
            os.close(reader)
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        return self._judge(case, message, status, limits)

    def _resolve(self, connector: Connector) -> Connector:
        """Replace the placeholder in the configuration by this trial's folder, and a file's path by a module name."""
        module = connector.module
        if module is not None and module.endswith(".py"):
            module = Path(module).stem
        return connector._replace(module=module, extra=connector.extra.replace(TMP, str(self._store)))

    def _watch(self, pid: int, reader: int, stuck_seconds: float) -> tuple[bytes, int | None]:
        """Return (output of the child, exit status of the child).

        A child that is stuck is killed, and the status is None.
        """
        message, last, open_ = bytearray(), time.monotonic(), True
        while True:
            ready = select.select([reader], [], [], 0.05)[0] if open_ else []
            if ready:
                more = os.read(reader, 1 << 16)
                open_ = bool(more)
                message += more
                last = time.monotonic()
                continue
            # a child can have ended although its own children still hold the pipe open
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return bytes(message), status
            if time.monotonic() - last > stuck_seconds:
                self._dump_and_kill(pid)
                return bytes(message), None
            if not open_:
                time.sleep(0.002)

    def _dump_and_kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGUSR1)  # faulthandler then writes all stacks to the log
        deadline = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < deadline and b"Current thread" not in self._log.read_bytes():
            time.sleep(0.05)
        time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _judge(self, case: Case, output: bytes, status: int | None, limits: CaseLimits) -> CaseOutcome:
        beats, _, last = output.partition(b"\n")
        moves = case.moves[: beats.count(b"m")] + (("drain",),) * beats.count(b"D")
        steps = beats.count(b"s")
        if last:
            return CaseOutcome(**json.loads(last), moves=moves, steps=steps)
        log = self._log.read_text(encoding="utf-8", errors="replace")
        doing = f"in move {len(moves)}, {show(moves[-1])}" if moves else "before the first move"
        if status is None:
            stack = log[log.find("Current thread") :] if "Current thread" in log else log[-LOG_MAX:]
            return CaseOutcome(
                "hung",
                message=f"no progress for {limits.stuck_seconds:g} s {doing}",
                detail=stack,
                moves=moves,
                steps=steps,
            )
        start = log.find("Fatal Python error")
        tail = log[start : start + LOG_MAX] if start >= 0 else log[-LOG_MAX:]
        if os.WIFSIGNALED(status):
            how = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            how = f"exited with code {os.WEXITSTATUS(status)}"
        return CaseOutcome("died", how, f"the process was {how} {doing}", tail, moves, steps)

    # ---- shrinking ------------------------------------------------------------------------------------------------

    def shrink(self, case: Case, found: CaseOutcome, seconds: float) -> tuple[Case, CaseOutcome]:
        """Return the shortest and simplest case that still gives the same outcome.

        The search takes up to `seconds` seconds.
        """
        deadline = time.monotonic() + seconds
        stuck = min(self.limits.stuck_seconds, SHRINK_STUCK_SECONDS)
        quick = CaseLimits(stuck, self.limits.steps_max, min(self.limits.drain_steps, SHRINK_DRAIN_STEPS))

        def same(moves: tuple[Move, ...]) -> bool:
            return self.run(case._replace(moves=moves), quick).signature == found.signature

        moves = found.moves
        if same(moves):  # the outcome must be the same under the shorter limits
            before: tuple[Move, ...] = ()
            while moves != before and time.monotonic() < deadline:
                before = moves
                moves = _simplify(_fewer(moves, same, deadline), same, deadline)
        shorter = case._replace(moves=moves)
        again = self.run(shorter)
        if again.signature == found.signature:
            return shorter._replace(moves=again.moves), again
        return case._replace(moves=found.moves), found


def _fewer(moves: tuple[Move, ...], same: Callable[[tuple[Move, ...]], bool], deadline: float) -> tuple[Move, ...]:
    """Drop moves as long as `same` holds without them: at first many moves at once, at last one by one."""
    size = max(1, len(moves) // 2)
    while time.monotonic() < deadline:
        start, dropped = 0, False
        while start < len(moves) and time.monotonic() < deadline:
            shorter = moves[:start] + moves[start + size :]
            if same(shorter):
                moves, dropped = shorter, True
            else:
                start += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    return moves


def _simplify(moves: tuple[Move, ...], same: Callable[[tuple[Move, ...]], bool], deadline: float) -> tuple[Move, ...]:
    """Make the moves' arguments smaller, one argument at a time, as long as `same` holds."""
    for i in range(len(moves)):
        for j in range(1, len(moves[i])):
            while moves[i][j] and time.monotonic() < deadline:
                value = moves[i][j]
                smaller = [False] if value is True else sorted({0, value // 2, value - 1})
                for one in smaller:
                    changed = (*moves[:i], (*moves[i][:j], one, *moves[i][j + 1 :]), *moves[i + 1 :])
                    if same(changed):
                        moves = changed
                        break
                else:
                    break
    return moves


# ---- the child ----------------------------------------------------------------------------------------------------


@functools.cache
def warm_up() -> None:
    """Import the modules that every trial needs, once, before the forks."""
    import logging

    import torch

    logging.disable(logging.ERROR)
    # ranks compute when they start, and a forked child would wait for ever for OpenMP's other threads
    torch.set_num_threads(1)
    trial = Trial(SHAPES["sync"])
    trial.do(("add", 0, 0, 0, 0))
    trial.do(("drain",))
    trial.close()


def _child(case: Case, limits: CaseLimits, pipe: int, log: Path) -> None:
    """Run `case` in this process, and end the process."""
    try:
        with contextlib.suppress(OSError):
            os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing a core file takes longer than a trial
        file = log.open("ab", buffering=0)
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
        faulthandler.disable()
        for fatal in FATAL:  # libraries install slow handlers for these signals
            signal.signal(fatal, signal.SIG_DFL)
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        os.chdir(log.parent)
        outcome = _conduct(case, limits, lambda beat: os.write(pipe, beat))
        text = json.dumps(dict(zip(("kind", "name", "message", "detail"), outcome[:4], strict=True)))
        os.write(pipe, b"\n" + text.encode())
        os._exit(0)
    finally:
        os._exit(70)


def _conduct(case: Case, limits: CaseLimits, beat: Callable[[bytes], object]) -> CaseOutcome:
    connector, shape = case.connector, case.make_shape()
    try:
        if (unfit := _import(connector, shape)) is not None:
            return CaseOutcome("skipped", message=unfit)
    except BaseException as e:  # noqa: BLE001  (whatever a foreign module raises)
        where = connector.module or "vLLM's registry"
        return CaseOutcome("cannot_import",
                       message=f"{connector.name} cannot be imported from {where}: {error_line(e)}",
                       detail=traceback.format_exc(limit=-8))  # fmt: skip
    beat(b".")
    trials.DRAIN_STEPS_MAX = limits.drain_steps
    try:
        trial = Trial(shape, case.seed, connector=connector)
    except BaseException as e:  # noqa: BLE001
        return CaseOutcome("cannot_import", message=f"{connector.name} cannot be constructed: {error_line(e)}",
                       detail=traceback.format_exc(limit=-8))  # fmt: skip
    trial.careful = case.careful
    watched = Watched(trial, case.invariant)
    raised = _make_moves(case, trial, watched, limits, beat)
    if raised is not None:
        with contextlib.suppress(Exception):
            watched.after_update()
    if watched.broken:  # the exception is a consequence of the broken invariant
        name, _, what = watched.broken[0].partition(": ")
        return CaseOutcome("broken", name, what[:TEXT_MAX], "\n".join(one[:TEXT_MAX] for one in watched.broken[1:6]))
    return raised or CaseOutcome()


def _make_moves(
    case: Case, trial: Trial, watched: Watched, limits: CaseLimits, beat: Callable[[bytes], object]
) -> CaseOutcome | None:
    """Make the moves until an invariant is broken. Return the outcome if a move raised an exception."""

    def after_update() -> None:
        beat(b"s")
        watched.after_update()

    trial.on_update = after_update
    try:
        for move in _until(case.moves, trial, limits.steps_max, beat):
            trial.do(move)
            if watched.broken:
                return None
        trial.close()
    except BaseException as e:  # noqa: BLE001  (the finding)
        frame = traceback.extract_tb(e.__traceback__)[-1]
        name = f"{type(e).__name__} in {frame.name}"
        return CaseOutcome("raised", name, error_line(e), traceback.format_exc(limit=-10))
    return None


def _until(moves: tuple[Move, ...], trial: Trial, steps_max: int, beat: Callable[[bytes], object]) -> Iterator[Move]:
    for move in moves:
        if trial.steps >= steps_max:
            beat(b"D")
            yield ("drain",)
            return
        beat(b"m")
        yield move


def _import(connector: Connector, shape: Shape) -> str | None:
    """Import the connector. Return the reason if the connector cannot run with this shape, otherwise None."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config, _ = make_configs(shape, connector)
    KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    if len(shape.windows) > 1 and not KVConnectorFactory.supports_hma_config(config.kv_transfer_config):
        return "it does not support several cache groups (SupportsHMA)"
    return None


def error_line(error: BaseException) -> str:
    """Return an error without its line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:TEXT_MAX]
