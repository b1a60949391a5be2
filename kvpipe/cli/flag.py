"""`kvpipe flag`: print vLLM's `--kv-transfer-config` with a checked configuration."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from typing import Final

import yaml

from kvpipe.cli.doctor.engine import connector_part
from kvpipe.config.settings import load_settings, parse_extra

ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_FLAG: Final = "--kv-transfer-config"


def add_arguments(flag: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe flag`, and set `run`."""
    flag.add_argument("extra", nargs="?", default="{}", help="kv_connector_extra_config as JSON")
    flag.add_argument(
        "--role", choices=ROLES, default=ROLES[0], help="whether the engine saves and loads, or does only one of these"
    )
    flag.add_argument(
        "--as", dest="form", choices=["shell", "yaml", "json"], default="shell",
        help="shell: quoted (the default); yaml: two items for a container's `args` or Helm's values; json: the value "
        "without the flag, unquoted",
    )  # fmt: skip
    flag.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the flag. Returns the exit status 0. Raises ConfigError if the configuration is wrong."""
    extra = parse_extra(args.extra)
    load_settings(extra)
    value = {
        "kv_connector": connector_part("doctor_facts").NAME,
        "kv_role": args.role,
        "kv_load_failure_policy": "recompute",
    }
    text = json.dumps(value | ({"kv_connector_extra_config": extra} if extra else {}), separators=(",", ":"))
    if args.form == "shell":
        text = f"{_FLAG} {shlex.quote(text)}"
    elif args.form == "yaml":
        text = yaml.safe_dump([_FLAG, text], default_flow_style=False, width=math.inf).rstrip("\n")
    sys.stdout.write(text + "\n")
    return 0
