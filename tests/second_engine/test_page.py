"""The page for authors of other engines' adapters describes the code's behaviour.

The code on the page needs no vLLM.
"""

from __future__ import annotations

import subprocess
import sys

from tests.second_engine.page import PAGE, fill

_RUN = """
import sys
from tests.second_engine.adapter import KVPipe
from tests.second_engine.engine import Engine
from tests.second_engine.model import Transformer

engine = Engine(Transformer(), ranks=2, prefix_cache=False)
kvpipe = KVPipe(engine, chunk_tokens=8, pool_bytes_max="1MiB", tiers=sys.argv[1])
for name in ("first", "again"):
    engine.add(name, range(30))
    engine.run()
kvpipe.shutdown()
assert kvpipe.scheduler.counters["tokens_loaded"] == 28
found = [name for name in sys.modules if name.split(".")[0] == "vllm" or name.startswith("kvpipe.connectors")]
assert not found, found
"""


def test_the_page_is_fresh() -> None:
    """The page's excerpts and tables equal the code."""
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text) == text, "python -m tests.second_engine.page"


def test_no_vllm_is_imported(tmp_path: object) -> None:
    """In a process of its own the engine loads KV, also from a tier. The process imports no module of vLLM."""
    done = subprocess.run([sys.executable, "-c", _RUN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
