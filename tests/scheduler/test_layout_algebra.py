"""Box algebra and strided memory on arrays, against sets of indexes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from syncline.scheduler.regions import clash, join, partition, subtract, volumes
from syncline.scheduler.views import Views, contiguous, meetings


def corners(box: tuple[tuple[int, int], ...]) -> tuple[list[int], list[int]]:
    return [a for a, _ in box], [a + n for a, n in box]


def arrays(rows, depth: int) -> tuple[np.ndarray, np.ndarray]:
    low = np.array([corners(r)[0] for r in rows], np.int64).reshape(len(rows), depth)
    high = np.array([corners(r)[1] for r in rows], np.int64).reshape(len(rows), depth)
    return low, high


def points(low, high) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))))


def box_sets(depth: int, smallest: int = 1) -> st.SearchStrategy:
    axis = st.tuples(st.integers(0, 6), st.integers(smallest, 5))
    return st.lists(st.tuples(*[axis] * depth), max_size=8)


DEPTHS = st.integers(1, 3)


@settings(deadline=None)
@given(DEPTHS.flatmap(lambda d: st.tuples(st.just(d), box_sets(d))))
def test_cells_are_disjoint_and_are_the_union(case) -> None:
    depth, rows = case
    low, high = arrays(rows, depth)
    cells = partition(low, high)
    inside = [points(a, b) for a, b in zip(cells.lo, cells.hi, strict=True)]
    assert sum(map(len, inside)) == len(set().union(*inside))
    assert set().union(*inside) == set().union(*(points(a, b) for a, b in zip(low, high, strict=True)))
    pairs = set(zip(cells.cell.tolist(), cells.box.tolist(), strict=True))
    assert len(pairs) == len(cells.cell)
    for c, held in enumerate(inside):
        for b in range(len(rows)):
            meets = held & points(low[b], high[b])
            assert ((c, b) in pairs) == bool(meets)
            assert not meets or meets == held


def test_equal_boxes_and_grids_come_out_uncut() -> None:
    grid = [((i * 3, 3), (j * 2, 2)) for i in range(4) for j in range(5)]
    cells = partition(*arrays(grid * 2, 2))
    assert len(cells.lo) == 20
    assert np.bincount(cells.cell).tolist() == [2] * 20


def test_ten_thousand_shards_are_cut_quickly_enough_to_be_tested() -> None:
    low = np.stack([np.arange(10_000) * 3, np.zeros(10_000, np.int64)], axis=1)
    high = low + np.array([3, 7])
    cells = partition(low, high)
    assert len(cells.lo) == 10_000
    pairs = join(low, high, cells.lo, cells.hi)
    assert np.array_equal(pairs.a, pairs.b)


@settings(deadline=None)
@given(DEPTHS.flatmap(lambda d: st.tuples(st.just(d), box_sets(d, 0), box_sets(d))))
def test_join_finds_every_intersection(case) -> None:
    depth, first, second = case
    a, b = arrays(first, depth), arrays(second, depth)
    pairs = join(*a, *b)
    found = {(i, j): points(lo, hi) for i, j, lo, hi in zip(*(c.tolist() if c.ndim == 1 else c for c in pairs), strict=True)}
    for i, j in itertools.product(range(len(first)), range(len(second))):
        common = points(a[0][i], a[1][i]) & points(b[0][j], b[1][j])
        assert found.get((i, j), set()) == common


@settings(deadline=None)
@given(DEPTHS.flatmap(lambda d: st.tuples(st.just(d), box_sets(d, 0))))
def test_clash_finds_two_boxes_with_a_common_element(case) -> None:
    depth, rows = case
    low, high = arrays(rows, depth)
    sets = [points(a, b) for a, b in zip(low, high, strict=True)]
    pair = clash(low, high)
    if pair is None:
        assert sum(map(len, sets)) == len(set().union(*sets))
    else:
        assert pair[0] != pair[1]
        assert sets[pair[0]] & sets[pair[1]]


@settings(deadline=None)
@given(
    DEPTHS.flatmap(
        lambda d: st.tuples(st.just(d), box_sets(d), st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 5))] * d))
    )
)
def test_what_is_left_is_a_box_that_no_cell_holds(case) -> None:
    depth, rows, whole = case
    cells = partition(*arrays(rows, depth))
    low, high = arrays([whole], depth)
    wanted = points(low[0], high[0])
    held = set().union(*(points(a, b) for a, b in zip(cells.lo, cells.hi, strict=True)))
    if wanted <= held:
        return
    gap_low, gap_high = subtract(low, high, cells.lo, cells.hi)
    gap = points(gap_low, gap_high)
    assert gap
    assert gap <= wanted
    assert gap - held


@st.composite
def view_sets(draw: st.DrawFn) -> Views:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
        if draw(st.booleans()):  # axes of one matrix of 4 x 4 x 4 elements, in any order
            strides = draw(st.permutations([16, 4, 1]))
        else:
            strides = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
        rows.append((draw(st.integers(0, 1)), draw(st.integers(0, 20)), shape, strides, draw(st.sampled_from([1, 2, 4]))))
    buffer, offset, shape, strides, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Views(buffer, offset, shape, strides, size)


def bytes_of(views: Views, row: int) -> list[tuple[int, int]]:
    shape, strides = views.shape[row].tolist(), views.strides[row].tolist()
    size, offset = int(views.itemsize[row]), int(views.offset[row])
    places = (
        offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))
    )
    return [(int(views.buffer[row]), place * size + byte) for place in places for byte in range(size)]


@settings(deadline=None, max_examples=300)
@given(view_sets())
def test_views_meet_where_they_have_a_byte_in_common(views) -> None:
    every = [bytes_of(views, row) for row in range(len(views.offset))]
    found = meetings(views)
    for meeting in found:
        assert meeting.proved
        if meeting.a == meeting.b:
            assert len(set(every[meeting.a])) < len(every[meeting.a])
        else:
            assert set(every[meeting.a]) & set(every[meeting.b])
    if not found:
        flat = list(itertools.chain.from_iterable(every))
        assert len(set(flat)) == len(flat)


@settings(deadline=None, max_examples=200)
@given(view_sets())
def test_contiguous_views_are_runs_in_order(views) -> None:
    for row, claimed in enumerate(contiguous(views.shape, views.strides).tolist()):
        shape, strides = views.shape[row].tolist(), views.strides[row].tolist()
        places = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]
        assert claimed == (places == list(range(len(places))))


def test_interleaved_halves_of_a_large_matrix_are_told_apart_without_enumeration() -> None:
    rows, columns = 1 << 15, 1 << 13
    views = Views(
        np.zeros(2, np.int64),
        np.array([0, 1]),
        np.array([[rows, columns // 2]] * 2),
        np.array([[columns, 2]] * 2),
        np.array([2, 2]),
    )
    assert meetings(views) == []
    touching = views._replace(offset=np.array([0, 2]), shape=views.shape - 1)
    assert [(m.a, m.b, m.proved) for m in meetings(touching)] == [(0, 1, True)]
    assert volumes(np.zeros((1, 2), np.int64), views.shape[:1]).tolist() == [rows * columns // 2]
