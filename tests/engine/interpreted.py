"""Runs models whose kernels are written in Triton on a CPU, with Triton's interpreter, in a process of its own.

Run `python -m tests.engine.interpreted FAMILY`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

from tests.engine import interpreter

interpreter.start()

import torch  # noqa: E402

from kvpipe.connectors.vllm.tiny.engine import Engine  # noqa: E402
from tests.engine.common import assert_clean, patient, prompt, waiting  # noqa: E402
from tests.engine.costs import cost  # noqa: E402
from tests.rigs.configurations import make_configuration  # noqa: E402


class Family(NamedTuple):
    """A model, vLLM's options, and the number of tokens in a unit."""

    recipe: str
    unit: int
    options: dict[str, Any]


FAMILIES = {
    "deepseek-v4": Family(
        "deepseek-v4",
        256,
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "max_model_len": 2048, "num_gpu_blocks_override": 1200},
    )
}
ANSWER = 12


def _draw(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Fill a weight with values that depend only on the weight's shape.

    Their range is wide enough to make answers differ.
    """
    if not tensor.is_floating_point():
        return
    generator = torch.Generator().manual_seed(sum(tensor.shape))
    drawn = torch.randn(tensor.shape, generator=generator) * 0.12
    tensor.data.copy_((drawn / 10 + 1 if tensor.dim() == 1 else drawn).to(tensor.dtype))


@contextmanager
def _platform() -> Iterator[None]:
    """Draw weights instead of reading files. Let vLLM's platform cache prefixes of MLA, as on a CPU with AMX."""
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def decided(vllm_config: Any) -> None:
        with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
            decide(vllm_config)

    # vLLM 0.32's builder for CPUs lacks two kinds of layers that were added for other models
    plans = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    with (
        patch.object(dummy_loader, "initialize_single_dummy_weight", _draw),
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(decided)),
        patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False),
        patch.object(plans, "build_tile_scheduler", lambda *_: defaultdict(lambda: None)),
    ):
        yield


@contextmanager
def _engine(family: Family, kvpipe: dict[str, Any] | None, **more: Any) -> Iterator[Engine]:
    options = family.options | more
    live = Engine(str(make_configuration(family.recipe)), kvpipe=patient(kvpipe), load_format="dummy", **options)
    try:
        yield live
    finally:
        live.close()


def _loaded(live: Engine) -> int:
    live.settle()
    return assert_clean(live).get("tokens_loaded", 0)


def ladder(family: Family, folder: Path) -> None:
    """Check that answers are the same cold, warm, preempted, in a second turn, from a disk and beside a local hit.

    The number of loaded tokens is also checked.
    """
    unit = family.unit
    first = prompt(3 * unit - 6, 22)
    with _engine(family, None, enable_prefix_caching=False) as plain:
        answer = plain.generate([first], ANSWER)[0]
        turn = first + answer + prompt(20, 23)
        second = plain.generate([turn], ANSWER)[0]
    assert len({*answer, *second}) > ANSWER // 2
    disk = {"kind": "disk", "path": str(folder / "kv"), "bytes_max": "2GiB", "store": "all"}
    config: dict[str, Any] = {"chunk_tokens": unit, "tiers": [disk], "log_level": "warning"}
    with _engine(family, config, enable_prefix_caching=False) as live:
        assert live.generate([first], ANSWER) == [answer]
        assert _loaded(live) == 0
        request = live.add(first, ANSWER)
        while live.scheduler.requests and not live.scheduler.running:
            live.step()
        for _ in range(4):
            live.step()
        live.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert list(live.drain()[request].outputs[0].token_ids) == answer
        assert any(live.preemptions.values())
        # The warm request loaded, and so did the preempted request when it resumed.
        assert _loaded(live) == 2 * 2 * unit
        assert live.generate([turn], ANSWER) == [second]
        assert _loaded(live) == 4 * unit + 3 * unit  # the answer has crossed a boundary
    with _engine(family, config, enable_prefix_caching=True) as live:
        assert live.core.vllm_config.cache_config.enable_prefix_caching
        live.generate([first[: unit + 8]], 1)
        assert _loaded(live) == unit  # loaded from the disk into vLLM's own cache
        assert live.generate([first], ANSWER) == [answer]
        assert _loaded(live) == 2 * unit


def print_cost(family: Family) -> None:
    """Print the bytes that an engine of the family stores, as JSON."""
    with _engine(family, {"chunk_tokens": family.unit, "log_level": "warning"}, enable_prefix_caching=False) as live:
        sys.stdout.write(f"{json.dumps(cost(live.connector.geometry))}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work, _platform(), waiting():
        if sys.argv[2:] == ["--cost"]:
            print_cost(FAMILIES[sys.argv[1]])
        else:
            ladder(FAMILIES[sys.argv[1]], Path(work))
