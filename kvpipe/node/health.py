"""Whether a folder's holder answers and, if it does not, the reason, for operators."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kvpipe.errors import ConfigError
from kvpipe.node.connect import ask_status
from kvpipe.node.messages import NodeStatus
from kvpipe.node.processes import SOCKET, holder_of, is_stopped

ANSWER_S_MAX: Final = 2.0


class HolderHealth(NamedTuple):
    """The holder of a folder. `pid` is 0 if the folder has no holder.

    `status` is the holder's answer. If `status` is None, `why` says what is wrong with the holder, and `remedy` says
    what to do.
    """

    pid: int
    status: NodeStatus | None = None
    why: str = ""
    remedy: str = ""


def health_of(folder: Path) -> HolderHealth:
    """Ask the folder's holder how the memory is used. Waits at most `ANSWER_S_MAX` seconds.

    Raises:
        ConfigError: the socket belongs to another user, the holder has another version, or the folder cannot be read.
    """
    status = ask_status(folder, ANSWER_S_MAX)
    if status is not None:
        return HolderHealth(status.pid, status)
    try:
        pid = holder_of(folder)
        has_socket = (folder / SOCKET).exists()
    except OSError as error:
        raise ConfigError(f"kvpipe: the node's folder {folder} cannot be read: {error}") from None
    if not pid:
        return HolderHealth(0, why="no holder runs", remedy="the first engine with pool=node starts one")
    keeps = "engines with the memory start another holder, which keeps every chunk"
    if is_stopped(pid):
        return HolderHealth(pid, None, "it is stopped (SIGSTOP)", f"kill -CONT {pid}, or kill -9 {pid}: {keeps}")
    if not has_socket:
        return HolderHealth(pid, None, "its socket was deleted, so no engine can join", f"kill -9 {pid}: {keeps}")
    return HolderHealth(pid, None, "it does not answer", f"if it stays silent, kill -9 {pid}: {keeps}")
