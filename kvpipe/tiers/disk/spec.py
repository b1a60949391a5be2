"""The configuration of a disk tier: a folder on a local disk, or on a file system that several hosts share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal
from urllib.parse import SplitResult, unquote

from pydantic import ByteSize, Field, field_validator

from kvpipe.errors import ConfigError
from kvpipe.inputs import files
from kvpipe.inputs.values import LocalPath, Size, size_text
from kvpipe.machine.mounts import is_on_this_host
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from kvpipe.tiers.disk.tier import DiskTier


_DEFAULT_SHARE: Final = 0.8
"""The largest share of a file system that kvpipe uses by default, because other programs may also need room."""


class DiskSpec(TierSpec):
    """The configuration of a disk tier."""

    place: ClassVar[tuple[str, ...]] = ("path",)
    medium: ClassVar[Literal["disk", "network"]] = "disk"

    kind: Literal["disk"] = "disk"
    path: LocalPath = Field(
        description="Absolute path of the folder. The folder is created if it does not exist. `~` is the home folder."
    )
    bytes_max: Annotated[Size, Field(gt=0)] = Field(
        ByteSize(100 << 30),
        description="Largest total size of kvpipe's files in the folder, whichever engine wrote them. If unset, "
        "at most 80 % of the file system.",
    )
    fsync: bool = Field(
        default=False,
        description="Wait until a value is on the disk. Then the value survives a power cut, and writing is slower.",
    )
    direct: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Direct I/O, which bypasses the page cache: `on`, `off`, or `auto` (on if the file system "
        "supports direct I/O).",
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        try:
            path = path.expanduser()
        except RuntimeError:
            raise ValueError("there is no such home folder; write an absolute path") from None
        if not path.is_absolute():
            raise ValueError("expected an absolute path, such as /var/cache/kvpipe")
        return path

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`."""
        if url.netloc not in {"", "localhost"} or not url.path.startswith("/"):
            raise ValueError("a file URL has three slashes and an absolute path: file:///var/cache/kvpipe")
        if url.fragment:
            raise ValueError("write a # in a path as %23")
        return {"path": unquote(url.path)}

    def make(self, name: str, *, writes: bool = True) -> DiskTier:
        """See `TierSpec.make`.

        Raises:
            ConfigError: `path` is not a folder, or is not writable although values are stored. Or the file system is
                smaller than `bytes_max`.

        """
        self._check()
        from kvpipe.tiers.disk.tier import DiskTier  # noqa: PLC0415  (imported only if a disk tier is configured)

        return DiskTier(self.fitted(), name, writes=writes)

    def fitted(self) -> DiskSpec:
        """Return this configuration. If the user has not set `bytes_max`, lower its default to fit the file system."""
        if "bytes_max" in self.model_fields_set or self.store == "never":
            return self
        size = int(_file_system_bytes(self._there()) * _DEFAULT_SHARE)
        return self if size >= self.bytes_max else self.model_copy(update={"bytes_max": ByteSize(max(1, size))})

    def is_local(self) -> bool | None:
        """See `TierSpec.is_local`. A file system that several hosts may share is not local."""
        return is_on_this_host(self._there())

    def _there(self) -> Path:
        """Return the folder `path`, or its nearest parent that exists."""
        return next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))

    def _check(self) -> None:
        where = f"kvpipe: disk tier: path={str(self.path)!r}"
        there = self._there()
        if not os.path.isdir(there):  # noqa: PTH112  (for a loop of links Path raises)
            raise ConfigError(f"{where}: {there} is not a folder; name another path")
        if self.store == "never":
            return
        if doubt := files.doubts(self.path):  # other users could change values
            remedy = "make the engine's user the folder's owner, with mode 0700, or set encryption_key_file"
            warn("tier_folder_shared", path=str(self.path), why=doubt, remedy=remedy)
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{where}: {there} cannot be written to; name another path, or set store=never")
        size = _file_system_bytes(there)
        if "bytes_max" in self.model_fields_set and self.bytes_max > size:
            raise ConfigError(
                f"kvpipe: disk tier: bytes_max={size_text(self.bytes_max)} is more than the {size_text(size)} of the "
                f"file system of {there}; set a smaller bytes_max"
            )


def _file_system_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_frsize * stat.f_blocks
