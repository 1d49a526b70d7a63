"""Work on a device as completions: events that are used again, each use under a number of its own.

An event remembers only its last record. So it is recorded again only when its use before was seen to be done, and a completion
knows which use it belongs to: asked about a slot that has gone on, it never takes another use's end for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .device import Device, Event
from .errors import TransportError


class _Slot:
    __slots__ = ("event", "generation")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.generation = 0


class DeviceDone:
    """A polled completion: everything that a stream had been given when `EventSlots.record` was called.

    It keeps ``used`` alive until then: what a stream still reads or writes belongs to it, not to the allocator.
    """

    __slots__ = ("_generation", "_slot", "_slots", "_used")

    def __init__(self, slots: EventSlots, slot: _Slot, used: object) -> None:
        self._slots = slots
        self._slot: _Slot | None = slot
        self._generation = slot.generation
        self._used = used

    @property
    def generation(self) -> int:
        """Which use of its slot this is."""
        return self._generation

    def poll(self) -> bool:
        slot = self._slot
        if slot is None:
            return True
        if slot.generation != self._generation:
            raise TransportError(
                f"an event was recorded again (use {slot.generation}) while its use {self._generation} was under way"
            )
        if not slot.event.query():
            return False
        self._slot = self._used = None
        self._slots.give_back(slot)
        return True

    def subscribe(self, callback: Callable[[], None]) -> bool:
        return False


class EventSlots:
    """Events of a device. Used on one thread at a time; a slot comes back when its use was seen to be done.

    Attributes:
        made: events that exist: as many as were ever in use at once.
        in_use: of these, the ones whose use has not been seen to be done.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[_Slot] = []
        self.made = 0
        self.in_use = 0

    def record(self, stream: Any, used: object = None) -> DeviceDone:
        """Remember the end of what ``stream`` has been given. ``used`` is kept alive until the device has got there."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = _Slot(self._device.event())
            self.made += 1
        slot.generation += 1
        slot.event.record(stream)
        self.in_use += 1
        return DeviceDone(self, slot, used)

    def give_back(self, slot: _Slot) -> None:
        """`DeviceDone.poll`: its use is over."""
        self.in_use -= 1
        self._free.append(slot)
