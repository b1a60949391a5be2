"""`kvpipe check`: check and print a configuration. With `--model`, also check the engine that vLLM would start."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize

from kvpipe.cli.doctor.engine import connector_part
from kvpipe.cli.numbers import count_from_1
from kvpipe.config.settings import load_settings, parse_extra
from kvpipe.errors import UsageError
from kvpipe.inputs.values import exact_size
from kvpipe.manage.preflight import check_settings
from kvpipe.protocol.geometry import rounded_up
from kvpipe.tiers.disk.spec import DiskSpec


def add_arguments(check: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe check`, and set `run`."""
    check.add_argument("extra", nargs="?", default="{}", help="kv_connector_extra_config as JSON")
    check.add_argument(
        "--block-size",
        type=count_from_1,
        metavar="N",
        help="the engine's block size, to a multiple of which chunk_tokens is rounded up",
    )
    check.add_argument(
        "--model", nargs=argparse.REMAINDER, metavar="MODEL", help="also check the engine that vLLM would start for "
        "this model and the options of `vllm serve` behind it; no weights are read",
    )  # fmt: skip
    check.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the configuration, and return the exit status 0.

    Raises:
        UsageError: the configuration is wrong or cannot be used on this machine, or the engine cannot be served.

    """
    extra = parse_extra(args.extra)
    settings = load_settings(extra)
    check_settings(settings)
    block_tokens = args.block_size
    if args.model is not None:
        block_tokens = _ask(args.model, extra, block_tokens, tiers=bool(settings.tiers))
    shown = public_values(settings)
    shown["tiers"] = [public_values(one.fitted() if isinstance(one, DiskSpec) else one) for one in settings.tiers]
    shown["quotas"] = [public_values(one) for one in settings.quotas]
    if block_tokens and (tokens := rounded_up(settings.chunk_tokens, block_tokens)) != settings.chunk_tokens:
        shown["chunk_tokens"] = f"{tokens} ({settings.chunk_tokens}, rounded up to blocks of {block_tokens})"
    for key, value in shown.items():
        sys.stdout.write(f"{key} = {text_of(value)}\n")
    return 0


def _ask(command: list[str], extra: dict[str, Any], block_tokens: int | None, *, tiers: bool) -> int:
    """Print the engine that vLLM would start for `command`, a model and options.

    Returns the engine's tokens per block.
    """
    if not command or command[0].startswith("-"):
        raise UsageError("kvpipe check: --model has no model; write --model MODEL, then the options of `vllm serve`")
    model, *options = command
    if model.startswith(("/", ".")) and not Path(model).is_dir():
        raise UsageError(f"kvpipe check: --model={model} is not a folder; name the model's folder or its repository")
    block = ["--block-size", str(block_tokens)] if block_tokens else []
    engine = connector_part("asked_engine").make_asked_engine(model, extra, [*block, *options], tiers=tiers)
    sys.stdout.write(f"model = {model} ({engine.architecture}, blocks of {engine.block_tokens} tokens)\n")
    if engine.others:
        sys.stdout.write(f"not checked, because vLLM's engine has no such option: {' '.join(engine.others)}\n")
    return int(engine.block_tokens)


def public_values(model: BaseModel) -> dict[str, Any]:
    """Return the keys and values of `model` to print. Secrets are replaced.

    The name of a variable or file that does not exist is hidden, because the user may have written the secret itself
    instead of a name.
    """
    table = {key: getattr(model, key) for key in type(model).model_fields}
    there: dict[str, Callable[[str], bool]] = {"_env": os.environ.__contains__, "_file": os.path.exists}
    unknown = [
        key
        for key, value in table.items()
        for end, is_there in there.items()
        if key.endswith(end) and key not in _MADE and value and not is_there(value)
    ]
    hidden = [
        key
        for key, field in type(model).model_fields.items()
        if not field.repr and not key.endswith("_env") and table[key]
    ]
    return table | dict.fromkeys(unknown, "(not there)") | dict.fromkeys(hidden, "(not shown)")


_MADE = {"trace_file", "control_file"}
"""The keys of files that kvpipe itself creates, so these files may be missing."""


def text_of(value: object) -> str:
    """Return a value in the form in which a user would write it."""
    if isinstance(value, ByteSize):
        return exact_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {text_of(one)}" for key, one in value.items() if one is not None and one != "")
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]" if value else "(none)"
    return "(unset)" if value is None or value == "" else str(value)
