"""Plans of quantized weights: parts end where groups do, scales lie behind their codes, and no cut changes a digest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from syncline.scheduler.errors import PlanError
from syncline.scheduler.formats import parse_format
from syncline.scheduler.layout import Box, Buffer, Manifest, Piece, Tensor, row_major
from syncline.scheduler.leaves import leaf_grid, split
from syncline.scheduler.plan import PlanOptions, build_plan
from syncline.scheduler.proof import check_target_program

SIZES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
FORMATS = ["fp8_e4m3:128x128", "fp8_e4m3:16x8", "fp8_e4m3:8x16:pow2", "fp8_e4m3:channel", "fp8_e4m3:tensor"]


def manifest(rank, world, held, *, host="h", **options):
    """``held``: name -> (shape, dtype, boxes)."""
    tensors = [Tensor(name=name, shape=shape, dtype=dtype) for name, (shape, dtype, _) in held.items()]
    pieces, buffers = [], []
    for index, (name, (_, dtype, boxes)) in enumerate(held.items()):
        for box in boxes:
            strides = row_major(box.shape)
            pieces.append(Piece(tensor=index, box=box, buffer=len(buffers), offset=0, strides=strides, dtype=dtype))
            buffers.append(Buffer(name=name, nbytes=box.volume * SIZES[dtype]))
    return Manifest(rank=rank, world_size=world, host=host, tensors=tensors, pieces=pieces, buffers=buffers, **options)


def cut(size, places):
    """Ranges between places."""
    edges = [0, *sorted({p for p in places if 0 < p < size}), size]
    return list(itertools.pairwise(edges))


def sources(shapes, world, axis, edges):
    ranks = []
    for rank in range(world):
        held = {}
        for name, shape in shapes.items():
            ranges = cut(shape[axis], [edge * shape[axis] // 97 for edge in edges[: world - 1]])
            boxes = []
            if rank < len(ranges):
                start, size = [0, 0], list(shape)
                start[axis], size[axis] = ranges[rank][0], ranges[rank][1] - ranges[rank][0]
                boxes = [Box(start=tuple(start), shape=tuple(size))]
            held[name] = (shape, "bfloat16", boxes)
        ranks.append(manifest(rank, world, held))
    return ranks


def targets(shapes, how, ranks, axis):
    """A target of ``ranks`` ranks, each with the groups that are its own along ``axis``."""
    found = []
    for rank in range(ranks):
        held = {}
        for name, shape in shapes.items():
            group, grid = how.group(shape), how.scale_shape(shape)
            groups = -(-shape[axis] // group[axis])
            first, last = groups * rank // ranks, groups * (rank + 1) // ranks
            start, size = [0, 0], list(shape)
            start[axis] = first * group[axis]
            size[axis] = min(last * group[axis], shape[axis]) - start[axis]
            held[name] = (shape, "float8_e4m3fn", [Box(start=tuple(start), shape=tuple(size))] if last > first else [])
            low, high = [0] * len(grid), list(grid)
            if len(grid) > axis and grid[axis] > 1:
                low[axis], high[axis] = first, last - first
            box = Box(start=tuple(low), shape=tuple(high))
            held[how.scale_name(name)] = (grid, "float32", [box] if last > first else [])
        found.append(manifest(rank, ranks, held))
    return found


@st.composite
def worlds(draw):
    wire_format = draw(st.sampled_from(FORMATS))
    how = parse_format(wire_format)
    size = st.sampled_from([1, 7, 8, 15, 16, 17, 40, 127, 128, 129, 192, 300])
    shapes = {f"m{i}.weight": (draw(size), draw(size)) for i in range(draw(st.integers(1, 3)))}
    world, axis = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    edges = sorted(draw(st.lists(st.integers(1, 96), min_size=2, max_size=2)))
    tp_axis = draw(st.integers(0, 1)) if how.grouping == "block" else 0
    ranks = draw(st.integers(1, 2)) if how.grouping != "tensor" else 1
    landing = draw(st.sampled_from(["staged", "streamed"]))
    options = {
        "route": draw(st.sampled_from(["auto", "direct", "gather"])), "landing": landing, "wire_format": wire_format,
        "leaf_bytes": draw(st.sampled_from([64, 1000, 4096])), "max_tmp_bytes": 1 << 22,
    }  # fmt: skip
    return sources(shapes, world, axis, edges), targets(shapes, how, ranks, tp_axis), options, how


def leaves_of(program):
    """Every digest leaf of a receiver: the seed's parts, and what bytes of which item it covers."""
    found, first = {}, {}
    for task in program.tasks:
        for landing in task.landings:
            segment, uid = landing.segment, landing.segment.leaves.item_uid
            first[uid] = min(first.get(uid, segment.box.start), segment.box.start)
    for task in program.tasks:
        for landing in task.landings:
            segment, leaves = landing.segment, landing.segment.leaves
            width = segment.box.shape[-1] if segment.box.shape else 1
            rows = segment.box.start[0] - first[leaves.item_uid][0] if segment.box.shape else 0
            at = rows * (width if len(segment.box.shape) > 1 else 1) * SIZES[segment.dtype]
            number = leaves.first
            for _ in range(leaves.blocks):
                end = at + leaves.block_nbytes
                while at < end:
                    stop = min(at + leaves.leaf_nbytes, end)
                    assert found.setdefault((leaves.item_uid, number), (at, stop)) == (at, stop)
                    at, number = stop, number + 1
    return found


def check_segments(program, how):
    """Codes begin and end where groups do, and their scales follow in the same bucket."""
    for task in program.tasks:
        quantized = {one.codes: one for one in task.quantized}
        for number, segment in enumerate(task.segments):
            if segment.dtype != "float8_e4m3fn":
                continue
            one, scales = quantized[number], task.segments[number + 1]
            assert (one.scales, one.format, scales.name) == (number + 1, how.name, how.scale_name(segment.name))
            (row, column), (rows, columns) = segment.box.start, segment.box.shape
            down, across = how.group(SHAPES_OF[segment.name])
            assert row % down == 0
            assert column % across == 0
            assert scales.nbytes == 4 * -(-rows // down) * -(-columns // across)
        copies = [*task.local, *(copy for message in task.receives for copy in message.copies)]
        assert all(copy.src.dtype == "bfloat16" for copy in copies), "what is quantized is gathered as it is"


SHAPES_OF = {}


@given(worlds())
@settings(max_examples=40, deadline=None)
def test_parts_end_where_groups_do_whatever_buckets_hold(world):
    ranks, receivers, options, how = world
    SHAPES_OF.update({tensor.name: tensor.shape for tensor in ranks[0].tensors})
    seen, tasks = [], []
    for bucket_bytes in (1, 3000, 1 << 20):
        plan = build_plan(ranks, [receivers], PlanOptions(bucket_bytes=bucket_bytes, **options))
        for rank in range(len(ranks)):
            check_segments(plan.source_program(rank), how)
        programs = [plan.target_program(0, rank) for rank in range(len(receivers))]
        for program, receiver in zip(programs, receivers, strict=True):
            check_target_program(program, receiver)
        seen.append([leaves_of(program) for program in programs])
        tasks.append(plan.total_tasks)
    assert seen[0] == seen[1] == seen[2], "the digest's leaves are the same however the plan is cut"
    assert tasks[0] >= tasks[2]


@given(
    shape=st.tuples(st.integers(1, 400), st.integers(1, 200)), rows=st.sampled_from([0, 1, 8, 16, 128, 400]),
    leaf_bytes=st.integers(1, 5000), limit=st.integers(1, 50_000),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_matrices_are_cut_between_groups_of_rows(shape, rows, leaf_bytes, limit):
    grid = leaf_grid(shape, 1, leaf_bytes, rows=rows)
    parts = split(grid, limit)
    assert sum(part.nbytes for part in parts) == shape[0] * shape[1]
    ends = 0
    for part in parts:
        assert part.offset == ends, "parts lie one behind the other"
        ends += part.nbytes
        assert part.blocks * part.block_nbytes == part.nbytes
        if rows:
            assert part.box.start[0] % rows == 0
            assert part.box.shape[1] == shape[1]
            assert part.nbytes <= max(limit, grid.part_rows * shape[1])


def whole(shapes, dtype):
    return {name: (shape, dtype, [Box.whole(shape)]) for name, shape in shapes.items()}


def test_direct_routes_keep_groups_together():
    """A cut at the source's shards is taken where groups end there; where they don't, one rank gathers the weight."""
    shapes, how = {"a.weight": (256, 64), "b.weight": (256, 64)}, parse_format("fp8_e4m3:128x128")
    held = [{}, {}]
    for name, edge in (("a.weight", 128), ("b.weight", 100)):
        held[0][name] = (shapes[name], "bfloat16", [Box(start=(0, 0), shape=(edge, 64))])
        held[1][name] = (shapes[name], "bfloat16", [Box(start=(edge, 0), shape=(256 - edge, 64))])
    ranks = [manifest(rank, 2, one) for rank, one in enumerate(held)]
    plan = build_plan(
        ranks, [targets(shapes, how, 1, 0)], PlanOptions(bucket_bytes=1 << 20, max_tmp_bytes=1 << 22, route="direct")
    )
    assert {part.owner for part in plan.explain("a.weight").parts} == {0, 1}
    assert all(part.why is None for part in plan.explain("a.weight").parts)
    assert [part.why for part in plan.explain("b.weight").parts] == ["groups"]
    assert {part.owner for part in plan.explain("a.weight_scale_inv").parts} == {0, 1}


def test_two_targets_may_not_want_two_formats_of_a_weight():
    shapes = {"a.weight": (256, 64)}
    both = [targets(shapes, parse_format(name), 1, 0) for name in ("fp8_e4m3:128x128", "fp8_e4m3:channel")]
    with pytest.raises(PlanError, match="one push makes one format of a weight"):
        build_plan([manifest(0, 1, whole(shapes, "bfloat16"))], both, PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20))


def test_one_format_more_is_another_plan():
    shapes = {"a.weight": (256, 256)}
    one, other = ("fp8_e4m3:128x128", "fp8_e4m3:128x128:pow2")
    target = targets(shapes, parse_format(one), 1, 0)
    source = [manifest(0, 1, whole(shapes, "bfloat16"))]
    plans = [
        build_plan(source, [target], PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20, wire_format=name))
        for name in (one, other)
    ]
    assert plans[0].digest != plans[1].digest


def test_scales_out_of_scope_are_missed():
    shapes = {"a.weight": (256, 64)}
    target = targets(shapes, parse_format("fp8_e4m3:128x128"), 1, 0)
    options = PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20, scope=frozenset({"a.weight"}))
    with pytest.raises(PlanError, match="without its scale"):
        build_plan([manifest(0, 1, whole(shapes, "bfloat16"))], [target], options)


@pytest.mark.parametrize("kind", ["float64", "int32"])
def test_only_floats_are_quantized(kind):
    SIZES.update({"float64": 8, "int32": 4})
    shapes = {"a.weight": (256, 64)}
    target = targets(shapes, parse_format("fp8_e4m3:128x128"), 1, 0)
    with pytest.raises(PlanError, match="would take a quantization rule"):
        build_plan([manifest(0, 1, whole(shapes, kind))], [target], PlanOptions(bucket_bytes=4096, max_tmp_bytes=1 << 20))
