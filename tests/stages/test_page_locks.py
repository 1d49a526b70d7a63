"""Page-locking of the host's memory: its cost, and what backs the memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from syncline.stages import device
from syncline.stages.device import CudaDevice, Registrations
from syncline.stages.errors import TransportError
from syncline.stages.mappings import Locking, Mappings
from syncline.stages.page_locks import WORTH_NBYTES, PageLocks


def _slow_device():
    spec = importlib.util.spec_from_file_location("slow_device", Path(__file__).with_name("slow_device.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SlowDevice


SlowDevice = _slow_device()


def counted(name):
    """A comparison of `Address` that is counted."""
    plain = getattr(int, name)

    def compare(self, other):
        Address.compared += 1
        return plain(self, other)

    return compare


class Address(int):
    """An address, and pages made from it, whose comparisons are counted."""

    compared = 0
    __lt__, __le__, __eq__ = counted("__lt__"), counted("__le__"), counted("__eq__")
    __gt__, __ge__ = counted("__gt__"), counted("__ge__")
    __hash__ = int.__hash__

    def __add__(self, other):
        return Address(int(self) + other)

    def __sub__(self, other):
        return Address(int(self) - other)

    def __floordiv__(self, other):
        return Address(int(self) // other)


class Storage:
    """Of a tensor that lies where it is told. It is its own tensor."""

    def __init__(self, address):
        self.address = address

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return self.address

    def nbytes(self):
        return 2 * WORTH_NBYTES


class Device:
    def is_pinned(self, memory):
        return False

    def register(self, address, nbytes, *, read_only):
        pass


@pytest.mark.parametrize("order", [1, -1])
def test_locking_many_storages_takes_a_few_comparisons_each(order):
    count, locks = 2000, PageLocks(Device())
    locks._mappings = Mappings("")
    Address.compared = 0
    for number in range(count)[::order]:
        assert locks.lock(Storage(Address((number + 1) * (4 << 20))))
    assert Address.compared < 8 * count * math.log2(count), "a comparison with every other one would be two million"
    assert not locks.lock(Storage(Address((count // 2) * (4 << 20) + (2 << 20) - 1))), "its first page is another one's last"
    assert locks.lock(Storage(Address((count // 2) * (4 << 20) + (2 << 20))))


def test_memory_that_is_locked_in_part_is_not_taken_for_locked(monkeypatch):
    """A small storage that begins in the last page of a locked one: CUDA may say of its first byte that it is page-locked."""
    device = Device()
    locks = PageLocks(device)
    locks._mappings = Mappings("")
    assert locks.lock(Storage(Address(4 << 20)))
    monkeypatch.setattr(device, "is_pinned", lambda memory: True, raising=False)
    assert not locks.lock(Storage(Address((4 << 20) + 2 * WORTH_NBYTES - 64)))
    assert locks.lock(Storage(Address(8 << 20))), "of another owner"


def mapped(tmp_path, *, shared, writable, file):
    """Memory of a mapping of that kind: (address, bytes, what keeps it)."""
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    nbytes = 2 * WORTH_NBYTES
    fd = -1
    if file:
        path = tmp_path / "weights"
        path.write_bytes(bytes(nbytes))
        fd = os.open(path, os.O_RDWR)
    else:
        flags |= mmap.MAP_ANONYMOUS
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, nbytes, protection, flags, fd, 0)
    if file:
        os.close(fd)
    return address, nbytes


KINDS = [
    ((False, True, False), Locking.PLAIN),
    ((True, True, False), Locking.PLAIN),
    ((True, True, True), Locking.PLAIN),
    ((True, False, True), Locking.READ_ONLY),
    ((False, False, True), Locking.READ_ONLY),
    ((False, True, True), Locking.NOT),
]
"""Shared, writable, of a file; and how it is locked."""


@pytest.mark.parametrize(("kind", "locking"), KINDS)
def test_what_backs_memory_says_how_it_is_locked(tmp_path, kind, locking):
    shared, writable, file = kind
    address, nbytes = mapped(tmp_path, shared=shared, writable=writable, file=file)
    device = SlowDevice()
    try:
        mappings = Mappings()
        for start, length in ((address, nbytes), (address + 5000, 1), (address + nbytes - 1, 1)):
            assert mappings.locking(start, length) is locking
        memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
        locks = PageLocks(device)
        assert locks.lock(memory) == (locking is not Locking.NOT)
        assert list(device.registered) == ([] if locking is Locking.NOT else [address])
        assert bool(device.read_only) == (locking is Locking.READ_ONLY)
        if locking is Locking.NOT:
            assert "private writable mapping of a file" in locks.refused[address]
        locks.close()
    finally:
        libc = ctypes.CDLL(None)
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        assert libc.munmap(address, nbytes) == 0


def test_memory_over_several_mappings_is_locked_as_all_of_them_allow():
    lines = """
1000-3000 rw-p 00000000 00:00 0
3000-5000 rw-p 00000000 00:00 0 [heap]
5000-6000 r--p 00000000 08:01 77 /a file
6000-8000 rw-p 00000000 08:01 77 /a file
"""
    mappings = Mappings(lines.strip())
    assert mappings.locking(0x1000, 0x4000) is Locking.PLAIN
    assert mappings.locking(0x5000, 0x1000) is Locking.READ_ONLY
    assert mappings.locking(0x4FFF, 2) is Locking.NOT
    assert mappings.locking(0x5FFF, 2) is Locking.NOT
    assert mappings.locking(0x9000, 2) is Locking.PLAIN, "not mapped when they were looked up: CUDA says no if it is"


def test_memory_that_a_device_cannot_read_lock_goes_through_the_pool(tmp_path):
    address, nbytes = mapped(tmp_path, shared=True, writable=False, file=True)

    class Without(SlowDevice):
        def register(self, address, nbytes, *, read_only):
            raise TransportError("cannot page-lock memory that is read-only")

    locks = PageLocks(Without())
    memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    assert not locks.lock(memory)
    assert locks.refused == {address: "cannot page-lock memory that is read-only"}


class Card(CudaDevice):
    """A GPU that says what it says of page-locked memory, over what stands for the runtime's calls."""

    def __init__(self, locked, monkeypatch):
        self.device, self.locked = torch.device("cpu"), locked
        self._runtime = SimpleNamespace(
            cudaHostRegister=self._register, cudaHostUnregister=lambda address: 0 if locked.pop(address, None) else 713,
            cudaGetErrorString=lambda _code: "as the test says",
        )  # fmt: skip
        self._library = None
        monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: self._holds(tensor.data_ptr()))

    def _register(self, address, nbytes, _flags):
        if any(address < a + n and a < address + nbytes for a, n in self.locked.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked[address] = nbytes
        return 0

    def _holds(self, address):
        return any(a <= address < a + n for a, n in self.locked.items())


@pytest.fixture
def card(monkeypatch):
    """Makes cards of one process: each engine has its own, and all know of the same locks."""
    monkeypatch.setattr(device, "_registrations", Registrations())
    locked = {}
    return lambda: Card(locked, monkeypatch)


def test_a_lock_is_there_until_the_last_who_asked_for_it_has_let_go(card):
    """Two engines that send the same weights; or a plan that is made anew before the one before has let go."""
    memory = torch.zeros(2 * WORTH_NBYTES, dtype=torch.uint8)
    first, second = card(), card()
    old, new = PageLocks(first), PageLocks(second)
    assert old.lock(memory) and new.lock(memory)
    assert new.locked_nbytes == memory.numel()
    assert old.close() == []
    assert list(first.locked) == [memory.data_ptr()], "the other one still reads it"
    assert new.close() == []
    assert first.locked == {}


def test_what_somebody_else_has_locked_is_left_to_him(card):
    memory = torch.zeros(2 * WORTH_NBYTES, dtype=torch.uint8)
    one = card()
    one.locked[memory.data_ptr()] = memory.numel()
    locks = PageLocks(one)
    assert locks.lock(memory)
    assert locks.locked_nbytes == 0
    locks.close()
    assert one.locked


def test_memory_that_another_engine_has_locked_in_part_goes_through_the_pool(card):
    memory = torch.zeros(4 * WORTH_NBYTES, dtype=torch.uint8)
    part = torch.frombuffer(memory.numpy().data[: 2 * WORTH_NBYTES], dtype=torch.uint8)
    one, other = PageLocks(card()), PageLocks(card())
    assert one.lock(part)
    assert not other.lock(memory)
    assert "page-locked already" in other.refused[memory.data_ptr()]
    inside = torch.frombuffer(memory.numpy().data[WORTH_NBYTES:], dtype=torch.uint8)
    assert not other.lock(inside), "CUDA says of its first byte that it is page-locked: by the other engine"
    assert other.close() == [] and one.close() == []


def test_registrations_count():
    held, calls = Registrations(), []
    page = mmap.PAGESIZE

    def refused():
        raise TransportError("no")

    with pytest.raises(TransportError, match="no"):
        held.add(10 * page, page, refused)
    assert not held.holds(10 * page)
    for _ in range(2):
        held.add(10 * page, page + 1, lambda: calls.append("lock"))
    held.add(2 * page + 5, 10, lambda: calls.append("lock"))
    assert [number for number in range(14) if held.holds(number * page + 7)] == [2, 10, 11]
    for _ in range(2):
        held.remove(10 * page, lambda: calls.append("unlock"))
    assert calls == ["lock", "lock", "unlock"]
    assert not held.holds(10 * page)
    with pytest.raises(TransportError, match="not page-locked"):
        held.remove(10 * page, refused)
