"""The registered kinds of tiers, and how the key `tiers` is parsed into their specifications."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from pydantic import ValidationError

from kvpipe.errors import ConfigError
from kvpipe.inputs import config_errors, plugins
from kvpipe.inputs.unique_keys import TwiceError, parse_json
from kvpipe.inputs.values import PATH_CHARS_MAX
from kvpipe.tiers.base import Tier
from kvpipe.tiers.spec import TierSpec

TIERS_MAX: Final = 16
_EXAMPLES = "a path such as /mnt/kv or a URL such as redis://HOST:6379/0"


def parse_tiers(value: object) -> tuple[TierSpec, ...]:
    """Parse the configuration's `tiers`: a list of entries as `parse_tier` accepts, or a text.

    A text is either a list of URLs separated by blanks, or a list of entries in JSON.

    Raises:
        ConfigError: an entry is wrong, two entries are the same store, or there are more than `TIERS_MAX` entries.

    """
    if isinstance(value, str):
        text = value.strip()
        try:
            value = parse_json(text) if text.startswith(("[", "{")) else text.split()
        except TwiceError as error:
            raise ConfigError(f"kvpipe: tiers: {error}") from None
        except (ValueError, RecursionError) as error:
            why = config_errors.error_place(error)
            msg = f"kvpipe: tiers begins as JSON but is not valid ({why}); correct it, or give URLs separated by blanks"
            raise ConfigError(msg) from None
    if not isinstance(value, Sequence) or len(value) > TIERS_MAX:
        if isinstance(value, Sequence):
            raise ConfigError(f"kvpipe: tiers has {len(value)} entries; give at most {TIERS_MAX}")
        msg = f"kvpipe: tiers is of type {type(value).__name__}, not a list; give one entry per tier: {_EXAMPLES}"
        raise ConfigError(msg)
    specs = tuple(one if isinstance(one, TierSpec) else parse_tier(one, at) for at, one in enumerate(value, 1))
    first: dict[tuple[object, ...], int] = {}
    for at, spec in enumerate(specs, 1):
        if (other := first.setdefault(_place(spec), at)) != at:
            msg = f"kvpipe: tier {at} ({spec.kind}) is the same store as tier {other}; remove one of them"
            raise ConfigError(msg)
    return specs


def parse_tier(value: str | Mapping[str, Any], at: int = 1) -> TierSpec:
    """Parse one tier: a URL, an absolute path of a disk tier, or a table of keys with `kind`.

    `at` is the number of the tier in the list, counted from 1, for error messages.

    Raises:
        ConfigError: `value` has another form, or a key is unknown, missing or wrong. The message shows no secret.

    """
    spec, given = _of_url(value, at) if isinstance(value, str) else _of_table(value, at)
    kind = spec.model_fields["kind"].default
    try:
        try:
            return spec.model_validate(given)
        except ValidationError as error:
            why = config_errors.first_problem(error, spec.model_fields, f"a {kind} tier has")
    except Exception as error:  # noqa: BLE001  (a bug of the package that registered the kind)
        raise _unread(spec, error) from None
    raise ConfigError(f"kvpipe: tier {at} ({kind}): {why}")


def named(specs: Iterable[TierSpec]) -> tuple[tuple[str, TierSpec], ...]:
    """Return (name, specification) of each tier. The name is the kind, and a number if an earlier tier has the kind."""
    seen: Counter[str] = Counter()
    out = []
    for spec in specs:
        seen[spec.kind] += 1
        out.append((spec.kind if seen[spec.kind] == 1 else f"{spec.kind}-{seen[spec.kind]}", spec))
    return tuple(out)


def make_tier(name: str, spec: TierSpec, *, writes: bool = True) -> Tier:
    """Return the tier of `spec`, which is closed. `writes` is explained in `TierSpec.make`.

    Raises:
        ConfigError: the tier cannot be made, or lacks a method of `Tier`.

    """
    plugin = _plugin(type(spec))
    tier: Tier = plugin._replace(made_of=lambda: spec.make(name, writes=writes)).make()
    plugin.check(tier, Tier)
    return tier


def spec_of(group: str, name: str) -> type[TierSpec]:
    """Return the specification registered in `group` under `name`: a kind of tier, or the scheme of a URL.

    Raises:
        KeyError: no object is registered under `name`.
        ConfigError: the registered object cannot be used; the message names the package.

    """
    plugin = plugins.load(group, name)
    spec = plugin.made_of
    if not (isinstance(spec, type) and issubclass(spec, TierSpec)):
        raise ConfigError(f"kvpipe: {plugin} is no subclass of kvpipe.tiers.spec.TierSpec; update the package")
    if missing := sorted(spec.__abstractmethods__):
        raise ConfigError(
            f"kvpipe: {plugin} has no {', '.join(missing)}(); kvpipe.tiers.spec.TierSpec lists what is needed"
        )
    kind = spec.model_fields["kind"].default
    if group == plugins.TIERS and kind != name:
        raise ConfigError(f"kvpipe: {plugin} declares the kind {kind!r}; register it under that name")
    if unknown := [str(key) for key in spec.place if key not in spec.model_fields]:
        raise ConfigError(
            f"kvpipe: {plugin} names {unknown[0]!r} in `place`, which is not one of its keys; update the package"
        )
    return spec


def _plugin(spec: type[TierSpec]) -> plugins.Plugin:
    kind = str(spec.model_fields["kind"].default)
    if kind in plugins.names(plugins.TIERS):
        return plugins.load(plugins.TIERS, kind)
    return plugins.Plugin(plugins.TIERS, kind, spec.__module__, spec)


def _unread(spec: type[TierSpec], error: Exception) -> ConfigError:
    """Return the error for a kind of tier whose code fails to read the tier's configuration.

    The message does not show the configuration, because a value may be secret.
    """
    why = f"{type(error).__name__}; update the package, or uninstall it"
    return ConfigError(f"kvpipe: {_plugin(spec)} cannot parse its own configuration: {why}")


def _place(spec: TierSpec) -> tuple[object, ...]:
    return (spec.kind, *(str(getattr(spec, key)).rstrip("/") for key in spec.place or type(spec).model_fields))


def _of_table(value: object, at: int) -> tuple[type[TierSpec], dict[str, Any]]:
    if not isinstance(value, Mapping):
        msg = f"kvpipe: tier {at} is of type {type(value).__name__}; give {_EXAMPLES}, or a table of keys with 'kind'"
        raise ConfigError(msg)
    kind, kinds = value.get("kind"), plugins.names(plugins.TIERS)
    if kind is None:
        raise ConfigError(f"kvpipe: tier {at}: kind is missing; it is one of {', '.join(kinds)}")
    if not isinstance(kind, str) or kind not in kinds:
        remedy = config_errors.suggest(kind, kinds, "kinds are")
        raise ConfigError(f"kvpipe: tier {at}: kind{config_errors.shown(kind)} is not a kind of tier; {remedy}")
    spec = spec_of(plugins.TIERS, kind)
    return spec, {key if isinstance(key, str) else config_errors.safe_name(key): one for key, one in value.items()}


def _of_url(text: str, at: int) -> tuple[type[TierSpec], dict[str, Any]]:
    if "\0" in text or len(text) > PATH_CHARS_MAX:
        raise ConfigError(
            f"kvpipe: tier {at} is longer than {PATH_CHARS_MAX} characters or has a zero byte; write {_EXAMPLES}"
        )
    text = os.path.expanduser(text)  # noqa: PTH111  (of any text, not of a path)
    if text.startswith("/"):
        path, mark, query = text.partition("?")
        text = f"file://{quote(os.fsencode(path))}{mark}{query}"
    scheme, mark, _ = text.partition("://")
    if not mark:
        # The text may be a URL without its slashes. Only its scheme is shown, because the rest may be secret.
        almost = re.match("[A-Za-z][A-Za-z0-9+.-]*:", text)
        shown = f"{almost[0]}..." if almost is not None else config_errors.safe_name(text)
        raise ConfigError(f"kvpipe: tier {at}: {shown!r} is neither a URL nor an absolute path; write {_EXAMPLES}")
    schemes = plugins.names(plugins.TIER_URLS)
    if scheme.lower() not in schemes:
        remedy = config_errors.suggest(scheme, schemes, "URLs begin with", lambda one: f"{one}://")
        raise ConfigError(
            f"kvpipe: tier {at}: {config_errors.safe_name(text)!r} has a scheme that no tier has; {remedy}"
        )
    spec = spec_of(plugins.TIER_URLS, scheme.lower())
    where = f"kvpipe: tier {at} ({spec.model_fields['kind'].default}): {config_errors.safe_name(text)!r}"
    url = _split(text)
    if url is None:
        raise ConfigError(f"{where} is not a valid URL; write {_EXAMPLES}, with special characters as %XX")
    try:
        return spec, spec.parse_url(url)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:  # noqa: BLE001  (a bug of the package that registered the kind)
        raise _unread(spec, error) from None


def _split(text: str) -> SplitResult | None:
    try:
        url = urlsplit(text)
        url.port  # noqa: B018  (reading the property parses the port)
        parse_qsl(url.query, strict_parsing=bool(url.query))
    # this error is not chained, because its message would show a part of the text, which may be secret
    except ValueError:
        return None
    return url
