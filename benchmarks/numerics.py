"""Measures the time of kvpipe's numerics check at an engine's start, and which settings change results (decision 34).

Each setting is measured in a process of its own, because libraries read their environment variables only once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.report import Figure
from kvpipe.connectors.vllm.identity import numerics

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = torch.device("cpu")
THREADS = (1, 2, 5)
ISA, ATEN, FPMATH = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_DEFAULT_FPMATH_MODE"
SWITCHES = (
    f"{ISA}=AVX512_CORE_BF16",
    f"{ISA}=AVX512_CORE",
    f"{ISA}=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    f"{ATEN}=avx2",
    f"{ATEN}=default",
    f"{FPMATH}=BF16",
)
REPEATS = 20
START_MS_MAX = 100.0


def run() -> list[Figure]:
    """Measure a rank's results without a switch, with different numbers of threads, and with each switch."""
    first, *others = _asked(threads=THREADS)
    plain = first["results"]
    out = [
        Figure("numerics measured at an engine's start, processor time", first["processor_ms"], START_MS_MAX, "ms",
               f"waited for: {first['start_ms']:.1f} ms the first time, {first['again_ms']:.1f} ms then"),
        _differing("another process", plain, _asked()[0]["results"], 0),
    ]  # fmt: skip
    out += [_differing(f"{one['threads']} threads", plain, one["results"], 0) for one in others]
    return out + [_differing(switch, plain, _asked(switch)[0]["results"], len(plain)) for switch in SWITCHES]


def _differing(name: str, plain: dict[str, str], found: dict[str, str], limit: int) -> Figure:
    """Return the number of results in `found` that differ from `plain`, the results without a switch."""
    differ = [operation for operation, digest in plain.items() if found[operation] != digest]
    shown = f"of {len(plain)}" + (f": {', '.join(differ)}" if differ else "")
    return Figure(f"results that differ: {name}", len(differ), limit, "", shown)


def _asked(switch: str = "", threads: Sequence[int] = THREADS[:1]) -> list[dict[str, Any]]:
    """Return a rank's measurements with each number of threads, in a process with `switch` in its environment."""
    name, _, value = switch.partition("=")
    environment = os.environ | ({name: value} if name else {})
    command = [sys.executable, "-m", "benchmarks.numerics", *map(str, threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _measure(threads: int) -> dict[str, Any]:
    """Return a digest of each operation's result, and the milliseconds of the check at the start with bfloat16."""
    torch.set_num_threads(threads)
    took, begun = [], time.process_time()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        numerics.measured(DEVICE, DTYPES[:1])
        took.append((time.perf_counter() - begin) * 1e3)
    processor_ms = (time.process_time() - begun) * 1e3 / REPEATS
    results = {}
    with torch.inference_mode():
        for dtype in DTYPES:
            for name, compute in numerics._operations(DEVICE, dtype):
                found = numerics._bytes(compute())
                results[f"{name} in {str(dtype).removeprefix('torch.')}"] = hashlib.sha256(found).hexdigest()
    again_ms = sorted(took)[REPEATS // 2]
    return {"threads": threads, "start_ms": took[0], "again_ms": again_ms, "processor_ms": processor_ms,
            "results": results}  # fmt: skip


if __name__ == "__main__":
    for count in sys.argv[1:]:
        print(json.dumps(_measure(int(count))))
