"""The demonstration: runs the same requests on a real engine with and without kvpipe, and compares the answers."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model
from kvpipe.trace.reader import Trace
from kvpipe.trace.timeline_html import write_html

MODEL = "demo"
BLOCKS = 80  # of 32 tokens each: ten requests at once need more, so some are preempted
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}
PROMPT_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1024, 64, 48
CROWD, CROWD_ANSWER_TOKENS = 10, 160


@dataclass
class ScenarioResult:
    """The result of one scenario on one engine."""

    name: str
    prompt_tokens: int
    ttft_ms: float
    loaded_tokens: int
    preemptions: int
    answers: list[list[int]]


def _prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


class _ScenarioRunner:
    """Runs the scenarios on one engine."""

    def __init__(self, engine: Engine, tick: Callable[[str], None]) -> None:
        self.engine, self.tick, self.rows = engine, tick, list[ScenarioResult]()

    def play(self, name: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Run `prompts` at once, record the scenario's result, and return the answers."""
        self.tick(name)
        engine, loaded = self.engine, self._loaded()
        engine.preemptions.clear()
        begin, first = time.perf_counter(), dict[str, float]()
        ids = [engine.add(p, max_tokens) for p in prompts]
        outputs: dict[str, Any] = {}
        while engine.busy:
            for output in engine.step():
                outputs[output.request_id] = output
            for request in list(engine.scheduler.requests.values()):
                if request.num_output_tokens:
                    first.setdefault(request.request_id, time.perf_counter() - begin)
        answers = [list(outputs[i].outputs[0].token_ids) for i in ids]
        ttft = sum(first.values()) / len(first) if first else time.perf_counter() - begin
        self.rows.append(
            ScenarioResult(
                name,
                sum(map(len, prompts)),
                ttft * 1e3,
                self._loaded() - loaded,
                sum(engine.preemptions.values()),
                answers,
            )
        )
        return answers

    def _loaded(self) -> int:
        connector = self.engine.scheduler.connector
        return int(self.engine.connector.stats().get("tokens_loaded", 0)) if connector is not None else 0

    def all(self) -> list[ScenarioResult]:
        """Run every scenario except the restart, and return the results."""
        self.engine.generate([_prompt(64, 0)], 2)  # warms the engine up; no scenario uses this prompt
        document = _prompt(PROMPT_TOKENS, 1)
        self.play("cold", [document], ANSWER_TOKENS)
        history = document + self.play("warm, same prompt", [document], ANSWER_TOKENS)[0]
        for turn in range(2, 5):
            history += _prompt(TURN_TOKENS, 10 + turn)
            history += self.play(f"conversation, turn {turn}", [history], ANSWER_TOKENS)[0]
        crowd = [_prompt(150 + 20 * i, 100 + i) for i in range(CROWD)]
        self.play(f"{CROWD} requests at once", crowd, CROWD_ANSWER_TOKENS)
        if self.engine.scheduler.connector is not None:
            self.engine.settle()  # waits until all writes to the disk have ended
        return self.rows

    def restarted(self, rows: list[ScenarioResult]) -> None:
        """Send a prompt again that was sent before the restart, and append the result to `rows`."""
        self.engine.generate([_prompt(64, 0)], 2)
        again = _prompt(PROMPT_TOKENS, 1)
        self.play(RESTARTED, [again], ANSWER_TOKENS)
        rows.append(self.rows[-1])


SCENARIOS = 7
RESTARTED = "restarted, from disk"
SECOND = "second engine"
WITHOUT, WITH = "without kvpipe", "with kvpipe"


def _second_engine(model: str, kvpipe: dict[str, Any] | None) -> ScenarioResult:
    """Send the first prompt to an engine that has not seen it. This function runs in a process of its own."""
    engine = Engine(model, kvpipe=kvpipe, **ENGINE)
    engine.generate([_prompt(64, 0)], 2)
    runner = _ScenarioRunner(engine, lambda _: None)
    runner.play(SECOND, [_prompt(PROMPT_TOKENS, 1)], ANSWER_TOKENS)
    engine.close()
    return runner.rows[-1]


def _import_engine() -> None:
    """Import vLLM, which takes seconds."""
    importlib.import_module("vllm")


def _two_engines(
    model: str, folder: Path, results: dict[str, list[ScenarioResult]], tick: Callable[[str], None]
) -> bool:
    """Make one engine save a prompt into the node's memory, and an engine in another process answer the same prompt.

    Returns False and adds no result if the engines cannot share memory here, or if the second process fails.
    """
    shared = {
        "pool": "node", "pool_dir": str(folder), "pool_bytes_max": "256MiB", "keep_s": 1, "pool_or_private": True,
    }  # fmt: skip
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as second:
        imported = second.submit(_import_engine)
        engine = Engine(model, kvpipe=shared, **ENGINE)
        try:
            if engine.connector.settings.pool != "node":
                return False
            engine.generate([_prompt(PROMPT_TOKENS, 1)], ANSWER_TOKENS)
            engine.settle()
            imported.result()
            rows = []
            for config in (None, shared):
                tick(SECOND)
                rows.append(second.submit(_second_engine, model, config).result())
        except Exception:  # noqa: BLE001  (there may be no memory for a second process; the other rows are shown)
            traceback.print_exc()
            return False
        finally:
            engine.close()
    for label, row in zip((WITHOUT, WITH), rows, strict=True):
        results[label].append(row)
    return True


def run_demo(log: Path, json_path: Path | None) -> int:
    """Run both engines and print the table. Returns 1 if any answer differs, else 0."""
    console = Console()
    log.parent.mkdir(parents=True, exist_ok=True)
    trace, page = log.with_name("demo-trace.jsonl"), log.with_name("demo-timeline.html")
    trace.unlink(missing_ok=True)
    disk = log.with_name("demo-disk").absolute()
    shutil.rmtree(disk, ignore_errors=True)
    traced = {
        "pool_bytes_max": "1GiB", "trace_file": str(trace),
        "tiers": [{"kind": "disk", "path": str(disk), "bytes_max": "2GiB"}],
    }  # fmt: skip
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results: dict[str, list[ScenarioResult]] = {}
    with Progress(*columns, console=Console(file=_own_stdout()), transient=True) as progress:
        task = progress.add_task("making a model with random weights", total=2 * (SCENARIOS + 2) + 1)
        with _quiet(log):
            model = str(make_model(MODEL))
            progress.advance(task)
            for label, config in ((WITHOUT, None), (WITH, traced)):

                def tick(what: str, label: str = label) -> None:
                    progress.update(task, description=f"{label}: {what}", advance=1)

                progress.update(task, description=f"{label}: starting vLLM")
                engine = Engine(model, kvpipe=config, **ENGINE)
                results[label] = _ScenarioRunner(engine, tick).all()
                engine.close()
                progress.advance(task)
                tick("restarting vLLM")
                engine = Engine(model, kvpipe=config, **ENGINE)
                _ScenarioRunner(engine, tick).restarted(results[label])
                engine.close()
            progress.update(task, description="starting two engines")
            with tempfile.TemporaryDirectory(prefix="kvpipe-") as folder:
                shares = _two_engines(model, Path(folder), results, tick)
    shutil.rmtree(disk, ignore_errors=True)
    plain, piped = results[WITHOUT], results[WITH]
    same = _print(console, plain, piped)
    if not shares:
        why = "it failed, or memory cannot be shared here; the log has the reason"
        console.print(f"No row '{SECOND}': {why}.", style="dim")
    write_html(Trace(trace), page)
    command = "kvpipe" if shutil.which("kvpipe") else os.path.relpath(Path(sys.executable).with_name("kvpipe"))
    console.print(
        f"What happened to every request: open {page} in a browser, or\n"
        f"  {command} trace show {trace}\n"
        f"The engines' own output is in {log}.",
        style="dim", highlight=False,
    )  # fmt: skip
    if json_path is not None:
        json_path.write_text(json.dumps({k: [asdict(r) for r in v] for k, v in results.items()}, indent=1))
    return 0 if same else 1


def _print(console: Console, plain: list[ScenarioResult], piped: list[ScenarioResult]) -> bool:
    table = Table(
        title="vLLM with and without kvpipe",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.padding = (0, 1, 0, 0)
    table.add_column("scenario", no_wrap=True)
    for heading in ("prompt\ntokens", "tokens\nloaded", "TTFT ms\nwithout", "TTFT ms\nwith", "gain", "pre-\nempted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\nanswers", justify="center", no_wrap=True)
    all_same = True
    for a, b in zip(plain, piped, strict=True):
        same = a.answers == b.answers
        all_same &= same
        table.add_row(
            a.name,
            f"{a.prompt_tokens}",
            f"{b.loaded_tokens}" if b.loaded_tokens else "-",
            f"{a.ttft_ms:.0f}",
            f"{b.ttft_ms:.0f}",
            f"{a.ttft_ms / b.ttft_ms:.1f}x",
            f"{b.preemptions}",
            "[green]yes[/]" if same else "[bold red]NO[/]",
        )
    console.print(table)
    console.print(
        "TTFT: time to first token, mean over the row's requests, without and with\n"
        "kvpipe. Tokens loaded: brought back from host memory or disk, not computed;\n"
        "vLLM's own prefix cache is off here. A preempted request counts each time.\n"
        "The second engine is another process; both engines have pool: node.\n"
        "Each row was run once: times of a busy machine vary.",
        style="dim",
    )
    if not all_same:
        console.print("An answer differs: this is a bug in kvpipe.", style="bold red")
    return all_same


def _own_stdout() -> Any:
    """Return a copy of stdout for the demonstration, because the engines' stdout is redirected while they run."""
    return os.fdopen(os.dup(1), "w")


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to `log`, because engines and their libraries write to them directly."""
    saved = os.dup(1), os.dup(2)
    with log.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(saved[1], 2)
            sys.stderr.write(f"kvpipe: the demo ended early; the engines' own output is in {log}\n")
            raise
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for fd in saved:
                os.close(fd)
