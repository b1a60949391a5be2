"""This module reads on which kind of file system a folder is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
_LOCAL: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
_SHARED: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs",
    "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "virtiofs", "wekafs",
})  # fmt: skip


def is_on_this_host(folder: Path, mounts: Path = MOUNTS) -> bool | None:
    """Return whether `folder` is on a file system that only this host can access, or None if this is unknown.

    `mounts` is a file in the format of Linux's `/proc/self/mountinfo`.
    """
    try:
        place, lines = folder.resolve(), mounts.read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return None
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:  # noqa: PLR2004  (the fifth field is the mount point)
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # `>=`, because a later mount hides an earlier mount at the same folder
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return True if kind in _LOCAL else False if kind in _SHARED else None
