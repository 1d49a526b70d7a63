"""The receiver's own proof of its program, from nothing but the program and its own manifest.

A receiver gets its program from the source. Before it lets anything be written it checks that every element of every one
of its pieces is written exactly once, where it belongs, from bytes that lie within buckets and landing space.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from .columns import ints
from .coverage import check_written_once, tied_place
from .dtypes import ITEMSIZE
from .layout import Box, Manifest, Piece
from .problems import Problems, listed
from .programs import Landing, Region, Segment, TargetProgram
from .regions import clash

Span = tuple[int, int]


def check_target_program(program: TargetProgram, manifest: Manifest) -> None:
    """Prove that ``program`` writes every element of every piece of ``manifest`` exactly once.

    Pieces of names that the manifest declares optional, and of those that the program says are out of scope, may stay
    unwritten, but not be written in part.

    Raises:
        PlanError: with everything that is wrong.
    """
    problems = Problems()
    if program.receiver.rank != manifest.rank:
        problems.add(f"the program is for rank {program.receiver.rank}; this is rank {manifest.rank}")
    _check_places(program, problems)
    content = tied_place(manifest.layout, frozenset(manifest.aliases.items()))
    first_of: dict[str, int] = {}
    written: dict[int, list[Box]] = defaultdict(list)
    pieces: dict[int, Piece] = {}
    for landing in (landing for task in program.tasks for landing in task.landings):
        for index, dest in zip(landing.pieces, landing.dests, strict=False):
            if not 0 <= index < len(manifest.pieces):
                problems.add(f"{landing.segment.name}: lands in piece {index}; the manifest has {len(manifest.pieces)}")
                continue
            piece = pieces.setdefault(index, manifest.pieces[index])
            if not _fits(landing.segment, dest, piece):
                problems.add(f"{landing.segment.name}: its box {landing.segment.box} does not land in its place in {piece}")
            written[index].append(landing.segment.box)
            content[piece.tensor] = content[first_of.setdefault(landing.segment.name, piece.tensor)]
    _check_pieces(program, manifest, written, problems)
    check_written_once(manifest.layout, content, f"rank {manifest.rank}", problems)
    problems.check()


def _fits(segment: Segment, dest: Region, piece: Piece) -> bool:
    """Whether a segment's box lands where the piece has it, in the piece's type."""
    if segment.box.ndim != piece.box.ndim or not piece.box.contains(segment.box):
        return False
    place = segment.box.relative_to(piece.box.start).start
    offset = piece.offset + sum(i * s for i, s in zip(place, piece.strides, strict=True))
    mine = Region(piece.buffer, offset, segment.box.shape, piece.strides, piece.dtype)
    return dest == mine and segment.dtype == piece.dtype and segment.nbytes == segment.box.volume * ITEMSIZE[piece.dtype]


def _check_pieces(program: TargetProgram, manifest: Manifest, written: dict[int, list[Box]], problems: Problems) -> None:
    """Each piece is the disjoint union of the boxes that land in it, or excused."""
    excused = manifest.optional | frozenset(program.skipped)
    names, volumes = manifest.tensors.names, manifest.pieces.shape.prod(axis=1).tolist()
    unwritten: list[str] = []
    for index, (tensor, volume) in enumerate(zip(manifest.pieces.tensor.tolist(), volumes, strict=True)):
        boxes = written.get(index, [])
        if not boxes and (not volume or names[tensor] in excused):
            continue
        low, high = (ints(np.array(corners)) for corners in ([b.start for b in boxes], [b.stop for b in boxes]))
        if len(boxes) > 1 and (pair := clash(low, high)):
            problems.add(f"{names[tensor]}: boxes {boxes[pair[0]]} and {boxes[pair[1]]} are written to the same elements")
        if sum(box.volume for box in boxes) < volume:
            unwritten.append(names[tensor])
    if unwritten:
        problems.add(f"the program leaves elements unwritten of {listed(unwritten)}")


def _check_places(program: TargetProgram, problems: Problems) -> None:
    """Segments lie within buckets, buckets within landing space, and none of them on another."""
    indexes = [task.index for task in program.tasks]
    if sorted(set(indexes)) != indexes:
        problems.add("the program's tasks are not in plan order")
    shared = dict(zip(program.owners, program.shared_nbytes, strict=False))
    for task in program.tasks:
        where = f"task {task.index}"
        _check_apart(
            ((b.segment.offset, b.segment.nbytes) for b in task.landings), task.nbytes, f"segments of {where}", problems
        )
        for landing in task.landings:
            _check_landing(landing, task.landing_offset, task.shared_offset, where, problems)
        if not 0 <= task.nbytes <= program.bucket_nbytes:
            problems.add(f"{where} has {task.nbytes} bytes; buckets have at most {program.bucket_nbytes}")
        if not 0 <= task.shared_offset <= shared.get(task.owner, -1) - task.nbytes:
            problems.add(f"{where} lies beyond the landing space of its owner {task.owner}")
        others = {task.via, *task.onward} - {None}
        if program.receiver.rank in others or (task.via is not None and task.onward):
            problems.add(f"{where} comes from rank {task.via} and goes on to ranks {list(task.onward)}")
    spans = ((task.landing_offset, task.nbytes) for task in program.tasks)
    _check_apart(spans, program.landing_nbytes, "buckets in landing space", problems)


def _check_landing(landing: Landing, private: int, shared: int, where: str, problems: Problems) -> None:
    segment, leaves = landing.segment, landing.segment.leaves
    if landing.landing_offset != private + segment.offset or landing.shared_offset != shared + segment.offset:
        problems.add(f"{segment.name}: lies elsewhere in landing space than in the bucket of {where}")
    if not landing.pieces or len(landing.pieces) != len(landing.dests):
        problems.add(f"{segment.name}: lands in {len(landing.pieces)} pieces but {len(landing.dests)} places in {where}")
    if leaves.blocks * leaves.block_nbytes != segment.nbytes or leaves.leaf_nbytes < 1:
        problems.add(f"{segment.name}: its digest leaves do not cover it in {where}")


def _check_apart(spans: Iterable[Span], limit: int, what: str, problems: Problems) -> None:
    rows = np.array(sorted(spans), np.int64).reshape(-1, 2)
    ends = rows.sum(axis=1)
    if len(rows) and (rows[0, 0] < 0 or ends.max() > limit or (rows[1:, 0] < ends[:-1]).any()):
        problems.add(f"{what} overlap or reach beyond their {limit} bytes")
