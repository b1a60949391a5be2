"""The commands `kvpipe trace show|replay|timeline`."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from rich.console import Console

from kvpipe.cli.numbers import count
from kvpipe.errors import UsageError
from kvpipe.trace.log import printable
from kvpipe.trace.reader import Trace, files_of
from kvpipe.trace.replay import replay
from kvpipe.trace.show import SLOWEST, show_overview, show_request

PROBLEMS_SHOWN, PROBLEM_CHARS_MAX = 20, 400
PIPE_COLUMNS = 160


def add_parsers(trace: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe trace`. Each subcommand sets `run`."""
    sub = trace.add_subparsers(required=True, metavar="COMMAND")

    one = sub.add_parser("show", help="show slow requests, and misses with their reasons; or all events of one request")
    one.add_argument("file", type=Path, help="a trace_file")
    one.add_argument("--request", default="", help="a request id of vLLM or of the client")
    one.add_argument("--all", action="store_true", help="with a request: show every event, also events without effect")
    one.add_argument("--slowest", type=count, default=SLOWEST, help="the largest number of requests in the list")
    one.set_defaults(run=_show)

    one = sub.add_parser(
        "replay",
        help="replay a trace through the state machines, to check that every transition is legal and none is missing",
    )
    one.add_argument("file", type=Path, help="a trace_file")
    one.set_defaults(run=_replay)

    one = sub.add_parser("timeline", help="draw a trace: one page for a browser, or a file for Perfetto")
    one.add_argument("file", type=Path, help="a trace_file")
    one.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    one.add_argument("--perfetto", action="store_true", help="write Chrome trace JSON instead of a page")
    one.set_defaults(run=_timeline)


def _show(args: argparse.Namespace) -> int:
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    console = Console(width=width)
    if args.request:
        return show_request(args.file, args.request, console, every=args.all)
    return show_overview(args.file, console, args.slowest)


def _print_unread(traces: list[Trace]) -> None:
    for trace in traces:
        if sentence := trace.unread_summary():
            sys.stdout.write(f"{printable(str(trace.path))}: {sentence}\n")


def _replay(args: argparse.Namespace) -> int:
    traces = [Trace(part) for part in files_of(args.file)]
    done = replay(itertools.chain.from_iterable(traces))
    _print_unread(traces)
    for problem in done.problems[:PROBLEMS_SHOWN]:
        sys.stdout.write(f"PROBLEM {printable(problem[:PROBLEM_CHARS_MAX])}\n")
    more = len(done.problems) + done.more_problems - PROBLEMS_SHOWN
    if more > 0:
        sys.stdout.write(f"and {more} more\n")
    if done.dropped:
        sys.stdout.write(f"{done.dropped} events were dropped while tracing: cursors begin anew behind each gap\n")
    verdict = "every transition is legal, none is missing" if done.ok else "NOT a proof"
    sys.stdout.write(f"{done.transitions} transitions and {done.no_ops} no-ops of {done.cursors} cursors: {verdict}\n")
    return 0 if done.ok else 1


def _timeline(args: argparse.Namespace) -> int:
    from kvpipe.trace.perfetto import write_perfetto  # noqa: PLC0415  (seldom needed)
    from kvpipe.trace.timeline import EVENTS_MAX  # noqa: PLC0415
    from kvpipe.trace.timeline_html import write_html  # noqa: PLC0415

    parts = files_of(args.file)
    traces = [Trace(part) for part in parts]
    if any(args.out.exists() and args.out.samefile(part) for part in parts):
        raise UsageError(f"kvpipe: -o {args.out} is the trace itself; name another file")
    write = write_perfetto if args.perfetto else write_html
    try:
        timeline = write(itertools.chain.from_iterable(traces), args.out)
    except OSError as error:
        raise UsageError(f"kvpipe: -o {args.out} cannot be written ({error.strerror}); name another file") from None
    _print_unread(traces)
    if timeline.left_out:
        sys.stdout.write(
            f"{timeline.left_out} events are not drawn: a page has room for the first {EVENTS_MAX}; "
            "trace fewer requests (trace_sample), or for a shorter time\n"
        )
    sys.stdout.write(f"written: {printable(str(args.out))}\n")
    return 0
