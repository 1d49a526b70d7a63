"""CUDA's own part of CUDA IPC and NCCL: handles, events and refusals, in this process and another one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from syncline.stages.cudart import CudaIpc, device_uuid, ordinal_of
from syncline.stages.errors import TransportError
from syncline.stages.ipc import EventHandle, Exports

OTHER = """
import sys, msgspec, torch
from syncline.stages.cudart import CudaIpc
from syncline.stages.ipc import EventHandle, Imports, MemoryHandle, Place
data = bytes.fromhex(sys.stdin.readline())
handles, place, event = msgspec.msgpack.decode(data, type=tuple[list[MemoryHandle], Place, EventHandle])
runtime = CudaIpc(torch.device("cuda"))
imports = Imports(runtime)
imports.open(handles)
view = imports.view(place)
opened = runtime.open_event(event)
while not opened.query():
    pass
print(int(view.sum()), imports.opened, imports.closed, flush=True)
view.add_(1)
torch.cuda.synchronize()
del view
imports.close()
print(imports.opened, imports.closed, flush=True)
"""


def test_memory_and_events_are_seen_in_another_process():
    runtime = CudaIpc(torch.device("cuda"))
    exports = Exports(runtime)
    memory = runtime.allocate(1 << 20)
    part = memory[4096:8192]
    part.fill_(3)
    torch.cuda.synchronize()
    place = exports.place(part)
    event = runtime.make_event()
    runtime.record(event)
    shown = EventHandle(device=runtime.uuid, handle=runtime.export_event(event))
    data = msgspec.msgpack.encode((exports.handles, place, shown)).hex()
    done = subprocess.run([sys.executable, "-c", OTHER], input=data + "\n", capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == [str(3 * 4096), "1", "0", "1", "1"]
    assert int(part.sum()) == 4 * 4096
    assert int(memory.sum()) == 4 * 4096
    exports.close()


def test_a_new_thread_may_export_before_it_does_anything_else():
    """What is lent is looked up on a worker, often as the first that it does: such a thread has no context yet."""
    runtime = CudaIpc(torch.device("cuda"))
    exports, memory = Exports(runtime), torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with ThreadPoolExecutor(1) as fresh:
        place = fresh.submit(exports.place, memory).result(30)
    assert (place.allocation, place.nbytes, len(exports.handles)) == (0, 1 << 20, 1)
    exports.close()


def test_devices_are_known_by_what_they_are():
    for index in range(torch.cuda.device_count()):
        assert ordinal_of(device_uuid(torch.device("cuda", index))) == index
    assert ordinal_of(bytes(16)) is None


def test_memory_of_the_host_is_refused():
    with pytest.raises(TransportError, match="own device only"):
        Exports(CudaIpc(torch.device("cuda"))).place(torch.zeros(10, dtype=torch.uint8))


def test_expandable_segments_are_refused_with_the_remedy():
    code = """
import torch
from syncline.stages.cudart import CudaIpc
from syncline.stages.errors import TransportError
from syncline.stages.ipc import Exports
try:
    Exports(CudaIpc(torch.device("cuda"))).place(torch.zeros(1 << 22, dtype=torch.uint8, device="cuda"))
except TransportError as error:
    print(error)
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "expandable" in done.stdout, done.stderr
    assert "PYTORCH_CUDA_ALLOC_CONF" in done.stdout
