"""Configuration: one table of keys, read from the connector's extra config, the environment and a YAML file.

Precedence: ``kv_connector_extra_config`` over ``KVPIPE_*`` variables over the file named by ``config_file``
(or ``KVPIPE_CONFIG_FILE``) over the defaults below. An unknown key is refused with the nearest valid name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, Field, SerializeAsAny, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kvpipe import config_errors, files, plugins
from kvpipe.cache.policy.base import Policy
from kvpipe.errors import ConfigError
from kvpipe.listening import Address
from kvpipe.names import check_name
from kvpipe.quota_spec import QuotaSpec, parse_quotas
from kvpipe.tiers.registry import parse_tiers
from kvpipe.tiers.spec import TierSpec
from kvpipe.unique_keys import TwiceError, once, parse_json
from kvpipe.values import LocalPath, Size, Variable, no_bool

PREFIX = "KVPIPE_"
FILE_BYTES_MAX: Final = 1 << 20
_HOST: Final = "SERVICE_HOST"
_SERVICE: Final = re.compile(r"SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""Ends of the variables that Kubernetes sets for each service (https://kubernetes.io/docs/concepts/services-networking)."""


def _policy(value: object) -> object:
    known = plugins.names(plugins.POLICIES)
    if not isinstance(value, str) or value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")
    plugin = plugins.load(plugins.POLICIES, value)
    if isinstance(plugin.made_of, type):
        plugin.check(plugin.made_of, Policy)
    return value


def _address(text: str) -> str:
    if text:
        Address.parse(text)
    return text


class Settings(BaseSettings):
    """Every key that a user can set. Units are last in the names."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)

    name: Annotated[str, AfterValidator(lambda name: name and check_name(name))] = Field(
        "", description="Name of the cache; engines that use one name must have one layout."
    )
    mode: Literal["auto", "layerwise", "step"] = Field(
        "auto",
        description="`layerwise` copies each layer as soon as it is computed, for which vLLM gives up CUDA graphs of "
        "whole steps; `step` copies all at the step's end; `auto` is `step` in steps that are replayed from such "
        "graphs, `layerwise` in all others ([why](docs/decisions/0016-which-mode.md)).",
    )
    chunk_tokens: Annotated[int, BeforeValidator(no_bool), Field(gt=0)] = Field(
        256, description="Tokens per chunk, a multiple of the engine's block size."
    )
    pool_bytes_max: Size = Field(
        ByteSize(4 << 30), description="Host memory for chunks, per rank; takes units such as `8GiB`."
    )
    prefault: Literal["ahead", "start", "use"] = Field(
        "ahead",
        description="When the pool's memory is taken from the system: `ahead` of its use, in the background from "
        "start-up on (a CPU engine that saves faster than that uses the rest as with `use`); `start`: before the "
        "engine serves; `use`: as chunks are first written, which forwards wait for.",
    )
    tiers: Annotated[tuple[SerializeAsAny[TierSpec], ...], NoDecode, BeforeValidator(parse_tiers)] = Field(
        (),
        description="Places beyond host memory, nearest first: URLs separated by whitespace, or a list of URLs and "
        "tables of keys ([`docs/tiers.md`](docs/tiers.md)).",
    )
    lookup_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=600_000)] = Field(
        1000,
        description="With tiers: longest that a request waits for a lookup and for chunks to come from a tier, but for "
        "those that come sooner than the engine would compute them; then it goes on with what has come. If the engine "
        "keeps it waiting as long again, tiers are asked once more.",
    )
    lookup_slow_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=600_000)] = Field(
        0,
        description="The same for chunks of a tier that is read more slowly than the engine computes; `lookup_ms_max` "
        "counts while it computes other prompts.",
    )
    tier_bytes_in_flight_max: Size = Field(
        ByteSize(256 << 20),
        description="Host memory per rank that writes to tiers hold at once, beyond it chunks are not written.",
    )
    store_idle_s_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=86_400)] = Field(
        30,
        description="With tiers: longest that an engine without other work goes on to store chunks, and neither pauses "
        "nor ends; what is left is stored when requests come, or lost ([why](docs/decisions/0032-stores-of-an-idle-"
        "engine.md)).",
    )
    share_ranks_max: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=4096)] = Field(
        1,
        description="With tiers: largest tensor-parallel size among engines that share them. Engines of fewer ranks "
        "store chunks in that many parts, so that each rank reads only its own; else it reads whole values for a part "
        "of them ([why](docs/decisions/0024-chunks-without-layout.md)).",
    )
    policy: Annotated[str, BeforeValidator(_policy)] = Field(
        "sessions",
        description="Eviction: `sessions`, which learns how long sessions pause and keeps those that soon go on, and "
        "evicts like `lru` until its own order has proven to hit more ([why](docs/decisions/0027-sessions.md)); `lru`; "
        "`s3fifo`, which a scan of one-time prompts cannot flush.",
    )
    quotas: Annotated[tuple[QuotaSpec, ...], NoDecode, BeforeValidator(parse_quotas)] = Field(
        (),
        description="Shares of the pool by `cache_salt`: a list of tables of keys "
        "([`docs/quotas.md`](docs/quotas.md)); none: one pool for all.",
    )
    load: Literal["auto", "sync", "async"] = Field(
        "auto",
        description="`sync` overlaps a hit's load with the forward, layer by layer; `async` lets the request wait "
        "while others run; `auto` is `sync`, but `async` for models with several KV cache groups or a sliding window, "
        "for pipeline stages, and where `stall_ms_max` says so.",
    )
    stall_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=3_600_000)] = Field(
        50,
        description="With `load=auto`: a hit whose load should take longer, at the rate measured so far, is loaded "
        "asynchronously when other requests run; 0: every such hit.",
    )
    save_decode: bool = Field(default=True, description="Save the KV of generated tokens too.")
    learn_answers: bool = Field(
        default=False,
        description="Learn of which kinds of requests no prompt goes on with the answer, as where a chat template cuts "
        "reasoning: their answers are evicted first, and not stored in tiers ([how](docs/hints.md#answers)).",
    )
    save_partial: bool = Field(default=True, description="Save a last chunk that is not full, block by block.")
    freeze: bool = Field(default=False, description="Serve hits, save nothing new. Can be switched at run time.")
    bypass: bool = Field(default=False, description="Neither save nor load.")
    copy_threads: Annotated[Annotated[int, Field(ge=0, le=1)] | None, BeforeValidator(no_bool)] = Field(
        None,
        description="On CPU: 1 copies beside the forward in a thread per direction, 0 copies inline; unset: 1 if "
        "a core is left beside the engine's own threads.",
    )
    mover: Literal["auto", "dma", "staged", "direct"] = Field(
        "auto",
        description="On CUDA, how pages move: `dma` by the copy engines, stretch by stretch; `staged` gathered by a "
        "kernel into device memory, then by the copy engines; `direct` by a kernel; `auto` the quickest for each "
        "batch, as measured at start-up.",
    )
    staging_bytes_max: Annotated[Size, Field(ge=0)] = Field(
        ByteSize(64 << 20), description="On CUDA, device memory per rank that pages are gathered in; 0: none."
    )
    wait_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=3_600_000)] = Field(
        30_000, description="Longest wait for a copy before its job is failed."
    )
    control_file: LocalPath | None = Field(
        None, description="File that `kvpipe freeze on|off` writes and a running engine obeys."
    )
    manage: Annotated[str, AfterValidator(_address)] = Field(
        "",
        description="Where the engine serves its operators over HTTP: `unix:/FOLDER/{engine}.sock`, or a port of "
        "`127.0.0.1`; nothing: nowhere ([`docs/management.md`](docs/management.md)).",
    )
    manage_token_file: LocalPath | None = Field(
        None, description="File, readable by its owner only, with the token that each request must carry."
    )
    manage_token_env: Variable = Field("", description="Environment variable with the same.")
    manage_pin_s_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=31_536_000)] = Field(
        86_400, description="Longest time for which operators may pin a prompt."
    )
    manage_pinned_share_max: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=0.9)] = Field(
        0.5, description="Largest share of the pool that pins may hold."
    )
    state_dir: LocalPath | None = Field(
        None,
        description="Where named caches are registered; unset: `$XDG_STATE_HOME/kvpipe` or `~/.local/state/kvpipe`.",
    )
    config_file: LocalPath | None = Field(None, description="YAML file with any of these keys.")
    stuck_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=3_600_000)] = Field(
        60_000, description="A load or save that has not moved for so long is reported and failed."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of kvpipe's lines in vLLM's log; `VLLM_LOGGING_LEVEL` applies as well."
    )
    log_requests: bool = Field(default=False, description="Log two lines per request: at its admission and at its end.")
    trace_file: LocalPath | None = Field(
        None, description="File for the trace, lines of JSON; all processes of the engine append to it."
    )
    trace_level: Literal["info", "debug"] = Field(
        "debug",
        description="`debug` traces every transition of every machine, so that the trace can be replayed; "
        "`info` only what happens to requests.",
    )
    trace_sample: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests that are traced, by their ids; failures of the others are traced too."
    )
    trace_bytes_max: Annotated[Size, Field(ge=1 << 20)] = Field(
        ByteSize(1 << 30), description="Disk for the trace; the older half is kept as `FILE.1`."
    )
    otel: bool = Field(
        default=False,
        description="Send a span per request through OpenTelemetry (`pip install 'kvpipe[otel]'`; the endpoint is "
        "set by its own `OTEL_` variables).",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the module's docstring names, in that order. pydantic's own source for YAML follows aliases."""
        path = (env_settings() | init_settings()).get("config_file")
        if not path:
            return (init_settings, env_settings)
        found = _read_yaml(_Where.model_validate({"config_file": path}).config_file)
        return (init_settings, env_settings, InitSettingsSource(settings_cls, found))


def load_settings(extra: dict[str, Any] | None = None) -> Settings:
    """Read and check the configuration.

    Args:
        extra: the connector's ``kv_connector_extra_config``.

    Raises:
        ConfigError: a key is unknown, a value is wrong or two keys contradict each other; one sentence names them.

    """
    given = dict(extra or {})
    _refuse_unknown(given, "kv_connector_extra_config")
    in_env = [key for key in os.environ if key.upper().startswith(PREFIX) and not _is_of_service(key)]
    _refuse_unknown([key[len(PREFIX) :].lower() for key in in_env], "environment", shown=lambda k: PREFIX + k.upper())
    try:
        settings = Settings(**given)
    except ValidationError as e:
        problem = e.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # its text is complete, and shows no secret of a URL
            raise cause from None
        msg = f"kvpipe: {config_errors.first_problem(e, Settings.model_fields)}"
        raise ConfigError(msg) from None
    if settings.bypass and settings.freeze:
        msg = "kvpipe: bypass=true contradicts freeze=true (bypass serves no hits); set only one of them"
        raise ConfigError(msg)
    return settings


def parse_extra(extra: str) -> dict[str, Any]:
    """Read kv_connector_extra_config from JSON. Raises `ConfigError`."""
    try:
        parsed = parse_json(extra)
    except TwiceError as e:
        msg = f"kvpipe: extra: {e}"
        raise ConfigError(msg) from None
    except (ValueError, RecursionError) as e:
        msg = f"kvpipe: extra is not JSON ({config_errors.place(e)}); write it as '{{\"chunk_tokens\": 256}}'"
        raise ConfigError(msg) from None
    if not isinstance(parsed, dict):
        found = type(parsed).__name__
        msg = f"kvpipe: extra is no JSON object but of type {found}; write it as '{{\"chunk_tokens\": 256}}'"
        raise ConfigError(msg)
    return parsed


def _is_of_service(variable: str) -> bool:
    """Whether Kubernetes sets the variable for a service whose name begins with kvpipe."""
    of = (host.removesuffix(_HOST) for host in os.environ if host.startswith(PREFIX) and host.endswith(_HOST))
    return any(variable.startswith(name) and _SERVICE.fullmatch(variable[len(name) :]) for name in of)


def _refuse_unknown(given: Iterable[Any], where: str, shown: Callable[[str], str] = str) -> None:
    valid = Settings.model_fields
    for key in given:
        if key not in valid:
            remedy = config_errors.suggest(key, valid, shown=shown)
            msg = f"kvpipe: unknown key {shown(config_errors.name(key))!r} in the {where}; {remedy}"
            raise ConfigError(msg)


class _Where(BaseModel):
    config_file: LocalPath = Field(description="YAML file with any of these keys.")


class _Loader(yaml.SafeLoader):
    """YAML without aliases: a table of keys needs none, and with them a short file is an endless one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  (its signature)
        """Refuse a key that is given twice."""
        once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(files.read_small(path, FILE_BYTES_MAX).decode(), _Loader)  # noqa: S506  (a safe one)
    except (OSError, UnicodeDecodeError) as e:
        why = files.why(e) if isinstance(e, OSError) else "it is no text"
    except TwiceError as e:
        msg = f"kvpipe: config_file={str(path)!r}: {e}"
        raise ConfigError(msg) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        why = config_errors.place(e)
    else:
        return _checked(path, data)
    msg = f"kvpipe: config_file={str(path)!r} cannot be read ({why}); give the path of a YAML file of keys"
    raise ConfigError(msg) from None


def _checked(path: Path, data: object) -> dict[str, Any]:
    if data is None:  # an empty file
        return {}
    if not isinstance(data, dict):
        msg = f"kvpipe: config_file={str(path)!r} holds a {type(data).__name__}; write one 'key: value' per line"
        raise ConfigError(msg)
    _refuse_unknown(data, f"file {path}")
    return data


def markdown_table() -> str:
    """Return the table of `docs/configuration.md`, one row per key."""
    return config_errors.table(Settings.model_fields)
