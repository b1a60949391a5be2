"""A simulated CUDA device that takes no time and copies nothing. All queued work counts as done at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.transfer.device import Launch
from kvpipe.transfer.driver import CopyBatch


class NullEvent:
    """An event that has always fired."""

    def query(self) -> bool:
        """Return True: the event has fired."""
        return True

    def synchronize(self) -> None:
        """Return at once, because the event has fired."""


_FIRED = NullEvent()


class NullStream:
    """A stream that is always empty."""

    def record_event(self) -> NullEvent:
        """Return an event that has fired."""
        return _FIRED

    def wait_event(self, event: NullEvent) -> None:
        """Do nothing, because every event has fired."""

    def synchronize(self) -> None:
        """Return at once, because the stream is empty."""


class NullDevice:
    """Implements `kvpipe.transfer.device.Device`, for measurements of the host's work."""

    def __init__(self) -> None:
        self._stream = NullStream()

    def stream(self, name: str) -> NullStream:  # noqa: ARG002
        """Return the one stream."""
        return self._stream

    def current_stream(self) -> NullStream:
        """Return the one stream."""
        return self._stream

    def enter_thread(self) -> None:
        """Do nothing, because the device has no state per thread."""

    def cpus(self) -> frozenset[int]:
        """Return an empty set: the cores near the device are unknown."""
        return frozenset()

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of an H100."""
        return 9, 0

    def copy(self, stream: NullStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:  # noqa: ARG002
        """Copy nothing."""
        for _ in pairs:
            pass

    def copy_batch(self, stream: NullStream, copies: CopyBatch, *, settled: bool) -> None:
        """Copy nothing."""

    def upload(self, stream: NullStream, array: npt.NDArray[Any]) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor over the array itself, without a copy."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def launch(self, stream: NullStream, launch: Launch) -> None:  # noqa: ARG002
        """Compute the launch's arguments, but launch nothing."""
        _ = launch.arguments, launch.constants, launch.programs

    def allocate(self, size: int) -> torch.Tensor:
        """Return host memory in place of device memory."""
        return torch.empty(size, dtype=torch.uint8)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return host memory, which is not pinned."""
        return torch.empty(size, dtype=torch.uint8)

    def blocking_lag_us(self) -> float:
        """Return a lag in microseconds that is so large that completions are polled."""
        return 1000.0

    def has_kernels(self) -> str:
        """Return "": the device has kernels."""
        return ""

    def reads_pool(self) -> bool:
        """Return True: the device can read the pool."""
        return True

    def register(self, address: int, size: int) -> None:
        """Pin nothing."""

    def unregister(self, address: int) -> None:
        """Unpin nothing."""
