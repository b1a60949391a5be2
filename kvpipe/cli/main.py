"""The `kvpipe` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpipe import __version__
from kvpipe.cli import cache as tiers
from kvpipe.cli import check, flag, manage, new_tier, pool, top
from kvpipe.cli import trace as command
from kvpipe.cli.doctor.engine import connector_part
from kvpipe.cli.numbers import count_from_1
from kvpipe.config.control import write_freeze
from kvpipe.config.settings import markdown_table
from kvpipe.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, and return its exit status. A usage error prints one line to stderr and returns status 2."""
    parser = _parser()
    if why := manage.misplaced(sys.argv[1:] if argv is None else argv):
        parser.error(why)
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not _fuzz:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest, args.is_process = rest, argv is None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a printed path may contain bytes that are not valid text
    try:
        return int(args.run(args))
    except UsageError as e:
        print(e, file=sys.stderr)  # noqa: T201
        return 2
    except ModuleNotFoundError as e:
        if e.name not in {"torch", "vllm"}:
            raise
        print(f"kvpipe: this command needs {e.name}, as an engine does; run it in vLLM's environment", file=sys.stderr)  # noqa: T201
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpipe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"kvpipe {__version__}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = sub.add_parser("demo", help="run a real engine with and without kvpipe and compare")
    demo.add_argument("--json", type=Path, help="also write the rows to this file")
    demo.add_argument("--log", type=Path, default=Path(".cache/demo.log"), help="folder for the output of the engines")
    demo.set_defaults(run=_demo)

    check.add_arguments(sub.add_parser("check", help="check a configuration before an engine is started with it"))
    flag.add_arguments(sub.add_parser("flag", help="print vLLM's --kv-transfer-config with a checked configuration"))

    new_tier.add_arguments(sub.add_parser("new-tier", help="make a package with a tier of your own, and its tests"))

    freeze = sub.add_parser("freeze", help="let a running engine stop or resume saving; hits are still served")
    freeze.add_argument("state", choices=["on", "off"])
    freeze.add_argument("control_file", type=Path, help="the engine's control_file")
    freeze.set_defaults(run=_freeze)

    fuzz = sub.add_parser("fuzz", help="put any vLLM v1 connector on trial, or replay a finding", add_help=False)
    fuzz.set_defaults(run=_fuzz)

    trace = sub.add_parser("trace", help="read the trace of an engine with trace_file: show, replay, timeline")
    command.add_parsers(trace)

    cache = sub.add_parser(
        "cache", help="the KV that a running engine holds (lookup, warm, pin, evict) and what tiers hold (stats, purge)"
    )
    tiers.add_parsers(cache)

    engine = sub.add_parser("engine", help="show or switch a running engine with manage: state, counters, switch")
    manage.add_parsers(engine)

    pool.add_parsers(sub.add_parser("pool", help="the memory that engines of a node share: start, status"))

    top.add_arguments(sub.add_parser("top", help="show running engines with manage, updated every few seconds"))

    doctor = sub.add_parser("doctor", help="check this environment, and print the remedies of problems")
    doctor.add_argument(
        "extra", nargs="?", default="{}", help="kv_connector_extra_config or --kv-transfer-config, as JSON"
    )
    doctor.add_argument(
        "--ranks", type=count_from_1, default=1, help="number of ranks on this machine, each with its own pool"
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_doctor)

    diagrams = sub.add_parser("diagrams", help="write the state machines' pages")
    diagrams.add_argument("folder", type=Path, nargs="?", default=Path("docs/machines"))
    diagrams.set_defaults(run=_diagrams)

    table = sub.add_parser("config", help="print the configuration table")
    table.set_defaults(run=_config)
    return parser


def _demo(args: argparse.Namespace) -> int:
    return int(connector_part("tiny.demo").run_demo(args.log, args.json))


def _freeze(args: argparse.Namespace) -> int:
    write_freeze(args.control_file, on=args.state == "on")
    return 0


def _fuzz(args: argparse.Namespace) -> int:
    conformance = connector_part("trial.conformance")
    if args.is_process and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"  # the order of vLLM's sets must be the same in each replay
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  (this very command)
    return int(conformance.main(args.rest))


def _doctor(args: argparse.Namespace) -> int:
    from kvpipe.cli.doctor import print as doctor  # noqa: PLC0415  (imports torch)

    return doctor.main(args.extra, as_json=args.json, ranks=args.ranks)


def _diagrams(args: argparse.Namespace) -> int:
    from kvpipe.statemachine.diagram import MACHINES, to_markdown  # noqa: PLC0415

    args.folder.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        (args.folder / f"{machine.name}.md").write_text(to_markdown(machine), encoding="utf-8")
    return 0


def _config(_: argparse.Namespace) -> int:
    print(markdown_table(), end="")  # noqa: T201
    return 0
