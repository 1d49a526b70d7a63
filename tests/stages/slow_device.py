"""A device that stands for a GPU in tests: its memory is the host's, and its work is seen to be done when a test says so."""

from __future__ import annotations

import contextlib

import torch

from syncline.stages.device_landing import LandingStream
from syncline.stages.errors import TransportError


class SlowEvent:
    """An event of a `SlowDevice`."""

    def __init__(self, device):
        self.device, self.until = device, None

    def record(self, stream):
        self.device.recorded += 1
        self.until = self.device.recorded

    def query(self):
        self.device.asked += 1
        return self.until is not None and self.until <= self.device.done


class SlowDevice:
    """Implements `Device` on the CPU: what is launched is done at once, and seen to be done when `done` says so."""

    device = torch.device("cpu")

    def __init__(self, *, free=True):
        self.recorded, self.asked = 0, 0
        self.done = float("inf") if free else 0
        self.registered, self.log, self.read_only, self.refuses = {}, [], [], False

    def stream(self):
        return object()

    def current_stream(self):
        return None

    def on(self, stream):
        return contextlib.nullcontext()

    def event(self):
        return SlowEvent(self)

    def empty(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def is_pinned(self, memory):
        return False

    def register(self, address, nbytes, *, read_only):
        if self.refuses:
            raise TransportError("not this memory")
        assert all(address + nbytes <= a or a + n <= address for a, n in self.registered.items()), "registered twice"
        self.registered[address] = nbytes
        self.log.append(nbytes)
        self.read_only += [nbytes] * read_only

    def unregister(self, address):
        if self.registered.pop(address, None) is None:
            raise TransportError("was not registered")


class SlowLanding(LandingStream):
    """Where landing kernels are launched, on a `SlowDevice`: what `launch` starts is seen to be done when that says so."""

    def __init__(self, device):
        super().__init__(device.device)
        self.slow = device

    def _mark(self, stream):
        event = self.slow.event()
        event.record(stream)
        return event
