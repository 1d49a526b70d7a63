"""A stage's own stream on a device, and the asking whether its work is done: nothing here ever waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .completions import Signal
from .device import Device
from .device_events import DeviceDone, EventSlots
from .kernels.assemble import read_digest
from .kernels.launches import LIMBS
from .watch import Watch

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """One stage's stream. `run` from any thread, the others on the loop.

    Args:
        device: where the stream is.
        watch: asks for the events.

    Attributes:
        slots: the stage's events.
    """

    def __init__(self, device: Device, watch: Watch) -> None:
        self.device = device
        self.stream: Any = device.stream()
        self.slots = EventSlots(device)
        self._watch = watch

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function``; the device work that it starts goes on this stream."""
        with self.device.on(self.stream):
            return function(*args, **kwargs)

    def record(self, used: object = None) -> DeviceDone:
        """The end of everything given to the stream so far, to be polled; keeps ``used`` alive until then."""
        return self.slots.record(self.stream, used)

    def done(self, used: object = None) -> Signal[None]:
        """The same, to be waited for; asked for to its end, whoever waits."""
        return self._watch.until(self.record(used).poll, (self, used))

    def after(self, launching: Signal[Any], used: object) -> Signal[None]:
        """The end of what is being launched on the stream, by `run` on a worker. Fails as that did, but not before its end:
        what was launched until then is under way. Not even a cancelled waiter lets go of ``used`` earlier.
        """
        whole: Signal[None] = Signal()

        def launched() -> None:
            try:
                done = self.done(used)
            except Exception as error:  # noqa: BLE001 - the device is lost: nothing on it can be asked for any more
                whole.fail(launching.error or error)
                return

            def over() -> None:
                error = launching.error or done.error
                if error is None:
                    whole.set()
                else:
                    whole.fail(error)

            done.subscribe(over)

        launching.subscribe(launched)
        return whole


class HostDigest:
    """Where one digest is added up on the device, and where it comes to on the host. Made within `Lane.run`.

    Memory is allocated on the lane's stream, for what was freed on another may be in use there still.
    """

    def __init__(self, device: Device) -> None:
        self._there = torch.empty(LIMBS, dtype=torch.int64, device=device.device)
        self._here = device.pinned(LIMBS * 8).view(torch.int64)

    def clear(self) -> torch.Tensor:
        """What to add to, set to zero on the current stream."""
        return self._there.zero_()

    def bring(self) -> None:
        """Start copying it to the host, on the current stream."""
        self._here.copy_(self._there, non_blocking=True)

    @property
    def value(self) -> int:
        """The digest, once the copy is done."""
        return read_digest(self._here)


class HostDigests:
    """Digests of a lane, in use and free ones. From any thread; made when more are needed than ever before."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._free: list[HostDigest] = []

    def spare(self) -> HostDigest | None:
        """One that nobody uses, if there is one."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def make(self) -> HostDigest:
        """A new one. Allocates: on a worker."""
        return self._lane.run(HostDigest, self._lane.device)

    def give_back(self, digest: HostDigest) -> None:
        """Only when the device is done with it."""
        self._free.append(digest)
