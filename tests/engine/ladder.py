"""One test for every kind of engine: it answers cold, warm, in a second turn, preempted, and restarted with a disk.

`python -m tests.engine.ladder VERSION KIND …` runs the test once per kind. In this process Triton's interpreter runs
vLLM's kernels. The process fails unless the vLLM that it imports has the release VERSION.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_drafter
from kvpipe.worker.side import WorkerSide
from tests.engine.common import assert_clean, engine, preempted, prompt, waiting

ANSWER: Final = 8
AFTER: Final = 2
"""The preemption comes after this number of answer tokens."""
RUNNER_V1: Final = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
RUNNER_V2: Final = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


class Asked(NamedTuple):
    """An answer, and the tokens that the drafter proposed in each step."""

    answer: list[int]
    drafts: list[list[list[int]]]


class Climber:
    """An engine that answers prompts one by one."""

    def __init__(self, live: Engine) -> None:
        """Record the proposals of runner V2's drafter, if there is a drafter."""
        self.live, self._drafts, self._loaded = live, list[list[list[int]]](), 0
        speculator = getattr(runner(live), "speculator", None)
        if speculator is not None:
            propose = speculator.propose

            def proposed(*args: Any, **named: Any) -> Any:
                drafts = propose(*args, **named)
                self._drafts.append(drafts.tolist())
                return drafts

            speculator.propose = proposed

    def ask(self, tokens: Sequence[int]) -> Asked:
        """Return the answer to a prompt."""
        self._drafts.clear()
        (answer,) = self.live.generate([tokens], ANSWER)
        return Asked(answer, list(self._drafts))

    def loaded(self) -> int:
        """Return the number of tokens loaded since the last call.

        Fail if a fault was counted or anything is still held.
        """
        before, self._loaded = self._loaded, assert_clean(self.live).get("tokens_loaded", 0)
        return self._loaded - before

    def spoil(self, layer: int) -> None:
        """Change the first page of one layer in the pool's first chunk."""
        worker, geometry = self.live.worker_connector.worker, self.live.connector.geometry
        assert isinstance(worker, WorkerSide)
        slot = worker.pipeline._engine._pool.slot(0)  # type: ignore[attr-defined]
        begin = geometry.layer_offsets[0][layer]
        page = slot[begin : begin + geometry.groups[0].layers[layer].page_bytes]
        page.view(dtype=torch.float32).add_(1.0)


def runner(live: Engine) -> Any:
    """Return vLLM's model runner in this process."""
    return live.core.model_executor.driver_worker.worker.model_runner


def climb(folder: Path, check: Callable[[Engine], None], **options: Any) -> None:
    """Compare answers and drafts with the answers and drafts of the same kind of engine without kvpipe.

    `check` is called after each engine has answered, and fails for an engine of another kind. The last stage changes
    saved values and requires other answers or drafts, which shows that the comparison can fail.
    """

    @contextmanager
    def climber(kvpipe: dict[str, Any] | None) -> Iterator[Climber]:
        with engine(kvpipe=kvpipe, enable_prefix_caching=False, **options) as live:
            yield Climber(live)
            check(live)

    with climber(None) as plain:
        (group,) = plain.live.scheduler.kv_cache_config.kv_cache_groups
        block = int(group.kv_cache_spec.block_size)
        first = prompt(3 * block - ANSWER // 2, 61)  # the third block ends within the answer
        cold = plain.ask(first)
        turn = first + cold.answer + prompt(block // 2, 62)
        second = plain.ask(turn)
    assert len({*cold.answer, *second.answer}) > ANSWER // 2
    assert bool(second.drafts) == ("speculative_config" in options)
    disk = {"kind": "disk", "path": str(folder / "kv"), "bytes_max": "1GiB", "store": "all"}
    config = {"tiers": [disk], "log_level": "warning"}
    with climber(config) as up:
        geometry = up.live.connector.geometry
        assert geometry.unit_tokens == block
        ahead = geometry.ahead_tokens * block  # hits are one block shorter with a drafter that reads later tokens
        assert up.ask(first) == cold
        assert up.loaded() == 0
        assert up.ask(first) == cold
        assert up.loaded() == 2 * block - ahead
        assert up.ask(turn) == second
        assert up.loaded() == 3 * block - ahead
        assert preempted(up.live, first, ANSWER, AFTER) == cold.answer
        # loaded at the request's start, and again when the request resumed
        assert up.loaded() == 2 * (2 * block - ahead)
    with climber(config) as restarted:
        assert restarted.ask(turn) == second
        assert restarted.loaded() == 3 * block - ahead
        side = restarted.live.connector.scheduler
        assert side is not None
        assert side.tracer.hit_tokens == {"memory": 0, "disk": 3 * block - ahead}
        restarted.spoil(-1)  # with a drafter, layer -1 is the drafter's layer: it changes drafts, not answers
        spoiled = restarted.ask(turn)
        assert spoiled != second
        assert (spoiled.answer == second.answer) == bool(second.drafts)
        restarted.spoil(0)
        assert restarted.ask(turn).answer != second.answer


def climb_kind(kind: str, folder: Path) -> None:
    """Run the test with an engine of a kind: runner-v1, runner-v2 or eagle (with runner V2).

    Runner V2 is vLLM's default if Triton exists, so no option selects it.
    """
    from vllm import envs

    options: dict[str, Any] = {}
    if kind == "eagle":
        drafter = str(make_drafter(kind, folder / "drafter"))
        options["speculative_config"] = {"method": kind, "model": drafter, "num_speculative_tokens": 2}
    envs.disable_envs_cache()  # the previous engine has read and cached the environment
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if kind == "runner-v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

    def check(live: Engine) -> None:
        made = runner(live)
        name = f"{type(made).__module__}.{type(made).__qualname__}"
        assert name == (RUNNER_V1 if kind == "runner-v1" else RUNNER_V2)
        assert kind != "eagle" or type(made.speculator).__name__ == "EagleSpeculator"

    climb(folder, check, **options)


def main(version: str, *kinds: str) -> None:
    """Import vLLM, and run the test with each kind."""
    from tests.engine import binaries, interpreter

    interpreter.start()
    binaries.lend(version)
    import vllm

    assert vllm.__version__.split("+")[0] == version, (vllm.__version__, vllm.__file__)
    with waiting():
        for kind in kinds:
            with tempfile.TemporaryDirectory() as work:
                climb_kind(kind, Path(work))
                print(f"{version} {kind}: climbed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
