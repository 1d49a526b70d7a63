"""Whatever the layouts: what lands is what a plain copy of whole tensors gives, byte for byte."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from hypothesis import given, settings, strategies as st

from syncline.scheduler import geometry
from syncline.scheduler.dtypes import ITEMSIZE
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor, flat_boxes
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.scheduler.proof import check_target_program

CASTS = ("float64", "float32", "float16")
OTHERS = ("bfloat16", "int64", "int32", "uint8", "bool", "float8_e4m3fn")


@dataclass
class Draft:
    """A manifest in the making: pieces with memory of their own."""

    tensors: list[Tensor] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def add(self, tensor: int, box: Box, dtype: str, memory: tuple[tuple[int, ...], int, int]) -> None:
        """A piece in a new buffer: its axes stored in ``order``, ``gap`` unused elements a row, ``lead`` before the first."""
        order, gap, lead = memory
        strides, step = [0] * box.ndim, 1
        for place, axis in enumerate(reversed(order)):
            strides[axis] = step
            step *= box.shape[axis] + (gap if place == 0 else 0)
        span = 1 + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) if box.volume else 0
        nbytes, used = (lead + span) * ITEMSIZE[dtype], box.volume * ITEMSIZE[dtype]
        self.buffers.append(Buffer(name=f"b{len(self.buffers)}", nbytes=nbytes, padding=nbytes - used))
        self.pieces.append(
            Piece(tensor=tensor, box=box, buffer=len(self.buffers) - 1, offset=lead, strides=tuple(strides), dtype=dtype)
        )

    def manifest(self, rank: int, world_size: int, host: str, **more: object) -> Manifest:
        return Manifest(
            rank=rank, world_size=world_size, host=host, tensors=self.tensors, pieces=self.pieces, buffers=self.buffers, **more
        )


def chunks(shape: tuple[int, ...], axis: int, parts: int) -> list[Box]:
    """Uneven shards along an axis, the last ones shorter or empty, as ``torch.chunk`` cuts."""
    block = -(-shape[axis] // parts) if shape[axis] else 0
    boxes = []
    for part in range(parts):
        start = min(part * block, shape[axis])
        size = min(block, shape[axis] - start)
        at, extent = [0] * len(shape), list(shape)
        at[axis], extent[axis] = start, size
        boxes.append(Box(start=tuple(at), shape=tuple(extent)))
    return boxes


@st.composite
def guillotine(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """A random exact partition of a box."""
    axes = [d for d, n in enumerate(box.shape) if n > 1]
    if not depth or not axes or draw(st.booleans()):
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.shape[axis] - 1))
    low, high = list(box.shape), list(box.shape)
    low[axis], high[axis] = at, box.shape[axis] - at
    start = list(box.start)
    start[axis] += at
    parts = [Box(start=box.start, shape=tuple(low)), Box(start=tuple(start), shape=tuple(high))]
    return [leaf for part in parts for leaf in draw(guillotine(part, depth - 1))]


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[list[Box]]:
    """Boxes of each rank that together hold all of a tensor."""
    whole = Box.whole(shape)
    ranks = st.integers(0, world - 1)
    kinds = ["whole", "cut", "overlap"] + (["rows", "grid", "flat"] if shape else [])
    kind = draw(st.sampled_from(kinds))
    held: list[list[Box]] = [[] for _ in range(world)]
    if kind == "whole":
        for rank in draw(st.sets(ranks, min_size=1)):
            held[rank].append(whole)
    elif kind == "rows":
        axis = draw(st.integers(0, len(shape) - 1))
        shards = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        for rank in range(world):
            held[rank].append(chunks(shape, axis, shards)[rank % shards])
    elif kind == "grid":
        a, b = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
        outer = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        for rank in range(world):
            first = chunks(shape, a, outer)[rank // (world // outer)]
            inner = chunks(first.shape, b, world // outer)[rank % (world // outer)]
            start = tuple(x + y for x, y in zip(first.start, inner.start, strict=True))
            held[rank].append(Box(start=start, shape=inner.shape))
    elif kind == "flat":
        total = math.prod(shape)
        edges = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        for rank, (a, b) in enumerate(itertools.pairwise([0, *edges, total])):
            held[rank] += flat_boxes(shape, a, b)
    else:
        for box in draw(guillotine(whole)):
            for rank in draw(st.sets(ranks, min_size=1, max_size=2)):
                held[rank].append(box)
        if kind == "overlap":
            held[draw(ranks)].append(whole)
            for box in draw(guillotine(whole)):
                held[draw(ranks)].append(box)
    return held


def memories(box: Box) -> st.SearchStrategy[tuple[tuple[int, ...], int, int]]:
    plain = st.just((tuple(range(box.ndim)), 0, 0))
    return plain | st.tuples(st.permutations(range(box.ndim)).map(tuple), st.integers(0, 3), st.integers(0, 3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Manifest], list[list[Manifest]], dict[str, tuple[tuple[int, ...], str]]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9) | st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=4))
    world = draw(st.integers(1, 6))
    hosts = draw(st.lists(st.sampled_from(["a", "b"]), min_size=world, max_size=world))
    drafts = [Draft() for _ in range(world)]
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    targets = [[Draft() for _ in range(n)] for n in counts]
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for i, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(CASTS + OTHERS))
        name, group = f"layers.{i}.w", draw(st.integers(0, 1))
        tensors[name] = shape, dtype
        for draft, boxes in zip(drafts, draw(placements(shape, world)), strict=True):
            draft.tensors.append(Tensor(name=name, shape=shape, dtype=dtype, group=group))
            for box in boxes:
                draft.add(len(draft.tensors) - 1, box, dtype, draw(memories(box)))
        for target in targets:
            wire = draw(st.sampled_from(CASTS)) if dtype in CASTS else dtype
            for draft, boxes in zip(target, draw(placements(shape, len(target))), strict=True):
                draft.tensors.append(Tensor(name=name, shape=shape, dtype=wire))
                for box in boxes:
                    draft.add(len(draft.tensors) - 1, box, wire, draw(memories(box)))
    sources = [draft.manifest(rank, world, hosts[rank]) for rank, draft in enumerate(drafts)]
    whole = draw(st.booleans())
    served = [
        [d.manifest(r, len(t), f"t{i}", whole_tensors=whole, movable=True) for r, d in enumerate(t)]
        for i, t in enumerate(targets)
    ]
    return sources, served, tensors


OPTIONS = st.builds(
    PlanOptions,
    bucket_bytes=st.sampled_from([1, 40, 300, 1 << 20]),
    max_tmp_bytes=st.just(1 << 20),
    leaf_bytes=st.sampled_from([1, 16, 50, 262144]),
    route=st.sampled_from(["auto", "gather", "direct"]),
    landing=st.sampled_from(["staged", "streamed", "mapped"]),
    shared_landing=st.booleans(),
)


@settings(deadline=None, max_examples=100)
@given(case=cases(), options=OPTIONS, direct_nbytes=st.sampled_from([1, 64 * 1024]))
def test_lands_what_a_plain_copy_gives(sim, case, options, direct_nbytes) -> None:
    sources, targets, tensors = case
    contents = {name: sim.content(name, *facts) for name, facts in tensors.items()}
    with mock.patch.object(geometry, "DIRECT_NBYTES", direct_nbytes):  # small fragments travel unpacked too
        plan = build_plan(sources, targets, options)
    world = sim.World(plan, sources, targets, contents).run()
    for t, manifests in enumerate(targets):
        for manifest in manifests:
            key = (t, manifest.rank)
            for got, want, written in zip(
                world.targets[key].memory, sim.expected_buffers(manifest, contents), world.written[key], strict=True
            ):
                assert bytes(got) == bytes(want)
                assert written.max(initial=0) <= 1
            check_target_program(world.receiving[key], manifest)


@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data(), leaf_bytes=st.sampled_from([1, 16, 50, 262144]))
def test_digest_is_that_of_whole_items_for_any_cut(sim, case, data, leaf_bytes) -> None:
    sources, targets, tensors = case
    contents = {name: sim.content(name, *facts) for name, facts in tensors.items()}
    bucket = data.draw(st.integers(1, 2000))
    options = PlanOptions(bucket_bytes=bucket, max_tmp_bytes=1 << 20, leaf_bytes=leaf_bytes)
    world = sim.World(build_plan(sources, targets, options), sources, targets, contents).run()
    for t, manifests in enumerate(targets):
        for manifest in manifests:
            items = {}
            for piece in manifest.pieces:
                if piece.box.volume:
                    name = manifest.tensors[piece.tensor].name
                    box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                    values = np.asarray(contents[name][box], sim.NUMPY[piece.dtype])
                    items[name, piece.box] = (name, piece.dtype, piece.box, values)
            assert world.digest((t, manifest.rank)) == sim.reference_digest(list(items.values()), leaf_bytes)


@settings(deadline=None, max_examples=40)
@given(case=cases(), options=OPTIONS, data=st.data())
def test_plan_does_not_depend_on_the_order_of_ranks(case, options, data) -> None:
    sources, targets, _ = case
    plan = build_plan(sources, targets, options)
    again = build_plan(data.draw(st.permutations(sources)), [data.draw(st.permutations(t)) for t in targets], options)
    assert again.digest == plan.digest
    assert [again.source_program(r) for r in range(len(sources))] == [plan.source_program(r) for r in range(len(sources))]
    decoded = [Manifest.from_bytes(m.to_bytes()) for m in sources]
    assert build_plan(decoded, targets, options).digest == plan.digest


@settings(deadline=None, max_examples=40)
@given(case=cases(), options=OPTIONS)
def test_landing_space_holds_every_tensor_in_one_run(case, options) -> None:
    sources, targets, _ = case
    plan = build_plan(sources, targets, options)
    for receiver in plan.receivers:
        program = plan.target_program(*receiver)
        taken = np.zeros(program.landing_nbytes, bool)
        places: dict[int, list[tuple[int, int]]] = {}
        shared: dict[int, set[int]] = {}
        for task in program.tasks:
            for landing in task.landings:
                a, b = landing.landing_offset, landing.landing_offset + landing.segment.nbytes
                assert task.landing_offset <= a
                assert b <= task.landing_offset + task.nbytes <= program.landing_nbytes
                assert not taken[a:b].any()
                taken[a:b] = True
                places.setdefault(landing.segment.item, []).append((a, b))
                shared.setdefault(landing.segment.item, set()).add(task.owner)
        for item, runs in places.items():
            runs.sort()
            assert runs[0][0] % 256 == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
            assert options.landing != "mapped" or len(shared[item]) == 1
