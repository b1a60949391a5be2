"""`python -m benchmarks.gpu.engine`: the engine scenarios and the time to first token on a real vLLM with CUDA.

No network is needed, because models are created locally and engines run in this process. With ``--device cpu``, the
same scenarios run on vLLM's CPU build. Such a run tests the scenarios, but says nothing about speed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.gpu.engine_live import Setup

CPU_BLOCK, CUDA_BLOCK = 32, 16
GRACE_S: Final = 100  # a run is killed this many seconds after its budget; a section may still end
CAPTURED: Final = [1, 2, 4, 8, 16, 32]  # batch sizes that graphs are captured for; vLLM drops sizes above max_num_seqs
GRAPHS: Final = ("default", "full", "none")
SHAPE_NAMES: Final = ("tiny", "mid", "big")
CASE_NAMES: Final = ("auto-sync", "auto-async", "layerwise-sync", "layerwise-async", "step-sync", "step-async")
MOVER_CASES: Final = ("auto-sync-dma", "auto-sync-staged", "auto-sync-direct")
"""A case for each mover. The riskiest mover comes last, because after an illegal access all later cases fail."""
MODE_NAMES: Final = ("no connector", "auto", "layerwise", "step")
# These variables avoid the network, a second process, and kernels that need a (perhaps missing) compiler.
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.engine", description=__doc__)
    parser.add_argument("--attn", default="TRITON_ATTN", help="attention backend on CUDA (TRITON_ATTN, FLASH_ATTN)")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="vLLM's model runner; its own default: v2")
    parser.add_argument(
        "--graphs",
        choices=GRAPHS,
        default="default",
        help="default: vLLM's, FULL_AND_PIECEWISE; full: FULL_DECODE_ONLY, without torch.compile; none: eager",
    )
    parser.add_argument(
        "--breakable", action="store_true", help="with --graphs default: graphs with breaks, without torch.compile"
    )
    parser.add_argument("--shapes", type=_names(SHAPE_NAMES), default=SHAPE_NAMES, help="of tiny,mid,big")
    parser.add_argument(
        "--cases",
        type=_names(CASE_NAMES + MOVER_CASES),
        default=CASE_NAMES,
        help="of " + ",".join(CASE_NAMES + MOVER_CASES),
    )
    parser.add_argument("--modes", type=_names(MODE_NAMES), default=MODE_NAMES, help="of " + ",".join(MODE_NAMES))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the tiny model")
    parser.add_argument("--seconds-max", type=float, default=480, help="later sections are skipped then")
    parser.add_argument("--json", type=Path, help="write the results here, after every section")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser.parse_args(argv)


def _names(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(known)}")
        return names

    return parse


def set_environment(args: argparse.Namespace) -> None:
    """Set the environment variables that torch and vLLM read when they are imported."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1" if args.breakable else "0"


def make_setup(args: argparse.Namespace, *, cuda: bool) -> Setup:
    """Return the settings that all engines of the run have in common."""
    from benchmarks.gpu.engine_live import Setup

    if not cuda:
        return Setup(cuda=False, block=CPU_BLOCK, options={})
    options: dict[str, Any] = {"attention_config": {"backend": args.attn}, "gpu_memory_utilization": 0.1}
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURED}
    if args.graphs == "full":
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    elif args.graphs == "default":
        graphs |= {"cudagraph_mode": "FULL_AND_PIECEWISE"} | ({"mode": 0} if args.breakable else {})
    if args.graphs != "none":
        options |= {"enforce_eager": False, "compilation_config": graphs}
    return Setup(cuda=True, block=CUDA_BLOCK, options=options)


def dtypes_of(args: argparse.Namespace, *, cuda: bool) -> list[str]:
    """Return the data types for the tiny model, in the order in which they are tried."""
    if args.dtype != "auto":
        return [args.dtype]
    if not cuda:
        return ["float32"]
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        takes = AttentionBackendEnum[args.attn].get_class().supports_dtype(torch.float32)
    except Exception:  # noqa: BLE001  (an engine with this backend reports why it fails)
        takes = True
    return ["float32", "bfloat16"] if takes else ["bfloat16"]


def run(args: argparse.Namespace, home: Path) -> int:
    """Run all sections. Returns 0, 1 if a section failed, or 2 if `--device cuda` finds no device."""
    begin = time.monotonic()
    import torch

    cuda = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA device", file=sys.stderr)
        return 2
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2" and cuda))  # read when vLLM is imported
    from benchmarks.gpu import engine_correctness as correctness
    from benchmarks.gpu import engine_speed as speed
    from benchmarks.gpu.engine_models import write_model
    from benchmarks.gpu.engine_report import Ledger, described

    asked = args.graphs if cuda else "none"
    reported = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    head: dict[str, Any] = {
        "machine": described(args.commit),
        "arguments": reported,
        "device": "cuda" if cuda else "cpu",
    }
    ledger, setup = Ledger(args.seconds_max, args.json, head, begin), make_setup(args, cuda=cuda)
    if args.graphs != asked:
        ledger.skip(f"CUDA graphs ({args.graphs})", "needs CUDA")
    if args.runner == "v2" and not cuda:
        ledger.skip("model runner V2", "needs CUDA")
    for name in args.shapes:
        if name != "tiny" and not cuda:
            ledger.skip(name, "needs CUDA: the shape is too large for a CPU")
            continue
        model = str(write_model(name, home))
        if name == "tiny":
            cases = [case for case in correctness.CASES if case.name in args.cases]
            correctness.Correctness(ledger, setup, model, asked).run(cases, dtypes_of(args, cuda=cuda))
        speed.run(ledger, setup, model, name, [mode for mode in MODE_NAMES if mode in args.modes])
    ledger.write(complete=True)
    where = head["machine"].get("gpu") or head["machine"].get("cpu")
    ledger.show(f"kvpipe in vLLM {head['machine']['vllm']} on {where}, {ledger.spent_s:.0f} s")
    return int(ledger.failed)


def main() -> int:
    """Run the scenarios from the command line, and return the exit status."""
    args = arguments()
    set_environment(args)
    faulthandler.dump_traceback_later(args.seconds_max + GRACE_S, exit=True)
    with tempfile.TemporaryDirectory(prefix="kvpipe-engine-") as home:
        code = run(args, Path(home))
    faulthandler.cancel_dump_traceback_later()
    return code


if __name__ == "__main__":
    sys.exit(main())
