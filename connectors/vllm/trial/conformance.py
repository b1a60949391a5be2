"""The conformance kit: `kvpipe fuzz` puts any vLLM v1 connector on trial and shrinks the failing sequences."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpipe.connectors.vllm.trial.children import KINDS, TMP, Case, CaseLimits, CaseOutcome, CaseRunner, error_line
from kvpipe.connectors.vllm.trial.invariants import INVARIANTS, SEEN_BY_TRIALS
from kvpipe.connectors.vllm.trial.moves import MOVES_PER_TRIAL, random_moves, show
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES, Connector, Shape
from kvpipe.connectors.vllm.trial.trial import MOVES, Trial
from kvpipe.errors import UsageError

FINDINGS_MAX, SHOWN_MAX = 8, 12

GRAMMAR = frozenset(
    {"add", "follow", "reuse", "schedule", "execute", "update", "step", "abort", "tick", "reset", "later", "drain",
     "probe", "shutdown"}
)  # fmt: skip
"""Moves that vLLM itself makes. The other moves are made only with `--unruly`."""

FOREIGN_SHAPES = (
    "sync", "two-ranks", "hybrid", "drafts", "async-scheduler", "async-scheduler-v2", "two-ranks-async-load",
    "async-scheduler-drafts", "async-scheduler-hybrid",
)  # fmt: skip
"""Shapes that differ for any connector. The other shapes differ only in kvpipe's configuration."""

OUTSIDE = {name: SEEN_BY_TRIALS[name][1] for name in ("right_answers", "no_hang")} | {
    one.name: one.sentence for one in INVARIANTS.values() if one.outside
}
"""The sentences of the checks that hold for any connector, by name."""


# ---- findings -----------------------------------------------------------------------------------------------------


def write_finding(path: Path, case: Case, found: CaseOutcome, moves_before: int) -> None:
    """Write everything that is needed to reproduce a finding into a file."""
    import vllm

    path.write_text(
        json.dumps(
            {
                "kvpipe_fuzz": 1, "vllm": vllm.__version__, "kind": found.kind, "name": found.name,
                "said": found.message, "connector": case.connector._asdict(),
                "shape": case.shape, "changes": json.loads(case.changes),
                "seed": case.seed, "policy": case.policy, "careful": case.careful,
                "moves": [list(move) for move in case.moves], "moves_before": moves_before,
                "detail": found.detail.splitlines(),
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )  # fmt: skip


def read_finding(path: Path) -> tuple[Case, tuple[str, str]]:
    """Return a finding's case and its signature.

    Raises:
        UsageError: the file was not written by `kvpipe fuzz`.

    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        moves = tuple(tuple(move) for move in kept["moves"])
        case = Case(
            Connector(**kept["connector"]), kept["shape"], kept["seed"], moves, json.dumps(kept["changes"]),
            kept["policy"], kept["careful"],
        )  # fmt: skip
        case.make_shape()
        for name, *values in moves:
            inspect.signature(getattr(Trial, f"_{name}") if name in MOVES else None).bind(None, *values)  # type: ignore[arg-type]
        signature = (str(kept["kind"]), str(kept["name"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise UsageError(f"kvpipe: {path} is not a finding of kvpipe fuzz: {error_line(e)}") from None
    return case, signature


def show_finding(case: Case, found: CaseOutcome, moves_before: int, path: Path | None) -> None:
    """Print a finding in a few lines."""
    law = OUTSIDE.get(found.name) or (INVARIANTS[found.name].sentence if found.name in INVARIANTS else "")
    lines = [f"FOUND {' '.join(part for part in found.signature if part)}: {law or KINDS[found.kind]}",
             f"  {found.message}"]  # fmt: skip
    if found.kind != "broken":
        detail = found.detail.splitlines()
        lines += [
            f"  | {line}" for line in (detail[:SHOWN_MAX] if found.kind in {"hung", "died"} else detail[-SHOWN_MAX:])
        ]
    if found.kind != "cannot_import":
        changes = "" if case.changes == "{}" else f" with {case.changes}"
        lines.append(
            f"  shape {case.shape}{changes}, seed {case.seed}, {len(case.moves)} moves, shrunk from {moves_before}:"
        )
        lines += [f"    {show(move)}" for move in case.moves[:30]]
    if path is not None:
        lines.append(f"  again: kvpipe fuzz --replay {shlex.quote(str(path))}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


# ---- the command --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run `kvpipe fuzz`. Return 1 if something was found, otherwise 0."""
    parser = argparse.ArgumentParser(prog="kvpipe fuzz", description="Put any vLLM v1 connector on trial.")
    parser.add_argument("--connector", default=KVPIPE.name, help="class name of the connector")
    parser.add_argument("--module", help="its module: dotted, or a .py file; by default vLLM's registry is asked")
    parser.add_argument("--extra", default="{}", help=f"its extra config as JSON; {TMP} is an empty folder per trial")
    parser.add_argument("--policy", choices=["recompute", "fail"], default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to look for findings")
    parser.add_argument("--seeds", type=int, default=1 << 60, help="stop after so many seeds")
    parser.add_argument("--shape", action="append", help=f"only this engine; may be repeated: {', '.join(SHAPES)}")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="change a field of the shape")
    parser.add_argument("--steps-max", type=int, default=1500, help="engine steps after which a trial is drained")
    parser.add_argument("--stuck-seconds", type=float, default=20.0, help="without progress for so long it hangs")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="how long to shrink each finding")
    parser.add_argument("--unruly", action="store_true", help="also make moves that vLLM never makes")
    parser.add_argument("--careless", action="store_true", help="also make moves at which vLLM itself is known to fail")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for what is found")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="make a finding happen again")
    args = parser.parse_args(arguments)
    for option in ("seconds", "seeds", "steps_max", "stuck_seconds"):
        if not getattr(args, option) > 0:
            name = "--" + option.replace("_", "-")
            raise UsageError(f"kvpipe: {name}={getattr(args, option):g} is not valid; give more than 0")
    limits = CaseLimits(args.stuck_seconds, args.steps_max)
    if args.replay is not None:
        return replay_finding(args.replay, limits)
    connector = _connector(args)
    default = SHAPES if connector.name == KVPIPE.name else FOREIGN_SHAPES
    shapes = args.shape or list(default)
    changes = _changes(args.set, shapes)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"kvpipe: --out {str(args.out)!r} cannot be written ({e}); name a folder") from None
    with CaseRunner(limits) as bench:
        return _Hunt(bench, connector, changes, args).go(shapes)


def replay_finding(path: Path, limits: CaseLimits) -> int:
    """Run the case of a finding again. Return 1 if this finding or another finding occurs, otherwise 0."""
    case, signature = read_finding(path)
    _make_importable(case.connector)
    with CaseRunner(limits) as bench:
        found = bench.run(case)
    if not found.kind or found.kind == "skipped":
        sys.stdout.write(f"kvpipe fuzz: {path.name} does not happen any more\n")
        return 0
    if found.signature != signature:
        sys.stdout.write(f"kvpipe fuzz: not {' '.join(signature)} any more, but this:\n")
    show_finding(case, found, len(case.moves), path)
    return 1


class _Hunt:
    """One run of the command."""

    def __init__(self, bench: CaseRunner, connector: Connector, changes: str, args: argparse.Namespace) -> None:
        self._bench, self._connector, self._changes, self._args = bench, connector, changes, args
        self._seen: Counter[tuple[str, str]] = Counter()
        self._skipped: dict[str, str] = {}
        self._trials = self._steps = 0

    def go(self, shapes: list[str]) -> int:
        """Run seeds on all `shapes` until a limit is reached. Return 1 if something was found, otherwise 0."""
        args, left = self._args, list(shapes)
        deadline = time.monotonic() + args.seconds
        seed = 0
        while left and seed < args.seeds and time.monotonic() < deadline and len(self._seen) < FINDINGS_MAX:
            for shape in tuple(left):
                began = time.monotonic()
                found = self._try(shape, seed)
                if found.kind == "skipped":
                    left.remove(shape)
                    self._skipped[shape] = found.message
                elif found.kind and self._seen[found.signature] == 1:
                    deadline += time.monotonic() - began  # shrinking has its own limit
                if found.kind == "cannot_import" or time.monotonic() > deadline:
                    break
            seed += 1
            if ("cannot_import", "") in self._seen:
                break
        return self._sum_up()

    def _try(self, shape: str, seed: int) -> CaseOutcome:
        args = self._args
        allowed = MOVES if args.unruly else GRAMMAR
        moves = tuple(move for move in random_moves(seed, MOVES_PER_TRIAL) if move[0] in allowed)
        case = Case(self._connector, shape, seed, moves, self._changes, args.policy, careful=not args.careless)
        found = self._bench.run(case)
        self._trials += 1
        self._steps += found.steps
        if found.kind not in KINDS:
            return found
        self._seen[found.signature] += 1
        if self._seen[found.signature] == 1:
            shrunk, again = case._replace(moves=found.moves), found
            if found.moves:
                shrunk, again = self._bench.shrink(case, found, args.shrink_seconds)
            path = args.out / f"kvpipe-fuzz-{len(self._seen)}.json"
            write_finding(path, shrunk, again, len(found.moves))
            show_finding(shrunk, again, len(found.moves), path)
        return found

    def _sum_up(self) -> int:
        import vllm

        lines = [f"no trial of shape {shape}: {why}" for shape, why in self._skipped.items()]
        lines += [f"{times} trials: {' '.join(part for part in one if part)}" for one, times in self._seen.items()]
        lines.append(
            f"kvpipe fuzz: {self._connector.name} on vLLM {vllm.__version__}: {self._trials} trials, "
            f"{self._steps} steps, {len(self._seen) or 'no'} finding{'s' if len(self._seen) != 1 else ''}"
        )
        sys.stdout.write("\n".join(lines) + "\n")
        return 1 if self._seen else 0


def _connector(args: argparse.Namespace) -> Connector:
    try:
        extra = json.loads(args.extra)
    except json.JSONDecodeError as e:
        raise UsageError(f"kvpipe: --extra {args.extra!r} is not JSON ({e}); write it as '{{\"key\": 1}}'") from None
    if not isinstance(extra, dict):
        raise UsageError(f"kvpipe: --extra {args.extra!r} is not a JSON object; write it as '{{\"key\": 1}}'")
    module = args.module
    if module is not None and module.endswith(".py"):
        if not Path(module).is_file():
            raise UsageError(f"kvpipe: --module {module!r} does not exist; name a module or a .py file")
        module = str(Path(module).resolve())
    if module is None and args.connector == KVPIPE.name:
        module = KVPIPE.module
    connector = Connector(args.connector, module, json.dumps(extra))
    return _make_importable(connector)


def _make_importable(connector: Connector) -> Connector:
    """Make the connector's module, and the modules of the working folder, importable by name in children."""
    folders = [str(Path.cwd())]
    if connector.module is not None and connector.module.endswith(".py"):
        folders.append(str(Path(connector.module).parent))
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()
    return connector


def _changes(given: list[str], shapes: list[str]) -> str:
    for name in shapes:
        if name not in SHAPES:
            raise UsageError(f"kvpipe: there is no shape {name!r}; choose from {', '.join(SHAPES)}")
    changes: dict[str, Any] = {}
    for one in given:
        field, _, value = one.partition("=")
        try:
            changes[field] = json.loads(value)
            made = Case(KVPIPE, "sync", 0, (), json.dumps(changes)).make_shape()
            if type(getattr(made, field)) is not type(getattr(Shape(), field)):
                raise ValueError(f"{changes[field]!r} is no value for {field}")  # noqa: TRY301
        except ValueError as e:
            raise UsageError(f"kvpipe: --set {one!r}: {e}; fields are {', '.join(Shape._fields)}") from None
    return json.dumps(changes)
