"""`kvpipe check --model`: makes vLLM's configuration of an engine with kvpipe, without reading the model's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kvpipe.connectors.vllm.plugin import NAME
from kvpipe.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AskedEngine(NamedTuple):
    """Facts of an engine that vLLM and kvpipe accept.

    `block_tokens` is the number of tokens per block. `others` has the options that vLLM's engine arguments do not
    include.
    """

    architecture: str
    block_tokens: int
    others: list[str]


def make_asked_engine(model: str, extra: dict[str, Any], options: Sequence[str], *, tiers: bool) -> AskedEngine:
    """Make vLLM's configuration for `vllm serve MODEL OPTIONS` with kvpipe, as vLLM does before it loads weights.

    `extra`: kvpipe's configuration keys. `tiers`: whether kvpipe has tiers. vLLM reads the model's own configuration,
    and downloads it if `model` is no folder.

    Raises:
        UsageError: vLLM or kvpipe would refuse the engine or an option. The message names the reason.

    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the command prints the reason itself
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  (slow)
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415  (slow)

    from kvpipe.connectors.vllm.identity.engine_facts import check_hashes  # noqa: PLC0415  (slow)

    transfer = {"kv_connector": NAME, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    flag = json.dumps(transfer | {"kv_connector_extra_config": extra})
    others = list[str]()

    class ServeOptions(FlexibleArgumentParser):
        """vLLM's parser, which also normalizes options. Unknown options are appended to `others`."""

        def parse_known_args(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401  (as argparse)
            """Return the known options. Append the other options to `others`."""
            known, more = super().parse_known_args(*given, **named)
            others.extend(more)
            return known, []

        def error(self, message: str) -> NoReturn:
            """Raise UsageError. argparse's own method would print every option first."""
            raise UsageError(f"kvpipe: vLLM refuses an option: {message}")

    parser = AsyncEngineArgs.add_cli_args(ServeOptions(prog="kvpipe check", allow_abbrev=False))
    args = parser.parse_args([*options, "--model", model])
    if args.kv_transfer_config is not None:
        raise UsageError("kvpipe: --kv-transfer-config behind --model; give kvpipe's keys as the argument of `check`")
    args = parser.parse_args(["--kv-transfer-config", flag], args)
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        _choose_executor(config)
        if tiers:
            check_hashes(config)
    except UsageError:
        raise
    except Exception as error:
        raise _refused(model, error) from error
    return AskedEngine(config.model_config.architecture, config.cache_config.block_size, others)


def _choose_executor(config: VllmConfig) -> None:
    """Make vLLM choose the executor, because kvpipe's plug-in checks the engine at that moment."""
    from vllm.v1.executor import Executor  # noqa: PLC0415  (slow)

    Executor.get_class(config)


def _refused(model: str, error: Exception) -> UsageError:
    """Return the refusal by kvpipe if `error` contains one, or else an error with vLLM's reason in one line."""
    reason = str(error)
    if callable(errors := getattr(error, "errors", None)):  # pydantic's ValidationError contains the error of a check
        first = errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, UsageError):
            return own
        reason = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"kvpipe: vLLM refuses model={model!r}: {' '.join(reason.split())}")
