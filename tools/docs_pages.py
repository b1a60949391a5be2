"""Makes pages of the site from other sources: the API reference, the benchmarks, a timeline.

`make docs` runs this module before Sphinx. All pages are written to `docs/generated`, which git ignores.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import docs_pictures  # noqa: E402

from benchmarks import pictures  # noqa: E402
from kvpipe.trace.reader import Trace  # noqa: E402
from kvpipe.trace.timeline import spans  # noqa: E402
from kvpipe.trace.timeline_html import write_html  # noqa: E402

OUT: Final = ROOT / "docs" / "generated"
SAMPLE: Final = ROOT / "docs" / "sample-trace.jsonl"
LEFT_OUT: Final = "kvpipe.connectors"
"""The reference has no page for this package: only the engine calls the package, and importing it needs the engine."""


def rooms() -> Iterator[tuple[str, list[str]]]:
    """Yield every package that has a page, and the modules on it, by their dotted names."""
    for folder, _, files in sorted(os.walk(ROOT / "kvpipe", followlinks=True)):
        room = ".".join(Path(folder).relative_to(ROOT).parts)
        if "__init__.py" in files and not room.startswith(LEFT_OUT):
            modules = (file.removesuffix(".py") for file in sorted(files) if file.endswith(".py") and file[0] != "_")
            yield room, [f"{room}.{module}" for module in modules]


def reference(out: Path) -> None:
    """Write a page per package, because with a page per module Sphinx takes four times as long."""
    for room, modules in rooms():
        page = [f"{room}\n{'=' * len(room)}\n", f".. automodule:: {room}\n"]
        for module in modules:
            page += [f"{module}\n{'-' * len(module)}\n", f".. automodule:: {module}\n"]
        (out / f"{room}.rst").write_text("\n".join(page), encoding="utf-8")


def benchmarks(out: Path) -> None:
    """Write the page of all figures in `docs/results`, a picture per file."""
    page = [
        "# Benchmarks\n",
        "Made from `docs/results`, which `make bench` writes. The dashed line is the limit: green figures keep it.\n",
    ]
    for file in sorted((ROOT / "docs" / "results").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "figures" not in found:
            continue
        picture = pictures.beside_limits(file.stem, found["figures"])
        (out / f"{file.stem}.svg").write_text(picture, encoding="utf-8")
        machine = found["machine"]
        page += [
            f"## {file.stem}\n",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}\n",
            f"![{file.stem}: each figure beside its limit]({file.stem}.svg)\n",
        ]
    (out / "benchmarks.md").write_text("\n".join(page), encoding="utf-8")


_TIMELINE: Final = """# A timeline

Ten requests at once in `make demo`, on an engine with too few blocks for them: three are preempted, and one load each
brings their KV back, a layer at a time. The picture is drawn from `docs/sample-trace.jsonl`.

![Requests above, the rank's forwards, loads and saves below](timeline.svg)

```{raw} html
<p><a href="../_static/timeline.html">The page of <code>kvpipe trace timeline</code></a> has zoom and search.</p>
```
"""


def timeline(out: Path) -> None:
    """Draw the sample trace twice: as a page of `kvpipe trace timeline`, and as a picture of the requests' times.

    Raises `ValueError` if a line of the sample cannot be read, because the sample is then older than the code.
    """
    trace = Trace(SAMPLE)
    made = spans(list(trace))
    if trace.unread_summary():
        raise ValueError(f"{SAMPLE}: {trace.unread_summary()}; record it again, as docs/tracing.md describes")
    (out / "static").mkdir()
    write_html(Trace(SAMPLE), out / "static" / "timeline.html")
    lives = [span for span in made.spans if span.kind == "life"]
    begin, end = min(span.begin_ns for span in lives), max(span.end_ns for span in lives)
    (out / "timeline.svg").write_text(docs_pictures.timeline(made, begin, end), encoding="utf-8")
    (out / "timeline.md").write_text(_TIMELINE, encoding="utf-8")


def main() -> None:
    """Make all generated pages again."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    reference(OUT)
    benchmarks(OUT)
    timeline(OUT)


if __name__ == "__main__":
    main()
