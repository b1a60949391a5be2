"""Measures real engines on a node's memory: throughput, first tokens after a restart, and host memory.

Each engine runs in a process of its own, and one engine computes at a time, on the first core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.node_forks import FORKS, forked_ranks
from benchmarks.report import Figure
from kvpipe.node.connect import ask_status
from kvpipe.node.messages import NodeStatus
from kvpipe.node.processes import holder_of

PAIRS: Final = 8
LOADS: Final = {"decode-heavy": (16, 32, 32), "prefill-heavy": (4, 250, 2)}
"""By workload: the number of requests, the tokens of a prompt, and the tokens of an answer."""
SERVING: Final[dict[str, Any]] = {"model": "serving", "num_gpu_blocks_override": 600}
PROMPT_TOKENS: Final = 2048
WARM: Final = 5
RESTARTS: Final = 3
LARGE: Final[dict[str, Any]] = {
    "model": "big-kv", "max_model_len": PROMPT_TOKENS + 64, "max_num_batched_tokens": PROMPT_TOKENS + 64,
    "num_gpu_blocks_override": 200, "enable_prefix_caching": False,
}  # fmt: skip
LATENTS: Final[dict[str, Any]] = LARGE | {"model": "deepseek-mla", "dtype": "bfloat16"}
POOL: Final = "1GiB"


class Remote:
    """An engine in a process of its own."""

    def __init__(self, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
        """Begin to start the engine."""
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=serve, args=(theirs, kvpipe, options))
        self._process.start()
        theirs.close()

    def seconds(self, requests: int, prompt: int, answer: int, seed: int, *, plain: bool = False) -> float:
        """Return the time of `requests` new prompts. If `plain`, the engine serves without its connector."""
        self._pipe.send((requests, prompt, answer, seed, plain))
        took, self.loaded, self.cpu_s = self._pipe.recv()
        return float(took)

    def first_token(self) -> float:
        """Return the time to the first token of the prompt that all engines share."""
        return self.seconds(1, PROMPT_TOKENS, 1, 1)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def private_bytes(self) -> int:
        """The number of bytes that are private to the engine's processes."""
        return sum(map(_anonymous, _group_of(self._pid)))

    def kill(self) -> None:
        """Kill the engine's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()  # needed if the process has not become the leader of its group yet
        self._process.join()
        self._pipe.close()


def serve(pipe: Connection, kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Serve until the other end of `pipe` is closed."""
    os.setsid()  # the leader of a group with its ranks
    from benchmarks.fresh import without_connector
    from benchmarks.warm import bind_cores
    from benchmarks.warm import prompt as make_prompt
    from kvpipe.connectors.vllm.tiny.engine import Engine
    from kvpipe.connectors.vllm.tiny.models import make_model

    if options.get("tensor_parallel_size", 1) > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each rank
    else:
        bind_cores()
    with forked_ranks():
        engine = Engine(str(make_model(options.pop("model"))), kvpipe=kvpipe, **options)
    while True:
        try:
            requests, tokens, answer, seed, plain = pipe.recv()
        except EOFError:
            return
        prompts = [make_prompt(tokens, seed + i) for i in range(requests)]
        with without_connector(engine) if plain else contextlib.nullcontext():
            began, cpu_s = time.perf_counter(), time.process_time()
            engine.generate(prompts, answer)
            took, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        if kvpipe is not None:
            engine.settle()
        loaded = engine.connector.stats().get("tokens_loaded", 0) if kvpipe is not None else 0
        pipe.send((took, loaded, cpu_s))


def _anonymous(pid: int) -> int:
    """Return the number of a process's private bytes, without pages of the node's memory."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _group_of(leader: int) -> list[int]:
    """Return the processes of a process group."""
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [int(path.name)] if os.getpgid(int(path.name)) == leader else []
    return found


def _memory_of(folder: Path) -> int:
    """Return the allocated bytes of the folder's memory, as soon as all slots have memory."""
    while any(one.slots["unready"] for one in _status(folder).memories):
        time.sleep(0.05)
    holder = holder_of(folder)
    for path in Path(f"/proc/{holder}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:" in str(path.readlink()):
                return path.stat().st_blocks * 512
    message = f"process {holder} has no memory"
    raise AssertionError(message)


@contextmanager
def _node() -> Iterator[tuple[Path, dict[str, Any], Callable[..., Remote]]]:
    """Yield a folder, the configuration of engines on the folder's memory, and a function that starts an engine."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as opened:
        folder = Path(made) / "node"
        config = {"pool": "node", "pool_dir": str(folder), "keep_s": 5, "pool_bytes_max": POOL}

        def end_holder() -> None:
            if holder := holder_of(folder):
                os.kill(holder, signal.SIGKILL)

        def start(kvpipe: dict[str, Any] | None, options: dict[str, Any]) -> Remote:
            remote = Remote(kvpipe, dict(options))
            opened.callback(remote.kill)
            return remote

        opened.callback(end_holder)
        yield folder, config, start


def run() -> list[Figure]:
    """Return all figures of real engines."""
    return [*_throughput(), *_restarts(), *_latents()]


def _throughput() -> list[Figure]:
    """Measure throughput of prompts that hit no chunk.

    Two equal engines differ by more than the limit. So each engine is compared with itself without its connector, and
    the figure compares the two engines' ratios. On a busy machine only the ratio of the CPU times has a meaning. The
    engine's CPU time includes its copies, and the CPU time of a node's engine includes the holder.
    """
    with _node() as (folder, config, start):
        engines = {"node": start(config, SERVING), "private": start({"pool_bytes_max": POOL}, SERVING)}
        seconds: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
        seed = 1000
        for pair in range(-1, PAIRS):  # the first pair warms up
            for load, sizes in LOADS.items():
                for name in (*engines,) if pair % 2 else reversed(engines):
                    for plain in (False, True) if pair % 2 else (True, False):
                        before_s = _holder_cpu_s(folder)
                        took = engines[name].seconds(*sizes, seed, plain=plain)
                        holder_s = _holder_cpu_s(folder) - before_s if name == "node" and not plain else 0.0
                        seed += sizes[0]
                        if pair >= 0:
                            times = took, engines[name].cpu_s + holder_s
                            seconds.setdefault((load, name, plain), []).append(times)
    return [
        _kept(seconds, load, what, kind) for load in LOADS for kind, what in enumerate(("", ", by CPU time"))
    ]  # fmt: skip


def _kept(seconds: dict[tuple[str, str, bool], list[tuple[float, float]]], load: str, what: str, kind: int) -> Figure:
    """Return the share of throughput that a node's engine keeps, against an engine with a private pool."""
    kept = {
        name: median(
            a[kind] / b[kind] for a, b in zip(seconds[load, name, True], seconds[load, name, False], strict=True)
        )
        for name in ("node", "private")
    }
    both = f"{kept['node']:.3f} of no connector, private {kept['private']:.3f}"
    name = f"throughput with nothing to reuse, {load}{what}"
    return Figure(name, kept["node"] / kept["private"], 0.99, "x private", both, at_least=True)


def _holder_cpu_s(folder: Path) -> float:
    """Return the CPU time of the folder's holder, or 0 if the first engine has not started the holder yet."""
    if not (holder := holder_of(folder)):
        return 0.0
    times = Path(f"/proc/{holder}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _restarts() -> list[Figure]:
    """Measure the host memory of two engines that share a prompt, and each engine's first token after it was killed."""
    with _node() as (folder, config, start):
        plain = start(None, LARGE)
        unused = _after_two(plain)
        plain.kill()
        engines = [start(config, LARGE)]
        own = [_after_two(engines[0]) - unused]
        shared = [_memory_of(folder)]
        engines.append(start(config, LARGE))
        own.append(_after_two(engines[1]) - unused)
        shared.append(_memory_of(folder))
        warm, again = list[float](), list[float]()
        for number in range(RESTARTS):
            one = number % 2
            warm.append(median(engines[one].first_token() for _ in range(WARM)))
            engines[one].kill()
            engines[one] = start(config | ({"prefault": "start"} if number == RESTARTS - 1 else {}), LARGE)
            engines[one].seconds(1, 64, 2, 99)
            again.append(engines[one].first_token())
            assert engines[one].loaded >= PROMPT_TOKENS - 256, engines[one].loaded
        published = _published(folder)
    ratios = [after / before for after, before in zip(again, warm, strict=True)]
    both = (
        f"{median(again[:-1]) * 1e3:.0f} ms, before {median(warm[:-1]) * 1e3:.0f} ms; with prefault: start "
        f"{ratios[-1]:.2f} x"
    )
    name = f"first token of {PROMPT_TOKENS} tokens after an engine's restart, against warm before"
    return [
        _memory("two replicas with one prefix", shared, own, published),
        Figure(name, median(ratios[:-1]), 1.1, "x", both),
    ]


def _after_two(engine: Remote, *, plain: bool = True) -> int:
    """Return an engine's private memory after one own prompt and two requests with the shared prompt.

    If `plain`, the engine has computed the prompt without its connector, so that the prompt is not saved.
    """
    engine.seconds(1, PROMPT_TOKENS, 1, 1 if plain else 2, plain=plain)
    engine.first_token()
    engine.first_token()
    return engine.private_bytes


def _published(folder: Path) -> int:
    """Return the bytes of all chunks in the memory."""
    return sum(one.slots["published"] * one.slot_bytes for one in _status(folder).memories)


def _status(folder: Path) -> NodeStatus:
    """Return how the folder's memory is used."""
    while (status := ask_status(folder)) is None:
        time.sleep(0.05)
    return status


def _memory(what: str, shared: list[int], own: list[int], published: int) -> Figure:
    """Return the host memory of several engines, relative to the host memory of one engine.

    Host memory is the node's memory plus the private memory that engines need only because of kvpipe. `own` has this
    private memory of each engine. `shared` has the bytes of the node's memory: with one engine, and with all engines.
    """
    one, most = shared[0] + own[0], shared[1] + sum(own)
    both = (
        f"{most >> 20} MiB, one {one >> 20} MiB; beside the node's memory {', '.join(f'{n >> 20}' for n in own)} MiB; "
        f"chunks {published >> 20} MiB"
    )
    return Figure(f"host memory, {what}, against one engine", most / one, 1.05, "x", both)


def _latents() -> list[Figure]:
    """Measure the host memory of latents on two ranks against one rank."""
    own, shared, chunks = list[int](), list[int](), list[int]()
    for ranks in (1, 2):
        options = LATENTS | {"tensor_parallel_size": ranks}
        with _node() as (folder, config, start):
            unused = _after_two(start(None, options), plain=False)
            own.append(_after_two(start(config, options), plain=False) - unused)
            shared.append(_memory_of(folder))
            chunks.append(_published(folder))
    return [_memory("MLA on two ranks", [shared[0], shared[1]], [own[0], own[1] - own[0]], max(chunks))]
