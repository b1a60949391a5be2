"""Plug-ins are tiers, eviction policies and transfer engines of other packages. An entry point registers each plug-in.

A user writes the name of an entry point in the configuration. Only the configured plug-ins are imported, so a broken
package affects only engines that use the package. kvpipe registers its own tiers, policies and transfer engines in the
same way, in pyproject.toml.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvpipe.errors import ConfigError, UsageError

TIERS: Final = "kvpipe.tiers"
"""The group of tiers. An entry point's name is the tier's `kind`, and its object is a subclass of `TierSpec`."""
TIER_URLS: Final = "kvpipe.tier_urls"
"""The group of tiers' URLs. An entry point's name is the URL's scheme, and its object is a subclass of `TierSpec`."""
POLICIES: Final = "kvpipe.policies"
"""The group of eviction policies. An entry point's name is the `policy`. Its object creates a `Policy` for n slots."""
TRANSFER_ENGINES: Final = "kvpipe.transfer_engines"
"""The group of transfer engines. An entry point's name is a torch device type.

The entry point's object creates a `TransferEngine` from `EngineOptions`.
"""

_WHAT: Final = {
    TIERS: "kind of tier", TIER_URLS: "URL of a tier", POLICIES: "eviction policy", TRANSFER_ENGINES: "transfer engine",
}  # fmt: skip
_SOURCE: Final = Path(__file__).parents[2] / "pyproject.toml"
_OWN: Final = "kvpipe"


class Plugin(NamedTuple):
    """A registered entry point. `package` is the package's name and version. `made_of` is the imported object."""

    group: str
    name: str
    package: str
    made_of: Any

    def __str__(self) -> str:
        """Name the plug-in for an error message."""
        return f"the {_WHAT[self.group]} {self.name!r} of package {self.package}"

    def make(self, *arguments: object) -> Any:  # noqa: ANN401
        """Call the imported object with `arguments` and return the result. Raises `ConfigError` if the call raises."""
        try:
            return self.made_of(*arguments)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            why = _reason(error)
            raise ConfigError(f"kvpipe: {self} cannot be made ({why}); update the package, or uninstall it") from error

    def check(self, made: object, protocol: type) -> None:
        """Raise `ConfigError` if `made` lacks a method or an attribute of `protocol`."""
        if missing := lacking_members(made, protocol):
            where = f"{protocol.__module__}.{protocol.__name__}"
            msg = f"kvpipe: {self} has no {', '.join(missing)}; {where} lists what is needed"
            raise ConfigError(msg)


def _reason(error: BaseException) -> str:
    from kvpipe.inputs import config_errors  # noqa: PLC0415  (pydantic: a node's holder does without)

    return config_errors.pydantic_reason(f"{type(error).__name__}: {error}")


def names(group: str) -> list[str]:
    """Return the names that are registered in a group, kvpipe's own names first. No plug-in is imported."""
    return list(_registered(group))


def load(group: str, name: str) -> Plugin:
    """Import the plug-in that is registered in `group` under `name`.

    Raises:
        KeyError: no plug-in is registered under `name`.
        ConfigError: the plug-in cannot be imported, or several packages have registered the name.

    """
    first, *others = _registered(group)[name]
    if others:
        packages = ", ".join(sorted({_package(one) for one in (first, *others)}))
        msg = f"kvpipe: several packages register the {_WHAT[group]} {name!r} ({packages}); uninstall all but one"
        raise ConfigError(msg)
    try:
        made_of = first.load()
    except (Exception, SystemExit) as error:  # importing the package may raise anything
        why = _reason(error)
        made = Plugin(group, name, _package(first), None)
        msg = f"kvpipe: {made} cannot be imported ({why}); update the package, or uninstall it"
        raise ConfigError(msg) from error
    return Plugin(group, name, _package(first), made_of)


def lacking_members(made: object, protocol: type) -> list[str]:
    """Return the methods and attributes of `protocol` that `made` lacks. `made` is an object or a class."""
    methods = [
        name
        for name, one in vars(protocol).items()
        if inspect.isfunction(one) and (not name.startswith("_") or name == "__len__")
    ]
    out = [f"{name}()" for name in methods if not callable(getattr(made, name, None))]
    if not isinstance(made, type):  # checked only for an object, because a class may set the attributes in `__init__`
        out += [name for name in protocol.__annotations__ if not hasattr(made, name)]
    return out


def own(group: str) -> list[str]:
    """Return the names that kvpipe itself registers in a group."""
    return [one.name for one in _own(group)]


@cache
def _registered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    out: dict[str, tuple[EntryPoint, ...]] = {}
    for one in (*_own(group), *(one for one in entry_points(group=group) if _distribution(one) != _OWN)):
        out[one.name] = (*out.get(one.name, ()), one)
    return out


def _own(group: str) -> Iterable[EntryPoint]:
    """Return kvpipe's own entry points. In a source tree, read pyproject.toml: installed metadata may be outdated."""
    project = _project()
    if project.get("name") == _OWN:
        return _of(group, project["entry-points"])
    return [one for one in entry_points(group=group) if _distribution(one) == _OWN]


@cache
def _project() -> dict[str, Any]:
    """Return the project's table in pyproject.toml. Without a source tree, the table is empty."""
    try:
        found: dict[str, Any] = tomllib.loads(_SOURCE.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def _of(group: str, table: dict[str, dict[str, str]]) -> Iterator[EntryPoint]:
    for name, value in table.get(group, {}).items():
        yield EntryPoint(name, value, group)


def _distribution(one: EntryPoint) -> str:
    return _name(one).lower() if one.dist is not None else _OWN


def _package(one: EntryPoint) -> str:
    return f"{_name(one) or 'without a name'} {_metadata(one, 'Version')}".rstrip() if one.dist is not None else _OWN


def _name(one: EntryPoint) -> str:
    return _metadata(one, "Name")


def _metadata(one: EntryPoint, key: str) -> str:
    """Return a field of the metadata of the entry point's package, or "" if the package has no such field.

    The metadata are missing if a package was uninstalled and only its entry points are left.
    """
    return (one.dist.metadata[key] if one.dist is not None and key in one.dist.metadata else None) or ""
