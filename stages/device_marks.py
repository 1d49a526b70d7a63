"""Where a thread has got to on its GPUs: marks behind what it has launched, to be asked after from anywhere.

A call that launches kernels returns before they run. So the end of a forward pass, or of a loader's call, is not its return but
its mark.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .watch import Poll


class DeviceMarks:
    """Makes marks. From any thread; a mark is behind what the calling thread has launched on its current streams.

    Attributes:
        devices: the GPUs on which marks are made; None: the calling thread's current one.
    """

    def __init__(self) -> None:
        self.devices: tuple[torch.device, ...] | None = None

    def of(self, names: Iterable[str]) -> None:
        """Mark the GPUs among the devices ``names`` (``cuda:1``, ``cpu``), and no others."""
        self.devices = tuple(torch.device(name) for name in sorted(set(names)) if name.split(":")[0] == "cuda")

    def __call__(self) -> Poll | None:
        """Says when the GPUs have done what this thread has launched so far; None: it cannot have launched anything there."""
        if self.devices == () or not torch.cuda.is_initialized():
            return None
        devices = self.devices or (torch.device("cuda", torch.cuda.current_device()),)
        events = [_event(device) for device in devices]
        return lambda: all(event.query() for event in events)


def _event(device: torch.device) -> torch.cuda.Event:
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    return event
