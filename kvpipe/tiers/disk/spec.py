"""The configuration of a disk tier: a folder on a disk, or on a file system that hosts share. Imports no client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult, unquote

from pydantic import ByteSize, Field, field_validator

from kvpipe import files
from kvpipe.errors import ConfigError
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace.log import warn
from kvpipe.values import LocalPath, Size

if TYPE_CHECKING:
    from kvpipe.tiers.disk.tier import DiskTier


class DiskSpec(TierSpec):
    """A folder on a disk, or on a file system that hosts share."""

    place: ClassVar[tuple[str, ...]] = ("path",)

    kind: Literal["disk"] = "disk"
    path: LocalPath = Field(description="Folder, absolute; made if it is not there. `~` is the home folder.")
    bytes_max: Annotated[Size, Field(gt=0)] = Field(
        ByteSize(100 << 30), description="Room for all files of kvpipe's in the folder, whoever wrote them."
    )
    fsync: bool = Field(
        default=False, description="Wait until a value is on the disk: it outlives a power cut, and writing is slower."
    )
    direct: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Direct I/O, past the page cache: `on`, `off`, or `auto` for on where the file system has it.",
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
            ConfigError: the path is no folder, cannot be written to though it should be, or is on a file system that is
                smaller than `bytes_max`.

        """
        self._check()
        from kvpipe.tiers.disk.tier import DiskTier  # noqa: PLC0415  (only where it is used)

        return DiskTier(self, name, writes=writes)

    def _check(self) -> None:
        where = f"kvpipe: disk tier: path={str(self.path)!r}"
        there = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        if not os.path.isdir(there):  # noqa: PTH112  (asked of a loop of links, Path raises)
            raise ConfigError(f"{where}: {there} is no folder; name another path")
        if self.store == "never":
            return
        if doubt := files.doubts(self.path):  # whoever may write to it may change what is found
            remedy = "give it to the engine's user, with mode 0700, or set encryption_key_file"
            warn("tier_folder_shared", path=str(self.path), why=doubt, remedy=remedy)
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{where}: {there} cannot be written to; name another path, or set store=never")
        stat = os.statvfs(there)
        size = stat.f_frsize * stat.f_blocks
        if self.bytes_max > size:
            raise ConfigError(
                f"kvpipe: disk tier: bytes_max={self.bytes_max} is more than the {size} bytes of the file system of "
                f"{there}; set a smaller bytes_max"
            )
