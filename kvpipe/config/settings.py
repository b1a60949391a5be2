"""The configuration is one table of keys, read from the connector's extra config, the environment and a YAML file.

``kv_connector_extra_config`` takes precedence over ``KVPIPE_*`` variables. These variables take precedence over the
file that ``config_file`` (or ``KVPIPE_CONFIG_FILE``) names. The defaults below come last. The error for an unknown key
names the most similar valid key.
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

from kvpipe.cache.policy.base import Policy
from kvpipe.errors import ConfigError
from kvpipe.inputs import config_errors, files, plugins
from kvpipe.inputs.cache_names import check_name
from kvpipe.inputs.listening import Address
from kvpipe.inputs.quota_spec import QuotaSpec, parse_quotas
from kvpipe.inputs.unique_keys import TwiceError, once, parse_json
from kvpipe.inputs.values import LocalPath, Size, Variable, no_bool
from kvpipe.node.processes import short_folder
from kvpipe.tiers.registry import parse_tiers
from kvpipe.tiers.spec import TierSpec

PREFIX = "KVPIPE_"
FILE_BYTES_MAX: Final = 1 << 20
_HOST: Final = "SERVICE_HOST"
_SERVICE: Final = re.compile(r"SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""The endings of variables that Kubernetes sets for a service (kubernetes.io/docs/concepts/services-networking)."""


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
    """Every key that a user can set. If the value of a key has a unit, the key's name includes the unit."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)

    name: Annotated[str, AfterValidator(lambda name: name and check_name(name))] = Field(
        "", description="Name of the cache. Engines that use the same name must have the same layout."
    )
    engine_name: Annotated[str, AfterValidator(lambda name: name and check_name(name))] = Field(
        "",
        description="Name of the engine for its operators, and `{engine}` in `manage`. If unset, the name is "
        "made of the model and the host or pod (`POD_NAME`). Data parallel replicas append `_dp0`, "
        "`_dp1` and so on.",
    )
    mode: Literal["auto", "layerwise", "step"] = Field(
        "auto",
        description="`layerwise` copies each layer as soon as it is computed; vLLM then runs without CUDA graphs "
        "of whole steps. `step` copies all layers at the end of the step. `auto` is `step` in steps "
        "that are replayed from such graphs, and `layerwise` in all other steps "
        "([why](docs/decisions/0016-which-mode.md)).",
    )
    chunk_tokens: Annotated[int, BeforeValidator(no_bool), Field(gt=0)] = Field(
        256, description="Tokens per chunk, rounded up to a multiple of the engine's block size."
    )
    pool_bytes_max: Size = Field(
        ByteSize(4 << 30),
        description="Host memory for chunks, per rank; units such as `8GiB` are accepted. vLLM's "
        "`--kv-offloading-size` also sets this size, in GiB for all ranks together.",
    )
    pool: Literal["private", "node"] = Field(
        "private",
        description="`private`: every rank has a pool of its own. `node`: all engines of a user on a node share one "
        "memory that outlives the engines; then `pool_bytes_max` is the size for the whole node "
        "([`docs/node-pool.md`](docs/node-pool.md)).",
    )
    pool_dir: Annotated[LocalPath, AfterValidator(short_folder)] | None = Field(
        None,
        description="With `pool: node`: folder of the socket at which engines of one node find each other. Unset: "
        "`$XDG_RUNTIME_DIR/kvpipe` or `/tmp/kvpipe-UID`.",
    )
    pool_wait_s_max: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=3600)] = Field(
        20, description="With `pool: node`: longest time that an engine waits for the node's memory when it starts."
    )
    pool_or_private: bool = Field(
        default=False,
        description="With `pool: node`: use a private pool, with a warning, if the node's memory cannot be used. "
        "If false, the engine does not start in this case.",
    )
    pool_checksums: bool = Field(
        default=False,
        description="With `pool: node`: write a checksum of each saved chunk, and compare it with each load. Engines "
        "of one memory may differ ([cost](docs/node-pool.md#damaged-chunks)).",
    )
    keep_s: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=31_536_000)] = Field(
        600,
        description="With `pool: node`: seconds for which the node's memory is kept after the last engine has ended. "
        "The first engine's value counts.",
    )
    prefault: Literal["ahead", "start", "use"] = Field(
        "ahead",
        description="When the pool's memory is taken from the system. `ahead`: in the background, from start-up "
        "on; if a CPU engine saves faster, the rest is taken as with `use`. `start`: before the engine "
        "serves. `use`: when a chunk is first written; the forward waits until the memory is there.",
    )
    tiers: Annotated[tuple[SerializeAsAny[TierSpec], ...], NoDecode, BeforeValidator(parse_tiers)] = Field(
        (),
        description="Places beyond host memory that keep chunks, nearest first: URLs separated by whitespace, or "
        "a list of URLs and tables of keys ([`docs/tiers.md`](docs/tiers.md)).",
    )
    lookup_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=600_000)] = Field(
        1000,
        description="With tiers: longest time that a request waits for a lookup and for chunks from tiers. A "
        "request waits longer while its chunks arrive sooner than the engine would compute them. Then the "
        "request loads the chunks that have arrived, and computes the rest. If chunks were missing, and the engine "
        "keeps the request waiting for another `lookup_ms_max`, kvpipe asks the tiers again.",
    )
    lookup_slow_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=600_000)] = Field(
        0,
        description="With tiers: the limit that replaces `lookup_ms_max` for chunks in a tier that is read more "
        "slowly than the engine computes. While the engine computes other prompts, `lookup_ms_max` applies to "
        "these chunks, too.",
    )
    tier_bytes_in_flight_max: Size = Field(
        ByteSize(256 << 20),
        description="Host memory per rank that writes to tiers may use at once. All tiers that are written "
        "have equal parts of this memory; each tier may always store one chunk.",
    )
    store_idle_s_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=86_400)] = Field(
        30,
        description="With tiers: longest time that an engine without other work continues to store chunks before "
        "it pauses or ends. The remaining chunks are stored when requests arrive, or are lost "
        "([why](docs/decisions/0032-stores-of-an-idle-engine.md)).",
    )
    share_ranks_max: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=4096)] = Field(
        1,
        description="With tiers: largest tensor-parallel size among the engines that share the tiers. Engines with "
        "fewer ranks store each chunk in this number of parts, so that each rank of any engine reads only "
        "its own part. By default, a rank of an engine with more ranks reads whole values and uses a part of each "
        "([why](docs/decisions/0024-chunks-without-layout.md)).",
    )
    policy: Annotated[str, BeforeValidator(_policy)] = Field(
        "sessions",
        description="Eviction policy. `sessions` learns how long sessions pause and keeps chunks of sessions that "
        "will soon continue; it evicts like `lru` until the learnt order has proven to hit more "
        "([why](docs/decisions/0027-sessions.md)). `lru` evicts the least recently used chunk. "
        "`s3fifo` keeps chunks with hits during a scan of prompts that are used once. With `pool: node`, one policy "
        "evicts for all engines of the node, by default `lru` ([rules](docs/node-pool.md)).",
    )
    quotas: Annotated[tuple[QuotaSpec, ...], NoDecode, BeforeValidator(parse_quotas)] = Field(
        (),
        description="Shares of the pool by `cache_salt`: a list of tables of keys "
        "([`docs/quotas.md`](docs/quotas.md)). Without quotas, all requests share one pool.",
    )
    load: Literal["auto", "sync", "async"] = Field(
        "auto",
        description="`sync` overlaps a hit's load with the forward, layer by layer. `async` lets the request "
        "wait while others run. `auto` is `async` for models with several KV cache groups or a "
        "sliding window, for pipeline stages, and if a load would take longer than `stall_ms_max`; "
        "otherwise `auto` is `sync`.",
    )
    stall_ms_max: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=3_600_000)] = Field(
        50,
        description="With `load=auto`: if other requests run, a hit is loaded asynchronously if its load "
        "together with the step's other loads would take longer than this number of milliseconds, at the rate "
        "measured so far. 0: every hit is loaded asynchronously if other requests run.",
    )
    save_decode: bool = Field(default=True, description="Save the KV of generated tokens, too.")
    save_partial: bool = Field(
        default=True, description="Save the last chunk of a request block by block, even if it is not full."
    )
    save_decode_steps: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, BeforeValidator(no_bool)] = Field(
        None,
        description="Save the KV of generated tokens only in every n-th step of a request, so that the other steps "
        "cost less. If a request ends between such steps, the tokens generated since the last such step are not saved "
        "([why](docs/decisions/0037-cost-of-a-step.md)). Unset: 1 with one request in a step, 16 with up to 16, 8 with "
        "up to 32, 4 with up to 64, 2 with up to 128, and 1 with more, whose every step saves many blocks. With a "
        "sliding window a request is also saved before unsaved tokens leave the smallest window, so at least once per "
        "window.",
    )
    freeze: bool = Field(default=False, description="Serve hits, but save nothing new. Can be switched at run time.")
    bypass: bool = Field(default=False, description="Neither save nor load.")
    copy_threads: Annotated[Annotated[int, Field(ge=0, le=1)] | None, BeforeValidator(no_bool)] = Field(
        None,
        description="Threads per direction that copy on CPU. 1: in parallel with the forward. 0: copies are made "
        "within the forward. Unset: 1 if the engine's own threads leave a core free, otherwise 0.",
    )
    mover: Literal["auto", "dma", "staged", "direct"] = Field(
        "auto",
        description="On CUDA, how pages are copied. `dma`: by the copy engines, run by run. `staged`: a kernel "
        "gathers pages in device memory, then the copy engines copy them. `direct`: by a kernel. "
        "`auto`: the fastest of these for each batch, as measured at start-up, but no `direct` saves "
        "from Hopper (sm_90) on ([why](docs/decisions/0009-cuda-data-plane.md)).",
    )
    staging_bytes_max: Annotated[Size, Field(ge=0)] = Field(
        ByteSize(64 << 20), description="On CUDA: device memory per rank in which pages are gathered; 0: none."
    )
    completions: Literal["auto", "poll", "block"] = Field(
        "auto",
        description="On CUDA, how the end of copies is noticed. `poll` asks the device every 50 to 200 us while "
        "copies are in flight. `block` sleeps in the driver, in a thread per direction. `auto` is "
        "`block` if such a sleep ends at most 200 us late, as measured at start-up, otherwise `poll`.",
    )
    wait_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=3_600_000)] = Field(
        30_000, description="Longest wait for a copy. After this time the copy's job fails."
    )
    control_file: LocalPath | None = Field(
        None, description="File that `kvpipe freeze on|off` writes and that a running engine obeys."
    )
    manage: Annotated[str, AfterValidator(_address)] = Field(
        "",
        description="Address at which the engine serves its operators over HTTP: `unix:/FOLDER/{engine}.sock`, or a "
        "port of `127.0.0.1`. If empty, the engine serves no operators "
        "([`docs/management.md`](docs/management.md)).",
    )
    manage_token_file: LocalPath | None = Field(
        None,
        description="File with the token that each request to the management interface must carry. Only "
        "the file's owner may read it.",
    )
    manage_token_env: Variable = Field(
        "", description="Environment variable with the token, instead of `manage_token_file`."
    )
    manage_pin_s_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=31_536_000)] = Field(
        86_400, description="Longest time for which operators may pin a prompt."
    )
    manage_pinned_share_max: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=0.9)] = Field(
        0.5, description="Largest share of the pool that pins may hold."
    )
    state_dir: LocalPath | None = Field(
        None,
        description="Folder in which named caches are registered. Unset: `$XDG_STATE_HOME/kvpipe` or "
        "`~/.local/state/kvpipe`.",
    )
    config_file: LocalPath | None = Field(None, description="YAML file with any of these keys.")
    stuck_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=3_600_000)] = Field(
        60_000, description="A load or save without progress for this number of milliseconds is reported and fails."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of kvpipe's lines in vLLM's log; `VLLM_LOGGING_LEVEL` applies as well."
    )
    log_requests: bool = Field(default=False, description="Log two lines per request: at its admission and at its end.")
    trace_file: LocalPath | None = Field(
        None, description="File for the trace, in lines of JSON. All processes of the engine append to it."
    )
    trace_level: Literal["info", "debug"] = Field(
        "debug",
        description="`debug` traces every transition of every state machine, so that the trace can be replayed. "
        "`info` traces only events of requests.",
    )
    trace_sample: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = Field(
        1.0,
        description="Share of requests that are traced, chosen by their ids. Failures of the other requests "
        "are traced, too.",
    )
    trace_bytes_max: Annotated[Size, Field(ge=1 << 20)] = Field(
        ByteSize(1 << 30), description="Largest size of the trace. Its older half is kept as `FILE.1`."
    )
    otel: bool = Field(
        default=False,
        description="Send a span per request through OpenTelemetry (`pip install 'kvpipe[otel]'`; the "
        "endpoint is set by OpenTelemetry's `OTEL_` variables).",
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
        """Return the sources that the module's docstring names, in the order of precedence.

        pydantic-settings has a source for YAML too. Decision 36 has the reasons why kvpipe does not use that source.
        """
        # pydantic-settings would look up the variable of every field, which takes 5 ms. Usually no variable is set.
        in_env = env_settings() if any(map(_is_ours, os.environ)) else {}
        sources = (init_settings, InitSettingsSource(settings_cls, in_env))
        path = (in_env | init_settings()).get("config_file")
        if not path:
            return sources
        found = _read_yaml(_Where.model_validate({"config_file": path}).config_file)
        return (*sources, InitSettingsSource(settings_cls, found))


def load_settings(extra: dict[str, Any] | None = None) -> Settings:
    """Read and check the configuration.

    Args:
        extra: the connector's ``kv_connector_extra_config``.

    Raises:
        ConfigError: a key is unknown, a value is wrong or two keys contradict each other. The message names the key.

    """
    given = dict(extra or {})
    _refuse_unknown(given, "kv_connector_extra_config")
    in_env = [key for key in os.environ if _is_ours(key) and not _is_of_service(key)]
    _refuse_unknown([key[len(PREFIX) :].lower() for key in in_env], "environment", shown=lambda k: PREFIX + k.upper())
    try:
        settings = Settings(**given)
    except ValidationError as e:
        problem = e.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # the cause's message is complete, and hides the secrets of URLs
            raise cause from None
        msg = f"kvpipe: {config_errors.first_problem(e, Settings.model_fields)}"
        raise ConfigError(msg) from None
    if settings.bypass and settings.freeze:
        msg = "kvpipe: bypass=true contradicts freeze=true (bypass serves no hits); set only one of them"
        raise ConfigError(msg)
    return settings


def check_stores(settings: Settings, *, loads: bool) -> None:
    """Raise `ConfigError` for a tier that would never be written. `loads` says whether the engine's `kv_role` loads.

    An engine that does not load never uses a chunk a second time.
    """
    for at, tier in enumerate(settings.tiers, 1):
        if tier.store == "second_use" and not loads:
            msg = (
                f"kvpipe: tier {at} ({tier.kind}): store='second_use' would store nothing with kv_role='kv_producer' "
                "(it loads no chunk, so it uses none a second time); set store='all', or kv_role='kv_both'"
            )
            raise ConfigError(msg)


def parse_extra(extra: str) -> dict[str, Any]:
    """Parse `kv_connector_extra_config` from JSON. Raises `ConfigError` if `extra` is not a JSON object."""
    try:
        parsed = parse_json(extra)
    except TwiceError as e:
        msg = f"kvpipe: extra: {e}"
        raise ConfigError(msg) from None
    except (ValueError, RecursionError) as e:
        msg = f"kvpipe: extra is not JSON ({config_errors.error_place(e)}); write it as '{{\"chunk_tokens\": 256}}'"
        raise ConfigError(msg) from None
    if not isinstance(parsed, dict):
        found = type(parsed).__name__
        msg = f"kvpipe: extra is of type {found}, not a JSON object; write it as '{{\"chunk_tokens\": 256}}'"
        raise ConfigError(msg)
    return parsed


def _is_ours(variable: str) -> bool:
    return variable.upper().startswith(PREFIX)


def _is_of_service(variable: str) -> bool:
    """Return whether Kubernetes sets the variable for a service whose name begins with kvpipe."""
    of = (host.removesuffix(_HOST) for host in os.environ if host.startswith(PREFIX) and host.endswith(_HOST))
    return any(variable.startswith(name) and _SERVICE.fullmatch(variable[len(name) :]) for name in of)


def _refuse_unknown(given: Iterable[Any], where: str, shown: Callable[[str], str] = str) -> None:
    valid = Settings.model_fields
    for key in given:
        if key not in valid:
            remedy = config_errors.suggest(key, valid, shown=shown)
            msg = f"kvpipe: unknown key {shown(config_errors.safe_name(key))!r} in the {where}; {remedy}"
            raise ConfigError(msg)


class _Where(BaseModel):
    config_file: LocalPath = Field(description="YAML file with any of these keys.")


class _Loader(yaml.SafeLoader):
    """A loader of YAML that refuses aliases, which are not needed and could expand a short file to huge data."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  (PyYAML's signature)
        """Construct a table. Refuse a key that is given twice."""
        once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node. Refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(files.read_small(path, FILE_BYTES_MAX).decode(), _Loader)  # noqa: S506  (`_Loader` is safe)
    except (OSError, UnicodeDecodeError) as e:
        why = files.why(e) if isinstance(e, OSError) else "the file is not UTF-8 text"
    except TwiceError as e:
        msg = f"kvpipe: config_file={str(path)!r}: {e}"
        raise ConfigError(msg) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        why = config_errors.error_place(e)
    else:
        return _checked(path, data)
    msg = f"kvpipe: config_file={str(path)!r} cannot be read ({why}); give the path of a YAML file of keys"
    raise ConfigError(msg) from None


def _checked(path: Path, data: object) -> dict[str, Any]:
    if data is None:  # the file is empty
        return {}
    if not isinstance(data, dict):
        msg = f"kvpipe: config_file={str(path)!r} holds a {type(data).__name__}; write one 'key: value' per line"
        raise ConfigError(msg)
    _refuse_unknown(data, f"file {path}")
    return data


def markdown_table() -> str:
    """Return the table of `docs/configuration.md`, one row per key."""
    return config_errors.keys_table(Settings.model_fields)
