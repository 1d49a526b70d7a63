"""Copies between own tensors and wire memory against numpy, for random strided regions and every element type."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from syncline.scheduler.dtypes import CASTABLE, ITEMSIZE
from syncline.scheduler.errors import PlanError
from syncline.scheduler.programs import Copy, Region
from syncline.stages.copies import CopyPlan, is_contiguous, span_nbytes, torch_dtype

KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@st.composite
def regions(draw, shape, buffer, dtype):
    """Any strided region without overlap: axes in any order, with gaps."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step = step * max(1, shape[axis]) + draw(st.sampled_from([0, 0, 1, 3]))
    return Region(buffer, draw(st.integers(0, 5)), shape, tuple(strides), dtype)


def elements(memory, region):
    """The region in raw bytes, by numpy."""
    kind = np.dtype(KINDS[ITEMSIZE[region.dtype]])
    flat = memory.numpy().view(np.uint8)
    if 0 in region.shape:
        return np.empty(region.shape, kind)
    flat = flat[region.offset * kind.itemsize : region.offset * kind.itemsize + span_nbytes(region)].view(kind)
    return np.lib.stride_tricks.as_strided(flat, region.shape, tuple(s * kind.itemsize for s in region.strides))


def room_for(region, spare=0):
    return region.offset * ITEMSIZE[region.dtype] + span_nbytes(region) + spare


def noise(nbytes, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


@given(data=st.data(), dtype=st.sampled_from(sorted(ITEMSIZE)), seed=st.integers(0, 2**31))
@settings(max_examples=300)
def test_bits_arrive_unchanged_and_nothing_else_is_touched(data, dtype, seed):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    way = data.draw(st.sampled_from(["out", "in", "wire"]))
    src = data.draw(regions(shape, 0 if way == "out" else -1, dtype))
    dst = data.draw(regions(shape, 0 if way == "in" else -1, dtype))
    size = ITEMSIZE[dtype]
    memories = [noise(-(-room_for(r, 8) // size) * size, seed + i) for i, r in enumerate((src, dst))]
    want = memories[1].clone()
    elements(want, dst)[...] = elements(memories[0], src)
    own = memories[0] if way == "out" else memories[1]
    plan = CopyPlan([Copy(src, dst)], [own.view(torch_dtype(dtype))])
    plan.run(src=None if way == "out" else memories[0], dst=None if way == "in" else memories[1])
    assert torch.equal(memories[1], want)
    assert len(plan) == (0 not in shape)


@given(
    data=st.data(),
    types=st.tuples(st.sampled_from(sorted(CASTABLE)), st.sampled_from(sorted(CASTABLE))),
    seed=st.integers(0, 2**31),
)
def test_casts_round_to_nearest_even(data, types, seed):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    src, dst = data.draw(regions(shape, 0, types[0])), data.draw(regions(shape, -1, types[1]))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(room_for(src) // ITEMSIZE[types[0]]) * 10.0 ** rng.integers(-4, 5)
    own = torch.from_numpy(values).to(torch_dtype(types[0]))
    wire = torch.zeros(room_for(dst), dtype=torch.uint8)
    CopyPlan([Copy(src, dst)], [own]).run(dst=wire)
    exact = own.to(torch.float64).numpy()
    taken = np.lib.stride_tricks.as_strided(exact[src.offset :], shape, tuple(s * 8 for s in src.strides))
    got = elements(wire, dst)
    for value, bits in zip(taken.ravel(), got.ravel(), strict=True):
        assert int(bits) == rounded(float(value), types[1])


def rounded(value: float, dtype: str) -> int:
    """The bits of ``value`` in ``dtype``, rounded to nearest even; bfloat16 by hand."""
    if dtype != "bfloat16":
        kind = {"float64": np.float64, "float32": np.float32, "float16": np.float16}[dtype]
        with np.errstate(over="ignore", under="ignore"):
            return int(np.array([value]).astype(kind).view(KINDS[ITEMSIZE[dtype]])[0])
    bits = int(np.array([value], np.float64).astype(np.float32).view(np.uint32)[0])
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def test_adjacent_copies_run_in_order_and_parameters_are_fine():
    own = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    copies = [
        Copy(Region(0, 3, (3,), (1,), "float32"), Region(-1, 64, (3,), (1,), "float32")),
        Copy(Region(0, 0, (2,), (3,), "float32"), Region(-1, 0, (2,), (1,), "float32")),
    ]
    wire = torch.zeros(67 * 4, dtype=torch.uint8)
    CopyPlan(copies, [own]).run(dst=wire)
    assert wire.view(torch.float32)[:2].tolist() == [0.0, 3.0]
    assert wire.view(torch.float32)[64:].tolist() == [3.0, 4.0, 5.0]


def test_offsets_count_from_the_first_element_of_the_registered_tensor():
    own = torch.arange(10.0)[4:]
    wire = torch.zeros(8, dtype=torch.uint8)
    CopyPlan([Copy(Region(0, 1, (2,), (2,), "float32"), Region(-1, 0, (2,), (1,), "float32"))], [own]).run(dst=wire)
    assert wire.view(torch.float32).tolist() == [5.0, 7.0]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(3), "bytes long"),
        (torch.zeros(9, dtype=torch.float64), "has dtype"),
        (torch.zeros(9, device="meta"), "lives on meta"),
    ],
)
def test_buffers_of_another_plan_are_refused(buffer, message):
    copy = Copy(Region(0, 0, (4,), (1,), "float32"), Region(-1, 0, (4,), (1,), "float32"))
    with pytest.raises(PlanError, match=message):
        CopyPlan([copy], [buffer])
    with pytest.raises(PlanError, match="buffer 0"):
        CopyPlan([copy], [])
    with pytest.raises(PlanError, match="shape"):
        CopyPlan([copy._replace(dst=copy.dst._replace(shape=(5,)))], [torch.zeros(4)])


def test_wire_memory_that_is_too_short_or_missing_is_refused():
    plan = CopyPlan([Copy(Region(0, 0, (4,), (1,), "float32"), Region(-1, 1, (4,), (1,), "float32"))], [torch.zeros(4)])
    with pytest.raises(ValueError, match="too short"):
        plan.run(dst=torch.zeros(19, dtype=torch.uint8))
    with pytest.raises(ValueError, match="none"):
        plan.run()
    with pytest.raises(ValueError, match="wire memory is"):
        plan.run(dst=torch.zeros(20))
    plan.run(dst=torch.zeros(20, dtype=torch.uint8))


@given(shape=st.lists(st.integers(0, 3), max_size=4).map(tuple), data=st.data())
def test_contiguity_is_what_torch_says(shape, data):
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    tensor = torch.empty(2000).as_strided(shape, strides)
    assert is_contiguous(shape, strides) == tensor.is_contiguous()
    assert math.prod(shape) == tensor.numel()


def test_names_that_are_no_element_types():
    for name in ("Tensor", "qint8", "nonsense"):
        with pytest.raises((ValueError, AttributeError)):
            torch_dtype(name)
