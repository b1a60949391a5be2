"""A holder imports numpy when engines need slots of a second size. Its clock advances during the import."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpipe.node import messages
from kvpipe.node.connect import Reached, greet, reach
from kvpipe.node.holder import Holder
from kvpipe.node.layout import BEAT, OWNED
from kvpipe.node.messages import BatchAnswer, Hello, Publish, SlotBatch, SlotGrant, Welcome
from kvpipe.node.processes import checked_folder, holder_of
from kvpipe.node.segment import Segment
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.node.test_holder import Caller, _hello
from tests.rigs.node_engine import SLOT_BYTES

HOLDER = """
import sys, time
from pathlib import Path
from kvpipe.node.holder import Holder

class SlowDisk:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            Path(sys.argv[1], "reads").touch()
            while not Path(sys.argv[1], "go").exists():
                time.sleep(0.01)
            if Path(sys.argv[1], "go").read_text():
                raise ImportError("a file of numpy is broken")

sys.meta_path.insert(0, SlowDisk())
Holder(Path(sys.argv[1]), adopt_s=0, keep_s=60, fd=int(sys.argv[2]) if sys.argv[2:] else None).run()
"""


@contextmanager
def _holding(folder: Path, *fds: int) -> Iterator[None]:
    """Run a holder whose import of numpy begins by making the file `reads`, and lasts until the file `go` exists.

    If `go` is not empty, the import fails.
    """
    command = [sys.executable, "-c", HOLDER, str(folder), *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds) as process:
        try:
            assert eventually(lambda: holder_of(folder) == process.pid and (folder / "holder.sock").exists())
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return checked_folder(short_path / "node")


def _attached(folder: Path, hello: Hello, fd: int | None = None) -> Reached:
    return reach(folder, hello, offer=fd, wait_s=WAIT_S, answer_s=WAIT_S)


def _advances(reached: Reached) -> bool:
    """Return whether the holder's clock advances several times."""
    words = Segment(reached.fd, whole=False).words
    began = int(words[BEAT])
    return eventually(lambda: int(words[BEAT]) > began + 3)


@pytest.mark.parametrize("broken", ["", "broken"])
def test_engine_with_a_second_slot_size_waits_for_numpy(folder: Path, broken: str) -> None:
    """The first engine uses the holder meanwhile. If the import fails, the second engine learns the reason."""
    with _holding(folder):
        first = _attached(folder, _hello())
        assert not (folder / "reads").exists()
        second = _hello(2, slot_bytes=2 * SLOT_BYTES)
        assert "numpy is being imported" in str(greet(folder, second, None, WAIT_S))
        assert eventually((folder / "reads").exists)
        assert _advances(first)
        (folder / "go").write_text(broken)
        if broken:
            assert eventually(lambda: "numpy is broken" in str(greet(folder, second, None, WAIT_S)), every_s=0.01)
        else:
            reached = _attached(folder, second)
            assert reached.welcome.region == 1
            reached.close()
        first.close()


@pytest.mark.parametrize("broken", ["", "broken"])
def test_holder_of_two_slot_sizes_moves_no_memory_before_numpy_is_there(folder: Path, broken: str) -> None:
    """The memory of an earlier holder has both sizes. An engine lacks slots, which it gets after the import."""
    earlier = Holder(folder, adopt_s=0, keep_s=600)
    hello, fd = _hello(), None
    for hello in (_hello(2), _hello(1, slot_bytes=2 * SLOT_BYTES)):
        answer, fd = Caller(earlier, folder).ask(hello)
        assert isinstance(answer, Welcome)
    assert fd is not None
    segment = earlier._memory.layout.token if earlier._memory is not None else b""
    earlier.close()
    with _holding(folder, fd):
        reached = _attached(folder, _hello(1, slot_bytes=2 * SLOT_BYTES, segment=segment), fd)
        reached.wire.settimeout(WAIT_S)
        words = Segment(reached.fd, region=reached.welcome.region, whole=False).words
        owned, keys, grants = int(words[OWNED]), itertools.count(), tuple[SlotGrant, ...]()

        def saves() -> None:
            nonlocal grants
            saved = tuple(Publish(*grant, 0, b"%032d" % next(keys), 1) for grant in grants)
            messages.send(reached.wire, SlotBatch(reached.welcome.boot, saved, want=8))
            answer, _ = messages.receive_by_engine(reached.wire)
            assert isinstance(answer, BatchAnswer)
            grants = answer.granted

        def lacks_slots() -> bool:
            saves()
            return (folder / "reads").exists()

        def grows() -> bool:
            saves()
            return int(words[OWNED]) > owned

        assert eventually(lacks_slots, every_s=0.01)
        assert _advances(reached)
        assert not grows()
        (folder / "go").write_text(broken)
        if broken:
            assert _advances(reached)
            assert not grows()
        else:
            assert eventually(grows, every_s=0.01)
        reached.close()
    os.close(fd)
