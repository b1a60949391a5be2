"""Makes the pictures of `docs/pictures`: `kvpipe top` with a real engine, and the timeline of the sample trace.

`PYTHONPATH=$PWD .venv/bin/python tools/screenshots.py` makes them again. Look at each picture before you commit it.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import anyio
from rich.console import Console

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from kvpipe.cli.screen import screen  # noqa: E402
from kvpipe.cli.seen import EngineList  # noqa: E402
from kvpipe.connectors.vllm.tiny.engine import Engine  # noqa: E402
from kvpipe.connectors.vllm.tiny.models import make_model  # noqa: E402
from kvpipe.inputs.listening import Address  # noqa: E402
from kvpipe.testing.buffers import content  # noqa: E402
from kvpipe.trace.reader import Trace  # noqa: E402
from kvpipe.trace.timeline_html import write_html  # noqa: E402
from tests.rigs.browser import WINDOW, Browser  # noqa: E402

OUT: Final = ROOT / "docs" / "pictures"
TOKEN: Final = "0123456789abcdef" * 2
COLUMNS: Final = 118
TALL: Final = 540
_ASKED_AT: Final = 18
_USERS: Final = ("team-search", "team-support", "nightly-batch")
_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The part of Rich's picture that would load a font from another site. The reader's monospace font is used instead."""


def top() -> None:
    """Make an engine with a disk serve conversations of three users, and meanwhile draw the screen of `kvpipe top`."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(TOKEN, encoding="utf-8")
        keys = {
            "engine_name": "llama-0", "manage": f"unix:{folder}/{{engine}}.sock", "manage_token_file": str(token),
            "pool_bytes_max": "24MiB", "chunk_tokens": 64, "log_level": "error",
            "tiers": [{"kind": "disk", "path": f"{folder}/kv", "bytes_max": "1GiB", "store": "all"}],
        }  # fmt: skip
        engine = Engine(str(make_model("llama")), kvpipe=keys, enable_prefix_caching=False)
        try:
            watch = EngineList([Address(f"{folder}/llama-0.sock", "", 0)], TOKEN)
            pages = [[3 + one for one in content(seed, 640)] for seed in range(12)]
            for number in range(36):
                engine.generate([pages[number % 9]], 8, salt=_USERS[number % 3])
                if number == _ASKED_AT:
                    _beside(engine, watch)
            for number, page in enumerate(pages[6:]):
                engine.add(
                    page + pages[number][: 40 * number], 120, request_id=f"chatcmpl-{number}", salt=_USERS[number % 3]
                )
            for _ in range(40):
                engine.step()
            _beside(engine, watch)
        finally:
            engine.close()
        console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(screen(watch.engines, 10, console))
        picture = console.export_svg(title="kvpipe top", unique_id="top")
        (OUT / "top.svg").write_text(_FONT.sub("", picture), encoding="utf-8")


def _beside(engine: Engine, watch: EngineList) -> None:
    """Query the engine's state while the engine makes steps."""
    thread = threading.Thread(target=anyio.run, args=(_look, watch), daemon=True)
    thread.start()
    while thread.is_alive():
        if engine.busy:
            engine.step()
        thread.join(0.05)


async def _look(watch: EngineList) -> None:
    async with anyio.create_task_group() as group:
        await watch.look(group, 60.0)
        group.cancel_scope.cancel()


def timeline() -> None:
    """Draw the timeline of the sample trace, from the first request's arrival to the last request's end."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder, "timeline.html")
        lives = [
            span for span in write_html(Trace(ROOT / "docs" / "sample-trace.jsonl"), page).spans if span.kind == "life"
        ]
        first_ms, last_ms = (min(one.begin_ns for one in lives) / 1e6, max(one.end_ns for one in lives) / 1e6)
        browser.open(page.as_uri())
        browser.wait_for("return window.firstFrameMs > 0")
        browser.run("window.timeline.zoomTo(arguments[0], arguments[1])", first_ms - 300, last_ms + 300)
        browser.run("window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => window.drawn = 1))")
        browser.wait_for("return window.drawn")
        (OUT / "timeline.png").write_bytes(browser.screenshot(WINDOW[0], TALL))


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    top()
    timeline()
