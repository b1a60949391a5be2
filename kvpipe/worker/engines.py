"""Makes the transfer engine that is registered for the type of the device that has the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvpipe.config.settings import Settings
from kvpipe.errors import UnsupportedError
from kvpipe.inputs import plugins
from kvpipe.trace.events import MoverMeasured
from kvpipe.trace.log import warn
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.base import Direction, TransferEngine
from kvpipe.transfer.calibrate import Cost
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.guard import GuardedEngine
from kvpipe.transfer.movers import Mover


class EngineOptions(NamedTuple):
    """The arguments for making a transfer engine."""

    settings: Settings
    cpus: frozenset[int] = frozenset()
    """The cores that vLLM's threads leave free for copies. The set is empty if vLLM's threads use all cores."""
    idle_core: bool = False
    """Whether at least one core that the process may use has no thread of the forward."""
    trace: Recorder = OFF
    """The trace that records the engine's events."""
    fault: Callable[..., object] = warn
    """The function `fault(name, **fields)` is called when an engine of another package raises."""


def make_engine(device: str, options: EngineOptions) -> TransferEngine:
    """Return an engine for caches on a device of torch's type `device`. The engine is not yet attached.

    Raises:
        UnsupportedError: no engine is registered for this type of device.
        ConfigError: the registered engine cannot be used. The message names the engine's package.

    """
    if device not in plugins.names(plugins.TRANSFER_ENGINES):
        msg = (
            f"kvpipe: KV caches on device {device!r} are not supported by this release; "
            "use vLLM's CUDA or CPU build, or install a package with a transfer engine for it"
        )
        raise UnsupportedError(msg)
    plugin = plugins.load(plugins.TRANSFER_ENGINES, device)
    engine: TransferEngine = plugin.make(options)
    plugin.check(engine, TransferEngine)
    return engine if device in plugins.own(plugins.TRANSFER_ENGINES) else GuardedEngine(engine, device, options.fault)


def make_cpu(options: EngineOptions) -> CpuEngine:
    """Return the engine for caches in host memory."""
    threads = options.settings.copy_threads
    return CpuEngine(int(bool(options.cpus) or options.idle_core) if threads is None else threads, options.cpus)


def make_cuda(options: EngineOptions) -> TransferEngine:
    """Return the engine for caches in the memory of an NVIDIA GPU."""
    from kvpipe.transfer.cuda import POLL_US_MIN, CudaEngine  # noqa: PLC0415  (only where there is a GPU)

    def measured(direction: Direction, mover: Mover, cost: Cost) -> None:
        event = MoverMeasured(*options.trace.of("", 0), kind=direction.name.lower(), mover=mover.value)
        event.fixed_us, event.copy_us = round(cost.fixed_us, 1), round(cost.copy_us, 3)
        event.gb_per_s = round(cost.gb_per_s, 1)
        options.trace.put(event)

    settings = options.settings
    mover = None if settings.mover == "auto" else Mover(settings.mover)
    return CudaEngine(
        mover=mover,
        staging_bytes_max=int(settings.staging_bytes_max),
        poll_us_min={"auto": None, "poll": POLL_US_MIN, "block": 0}[settings.completions],
        on_measured=measured,
    )
