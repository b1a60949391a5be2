"""The holder watches the processes of engines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvpipe.node.holder import Holder
from kvpipe.node.layout import Process
from kvpipe.node.messages import Welcome
from kvpipe.node.processes import process_of, watch
from tests.node.test_holder import Caller, _hello, _holding


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return short_path / "node"


@pytest.mark.parametrize("adopts", [False, True])
def test_process_is_watched_later_when_the_holder_had_no_descriptor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, adopts: bool
) -> None:
    """The holder has accepted the process, or has found it in the rows of an earlier holder."""
    fails = [not adopts, adopts]

    def watched(process: Process) -> int | None:
        if fails.pop(0) if fails else False:
            raise OSError(errno.EMFILE, "Too many open files")
        return watch(process)

    monkeypatch.setattr("kvpipe.node.holder.watch", watched)
    with _holding(folder) as holder:
        welcome, fd = Caller(holder, folder).ask(_hello())
        assert isinstance(welcome, Welcome)
        if not adopts:
            holder.step()
            assert process_of(os.getpid()) in holder._watched
    assert fd is not None
    second = Holder(folder, adopt_s=0, keep_s=600, fd=fd)
    assert (process_of(os.getpid()) in second._watched) is not adopts
    second.step()
    assert process_of(os.getpid()) in second._watched
    second.close()
