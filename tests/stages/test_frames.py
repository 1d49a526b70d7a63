"""How buckets are cut into messages: every byte of every segment in one of them, large segments alone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from syncline.scheduler.layout import Box
from syncline.scheduler.programs import ALIGN, Leaves, Segment
from syncline.stages.frames import FRAME_NBYTES, Frame, frames

LEAVES = Leaves(item_uid=0, first=0, blocks=1, block_nbytes=1, leaf_nbytes=1)


def segments_of(sizes: list[int]) -> list[Segment]:
    found, at = [], 0
    for number, nbytes in enumerate(sizes):
        box = Box(start=(0,), shape=(nbytes,))
        found.append(Segment(item=number, name=f"t{number}", box=box, dtype="uint8", offset=at, nbytes=nbytes, leaves=LEAVES))
        at += -(-nbytes // ALIGN) * ALIGN
    return found


SIZES = st.lists(st.sampled_from([0, 1, 255, 4096, FRAME_NBYTES - 1, FRAME_NBYTES, 3 * FRAME_NBYTES]), max_size=12)


@given(SIZES)
@settings(deadline=None)
def test_every_segment_is_in_one_message(sizes: list[int]) -> None:
    segments = segments_of(sizes)
    cut = frames(segments, sum(sizes))
    assert all(a.start + a.nbytes <= b.start for a, b in pairwise(cut))
    for segment in segments:
        inside = [f for f in cut if f.start <= segment.offset and segment.offset + segment.nbytes <= f.start + f.nbytes]
        assert len(inside) == 1 or segment.nbytes == 0
        if segment.nbytes >= FRAME_NBYTES:
            assert inside == [Frame(segment.offset, segment.nbytes, alone=True)]
    assert sum(not frame.alone for frame in cut) <= 1 + sum(frame.alone for frame in cut)


def test_a_bucket_of_unknown_content_is_one_message() -> None:
    assert frames([], 700) == (Frame(0, 700, alone=False),)
    assert frames([], 0) == ()
