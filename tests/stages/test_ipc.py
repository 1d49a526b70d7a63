"""Handles, exports, imports and slots: the part of CUDA IPC that is no call of CUDA, over what stands for it."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.stages.completions import Signal
from syncline.stages.errors import TransportError
from syncline.stages.ipc import EventHandle, Exports, Imports, MemoryHandle, Place, Slots

UUID, HANDLE = bytes(range(16)), bytes(range(64))
MEMORY = MemoryHandle(device=UUID, handle=HANDLE, nbytes=4096)


@pytest.mark.parametrize("one", [MEMORY, EventHandle(device=UUID, handle=HANDLE), Place(1, 2, 3)])
def test_handles_survive_the_wire(one):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(one)) == one


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (MemoryHandle, {"device": UUID[:-1], "handle": HANDLE, "nbytes": 1}),
        (MemoryHandle, {"device": UUID, "handle": HANDLE + b"\0", "nbytes": 1}),
        (MemoryHandle, {"device": UUID, "handle": HANDLE, "nbytes": -1}),
        (MemoryHandle, {"device": UUID, "handle": HANDLE, "nbytes": 2**63}),
        (MemoryHandle, {"device": UUID, "handle": HANDLE, "nbytes": 1, "more": 1}),
        (MemoryHandle, {"device": UUID, "handle": HANDLE}),
        (MemoryHandle, {"device": UUID.hex(), "handle": HANDLE, "nbytes": 1}),
        (EventHandle, {"device": UUID, "handle": b""}),
        (Place, [0, 0]),
        (Place, [0, 0, 1, 1]),
        (Place, [-1, 0, 1]),
    ],
)
def test_malformed_handles_are_refused(kind, wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=kind)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_handle_or_refused(data):
    try:
        found = msgspec.msgpack.decode(data, type=MemoryHandle)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert (len(found.device), len(found.handle)) == (16, 64)


@pytest.fixture
def runtime(standins):
    one = standins.SharedMemoryIpc()
    yield one
    one.free()


def test_an_allocation_is_exported_once_whatever_lies_in_it(runtime):
    exports = Exports(runtime)
    first, second = runtime.allocate(5000), runtime.allocate(100)
    places = [exports.place(first[start : start + 100]) for start in range(0, 4900, 100)] + [exports.place(second)]
    assert runtime.log == ["export"] * 2 == ["export"] * len(exports.handles)
    assert [place.start for place in places[:-1]] == list(range(0, 4900, 100))
    assert {place.allocation for place in places[:-1]} == {0}
    assert places[-1] == Place(1, 0, 100)


def test_memory_that_cannot_be_shared_is_refused(runtime):
    with pytest.raises(TransportError, match="not allocated here"):
        Exports(runtime).place(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(TransportError, match="own device only"):
        Exports(runtime).place(torch.empty(10, dtype=torch.uint8, device="meta"))
    assert runtime.log == []


def test_what_was_opened_is_closed_when_nothing_looks_into_it_any_more(runtime):
    exports, ended = Exports(runtime), []
    memory = [runtime.allocate(100), runtime.allocate(100)]
    places = [exports.place(one.fill_(number + 1)) for number, one in enumerate(memory)]
    imports = Imports(runtime, lambda: ended.append(runtime.log.count("close")))
    imports.open(exports.handles)
    views = [imports.view(place)[10:20] for place in places for _ in range(3)]
    assert [int(view[0]) for view in views] == [1, 1, 1, 2, 2, 2]
    assert (imports.opened, imports.closed) == (2, 0)
    imports.close()
    imports.close()
    gc.collect()
    assert (imports.closed, ended) == (0, [])
    with pytest.raises(TransportError, match="closed here"):
        imports.view(places[0])
    del views[:3]
    gc.collect()
    assert (imports.closed, ended) == (1, [])
    assert int(views[0][0]) == 2
    del views
    gc.collect()
    assert (imports.closed, ended) == (2, [2])
    assert runtime.log == ["export", "export", "open", "open", "close", "close"]


def test_what_looks_beyond_is_refused(runtime):
    exports = Exports(runtime)
    exports.place(runtime.allocate(100))
    imports = Imports(runtime)
    imports.open(exports.handles)
    size = exports.handles[0].nbytes
    beyond = [(Place(0, size - 1, 2), "beyond"), (Place(0, 0, size + 1), "beyond")]
    for place, error in [(Place(1, 0, 1), "allocation 1"), *beyond]:
        with pytest.raises(TransportError, match=error):
            imports.view(place)
    assert imports.view(Place(0, size, 0)).numel() == 0


def test_a_handle_that_leads_nowhere_leaves_the_others_to_be_closed(runtime):
    exports, ended = Exports(runtime), []
    exports.place(runtime.allocate(100))
    imports = Imports(runtime, lambda: ended.append(True))
    with pytest.raises(TransportError):
        imports.open([*exports.handles, MEMORY])
    imports.close()
    assert (imports.opened, imports.closed, ended) == (1, 1, [True])


async def test_any_number_of_requests_that_nobody_wants_any_more_are_served_and_given_back():
    slots = Slots(1)
    held = await slots.acquire()
    for _ in range(5000):
        unwanted = slots.acquire()
        unwanted.subscribe(lambda unwanted=unwanted: slots.release(unwanted.result))
    wanted = slots.acquire()
    slots.release(held)
    assert wanted.done
    slots.release(wanted.result)
    assert slots.in_use == 0


async def test_slots_are_waited_for_in_order_and_given_back_once():
    slots = Slots(2)
    first, second, third, fourth = (slots.acquire() for _ in range(4))
    assert [s.done for s in (first, second, third, fourth)] == [True, True, False, False]
    slots.release(second.result)
    assert third.done
    assert not fourth.done
    assert third.result.slot == second.result.slot
    with pytest.raises(ValueError, match="twice"):  # a late release of an earlier use must not free the next one's
        slots.release(second.result)
    assert slots.in_use == 2
    slots.close()
    assert isinstance(fourth.error, TransportError)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4))
@settings(max_examples=100)
def test_no_slot_is_out_twice_and_generations_never_repeat(choices, count):
    async def run():
        slots, out, seen, waiting = Slots(count), [], set(), []
        for choice in choices:
            if choice < 3 or not out:
                waiting.append(slots.acquire())
            else:
                slots.release(out.pop(choice % len(out)))
            while waiting and waiting[0].done:
                use = waiting.pop(0).result
                assert use.generation not in seen
                assert use.slot not in {other.slot for other in out}
                seen.add(use.generation)
                out.append(use)
            assert all(isinstance(signal, Signal) and not signal.done for signal in waiting)
            assert len(out) == slots.in_use
            assert not (waiting and len(out) < count)

    asyncio.run(run())
