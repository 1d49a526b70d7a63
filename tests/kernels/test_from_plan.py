"""Tasks of the plan through kernels are what the CPU stages make of them: same bytes, same digest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from syncline.scheduler.errors import PlanError
from syncline.scheduler.layout import Box
from syncline.scheduler.programs import Copy, Landing, Leaves, Message, Region, Segment, SourceTask, TargetTask
from syncline.stages.assembly import Assembly, LandingCopies, row_major
from syncline.stages.copies import torch_dtype
from syncline.stages.kernels import assemble, from_plan, land

QUICK = [Phase.explicit, Phase.reuse, Phase.generate]


def aligned(nbytes: int) -> torch.Tensor:
    room = torch.zeros(nbytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


class World:
    """One bucket: each segment's rows come partly from the rank's own tensor and partly by message."""

    def __init__(self, data) -> None:
        self.buffers: list[torch.Tensor] = []
        self.messages: list[torch.Tensor] = []
        self.segments: list[Segment] = []
        self.local: list[Copy] = []
        self.receives: list[Message] = []
        self.nbytes = 0
        for number in range(data.draw(st.integers(1, 3))):
            self._add(data, number)

    def _add(self, data, number: int) -> None:
        shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
        source, wire = data.draw(
            st.sampled_from([("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("int64", "int64")])
        )
        order = data.draw(st.permutations(range(len(shape))))
        nbytes = math.prod(shape) * torch_dtype(wire).itemsize
        leaves = Leaves(item_uid=number, first=1, blocks=1, block_nbytes=nbytes, leaf_nbytes=2**18)
        box = Box(start=(0,) * len(shape), shape=shape)
        self.segments.append(
            Segment(item=number, name=f"t{number}", box=box, dtype=wire, offset=self.nbytes, nbytes=nbytes, leaves=leaves)
        )
        whole = torch.randn(shape).mul(100).to(torch_dtype(source))
        held = whole.permute(order).contiguous()
        self.buffers.append(held)
        strides = [0] * len(shape)
        for axis, stride in zip(order, held.stride(), strict=True):
            strides[axis] = stride
        cut = data.draw(st.integers(0, shape[0]))
        step = row_major(shape)
        mine, theirs = (cut, *shape[1:]), (shape[0] - cut, *shape[1:])
        first = self.nbytes // torch_dtype(wire).itemsize
        if cut:
            self.local.append(Copy(Region(number, 0, mine, tuple(strides), source), Region(-1, first, mine, step, wire)))
        if cut < shape[0]:
            packed = whole[cut:].contiguous().to(torch_dtype(wire)).view(-1)
            self.messages.append(packed.view(torch.uint8))
            copy = Copy(Region(-1, 0, theirs, row_major(theirs), wire), Region(-1, first + cut * step[0], theirs, step, wire))
            self.receives.append(Message(peer=1, tag=number, nbytes=packed.nbytes, copies=(copy,)))
        self.nbytes += -(-nbytes // 256) * 256

    def task(self) -> SourceTask:
        return SourceTask(
            index=0, group=0, owner=0, nbytes=self.nbytes, tmp_bytes=0, landing_offset=0,
            segments=tuple(self.segments), local=tuple(self.local), receives=tuple(self.receives),
        )  # fmt: skip


@given(data=st.data())
@settings(max_examples=15, phases=QUICK)
def test_a_task_is_assembled_as_on_the_cpu(data) -> None:
    world = World(data)
    task, expected = world.task(), aligned(world.nbytes)
    cpu = Assembly(task, task.local, (), world.buffers)
    digest = cpu.fill(expected, None, verify=True)
    for number, message in enumerate(world.messages):
        cpu.unpack(number, message, expected)
    digest = (digest + cpu.finish(expected, None, verify=True)) % 2**128
    places = [sum(-(-len(m) // 256) * 256 for m in world.messages[:i]) for i in range(len(world.messages) + 1)]
    room = aligned(places[-1])
    for at, message in zip(places, world.messages, strict=False):
        room[at : at + len(message)] = message
    for backend in ("triton", "torch") if assemble.INTERPRETED else ("torch",):
        bucket = aligned(world.nbytes)
        kernels = assemble.BucketKernels(from_plan.parts_of(task, world.buffers, places[:-1]), bucket.device, backend=backend)
        assert assemble.read_digest(assemble.assemble(bucket, kernels, given=room)) == digest
        assert torch.equal(bucket, expected)
    check_landing(data, world, expected)


def check_landing(data, world: World, bucket: torch.Tensor) -> None:
    landings, tensors = [], []
    for number, segment in enumerate(world.segments):
        shape = segment.box.shape
        order = data.draw(st.permutations(range(len(shape))))
        tensor = torch.zeros([shape[axis] for axis in order], dtype=torch_dtype(segment.dtype))
        strides = [0] * len(shape)
        for axis, stride in zip(order, tensor.stride(), strict=True):
            strides[axis] = stride
        tensors.append(tensor)
        region = Region(number, 0, shape, tuple(strides), segment.dtype)
        landings.append(Landing(segment=segment, dests=(region,), pieces=(number,), landing_offset=0, shared_offset=0))
    task = TargetTask(index=0, owner=0, nbytes=world.nbytes, landing_offset=0, shared_offset=0, landings=tuple(landings))
    digest = LandingCopies(task, tensors).run_and_digest(bucket)
    expected = [tensor.clone() for tensor in tensors]
    for backend in ("triton", "torch") if assemble.INTERPRETED else ("torch",):
        for tensor in tensors:
            tensor.zero_()
        kernels = land.LandingKernels(from_plan.landings_of(task, tensors), bucket.device, backend=backend)
        assert land.read_landed(land.land(bucket, kernels)) == (digest, True)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(
    ("buffer", "message"), [(torch.zeros(4, dtype=torch.float16), "float16"), (torch.zeros(3), "shorter"), (None, "buffer 0")]
)
def test_other_buffers_than_those_planned_are_refused(buffer, message) -> None:
    region = Region(0, 0, (4,), (1,), "float32")
    leaves = Leaves(item_uid=0, first=0, blocks=1, block_nbytes=16, leaf_nbytes=64)
    segment = Segment(item=0, name="t", box=Box(start=(0,), shape=(4,)), dtype="float32", offset=0, nbytes=16, leaves=leaves)
    copy = Copy(region, Region(-1, 0, (4,), (1,), "float32"))
    task = SourceTask(index=0, group=0, owner=0, nbytes=16, tmp_bytes=0, landing_offset=0, segments=(segment,), local=(copy,))
    with pytest.raises(PlanError, match=message):
        from_plan.parts_of(task, [] if buffer is None else [buffer])
