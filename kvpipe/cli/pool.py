"""`kvpipe pool start|status|moves` starts or shows the memory that all engines of a node share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from kvpipe.cli.node_view import lines
from kvpipe.errors import ConfigError
from kvpipe.inputs import plugins
from kvpipe.node.connect import ADOPT_S
from kvpipe.node.health import HolderHealth, health_of
from kvpipe.node.holder import Holder
from kvpipe.node.messages import MemoryStatus
from kvpipe.node.processes import checked_folder, folder_of_user, holder_of
from kvpipe.node.slot_moves import moves_of

FOREVER_S: Final = 1e12
FOLLOW_S: Final = 0.2


def add_parsers(pool: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe pool`. Each subcommand sets `run`."""
    sub = pool.add_subparsers(required=True, metavar="COMMAND")
    start = sub.add_parser("start", help="hold the memory until this process is stopped, for a service manager")
    known = plugins.names(plugins.POLICIES)
    start.add_argument("--policy", choices=known, default="", help="eviction policy (default: the first engine's)")
    start.set_defaults(run=_start)
    status = sub.add_parser("status", help="show the holder, the slots and the engines")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)
    moves = sub.add_parser("moves", help="print the latest moves of slots, one JSON object per line, the oldest first")
    moves.add_argument("--slot", type=int, default=None, help="only moves of this slot")
    moves.add_argument("--follow", action="store_true", help="print later moves, too, until the holder ends")
    moves.set_defaults(run=_moves)
    for one in (start, status, moves):
        one.add_argument("--dir", type=Path, default=None, help="the engines' pool_dir (default: as theirs)")


def _start(args: argparse.Namespace) -> int:
    folder = checked_folder(args.dir or folder_of_user())
    try:
        holder = Holder(folder, adopt_s=ADOPT_S, keep_s=FOREVER_S, policy=args.policy)
    except BlockingIOError:
        raise ConfigError(
            f"kvpipe: {folder} has a holder already (process {holder_of(folder)}); let it end, or give another --dir"
        ) from None
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: holder.end())
    sys.stdout.write(f"holding {folder}; the first engine makes the memory\n")
    sys.stdout.flush()
    holder.run()
    return 0


def _status(args: argparse.Namespace) -> int:
    folder = args.dir or folder_of_user()
    health = health_of(folder)
    if args.json:
        sys.stdout.write(json.dumps(as_dict(health)) + "\n")
    else:
        sys.stdout.write("\n".join(lines(folder, health)) + "\n")
    return int(health.status is None)


def _moves(args: argparse.Namespace) -> int:
    folder = args.dir or folder_of_user()
    with moves_of(folder) as moves:
        try:
            while True:
                runs = bool(holder_of(folder))
                for move in moves.read():
                    if args.slot in {None, move.slot}:
                        sys.stdout.write(msgspec.json.encode(move).decode() + "\n")
                sys.stdout.flush()
                if not (args.follow and runs):
                    return 0
                time.sleep(FOLLOW_S)
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:  # for example, `| head` has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes this stream at its end
            return 0


def as_dict(health: HolderHealth) -> dict[str, object]:
    """Return the status as plain data."""
    status = health.status
    memories = [] if status is None else msgspec.to_builtins([_as_dict(one) for one in status.memories])
    return {"holder": health.pid, "answers": status is not None, "why": health.why, "memories": memories}


def _as_dict(memory: MemoryStatus) -> dict[str, object]:
    return msgspec.structs.asdict(memory) | {"clients": [msgspec.structs.asdict(one) for one in memory.clients]}
